"""Texts as token numbers, token 0 for padding: by the tokenizer of a pretrained network, or by hashed words.

Without a tokenizer, the number of a word is a hash of it (feature hashing: Weinberger et al., ICML 2009), so that no
vocabulary is made from the clients' texts and new texts need no file. Different words may share a number.
"""

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.errors import UserError

TOKENIZER = "tokenizer.json"
WORDS = 8192  # numbers of hashed words, with that of padding
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")


def encode(texts: Sequence[str], *, length: int = 48, tokenizer: str | None = None) -> tuple[np.ndarray, int]:
    """Number the tokens of texts.

    Args:
      texts: M texts.
      length: T. Longer texts are cut, shorter ones padded at the end with 0.
      tokenizer: a folder with `TOKENIZER` in the format of Hugging Face. Default: hashed words.

    Returns:
      The numbers [M, T] int32, and how many different ones there may be.

    Raises:
      UserError: the tokenizer is missing, damaged, or does not pad with 0; its package is not installed; a text is no
        string; or the length is not positive.
    """
    if length < 1:
        raise UserError(f"length={length}: a text needs at least one token")
    if wrong := [row for row, text in enumerate(texts) if not isinstance(text, str)]:
        raise UserError(f"text {wrong[0]} is a {type(texts[wrong[0]]).__name__}, not a string")
    # Half of a surrogate pair, as in a text that was cut within an emoji, has no UTF-8: it becomes a question mark.
    texts = [text.encode(errors="replace").decode() for text in texts]
    x = np.zeros((len(texts), length), np.int32)
    if tokenizer is None:
        rows, vocabulary = [[hashed(word) for word in _WORD.findall(text.lower())] for text in texts], WORDS
    else:
        encoder = _tokenizer(Path(tokenizer), length)
        rows, vocabulary = [each.ids for each in encoder.encode_batch(texts)], encoder.get_vocab_size()
    for numbers, row in zip(x, rows, strict=True):
        numbers[: min(len(row), length)] = row[:length]
    return x, vocabulary


def hashed(word: str) -> int:
    """The number of a word, from 1 to `WORDS` - 1."""
    return 1 + zlib.crc32(word.encode()) % (WORDS - 1)


def _tokenizer(folder: Path, length: int) -> Any:
    try:
        import tokenizers  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "the tokenizer of pretrained networks needs tokenizers: pip install 'fedjax-mr[text]'"
        ) from None
    path = folder / TOKENIZER
    if not path.is_file():
        raise UserError(f"{folder} has no {TOKENIZER}, which numbers the tokens of texts")
    try:
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other class
        raise UserError(f"{path} is damaged or of another kind ({' '.join(str(error).split())[:120]})") from None
    if "pad" not in (tokenizer.id_to_token(0) or "").lower():
        raise UserError(f"{path}: token 0 is {tokenizer.id_to_token(0)!r}, but it must be padding")
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)  # it keeps the separator at the end
    return tokenizer
