"""Texts as token numbers, token 0 for padding: by the tokenizer of a pretrained network, or by hashed words.

Without a tokenizer, the number of a word is a hash of it (feature hashing: Weinberger et al., ICML 2009), so that no
vocabulary is made from the clients' texts and new texts need no file. Different words may share a number. Texts are
brought to Unicode's form NFC first, so that two spellings of the same letter have one number.
"""

import functools
import re
import unicodedata
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.errors import UserError

TOKENIZER = "tokenizer.json"
WORDS = 8192  # numbers of hashed words, with that of padding

# Scripts that are written without spaces between words: Han, Hiragana, Katakana, Thai, Lao, Khmer and Myanmar.
_UNSPACED = (
    "\u2e80-\u2fdf\u3005\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
    "\u3041-\u309f\u30a0-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001aff0-\U0001b16f"
    "\u0e00-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f"
)
_WITH_MARKS = (range(0x300, 0x20000), range(0xE0100, 0xE01F0))  # the other planes have no combining marks
_ASCII = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
_JOINERS = "\u200c\u200d"  # characters of width zero inside Persian and Indic words


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
        rows, vocabulary = [[hashed(word) for word in words(text)] for text in texts], WORDS
    else:
        encoder = _tokenizer(Path(tokenizer), length)
        rows, vocabulary = _numbered(encoder, texts, Path(tokenizer))
    for numbers, row in zip(x, rows, strict=True):
        numbers[: min(len(row), length)] = row[:length]
    return x, vocabulary


def words(text: str) -> list[str]:
    """Split a text into its words in lower case and its other characters.

    Combining marks belong to the letter before them. Scripts without spaces between words are split into letters.
    """
    if text.isascii():  # the larger pattern finds the same words, more slowly
        return _ASCII.findall(text.lower())
    return _pattern().findall(unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower()))


@functools.cache
def _pattern() -> re.Pattern[str]:
    """A letter of a script without spaces, a word of another script, or another character.

    The pattern lists the combining marks, because Python's pattern of a letter leaves them out.
    """
    marks = [code for codes in _WITH_MARKS for code in codes if unicodedata.category(chr(code)).startswith("M")]
    starts = [code for before, code in zip([-1, *marks], marks, strict=False) if code != before + 1]
    ends = [code for code, after in zip(marks, [*marks[1:], -1], strict=True) if after != code + 1]
    mark = "".join(f"{chr(first)}-{chr(last)}" for first, last in zip(starts, ends, strict=True))
    part = rf"(?![{_UNSPACED}])\w(?:(?![{_UNSPACED}])[\w{mark}{_JOINERS}])*"
    return re.compile(rf"[{_UNSPACED}][{mark}]*|{part}(?:['\u2019]{part})*|[^\w\s]")


def _numbered(encoder: Any, texts: list[str], folder: Path) -> tuple[list[list[int]], int]:
    """The numbers of the tokens of each text, and how many different ones the tokenizer has.

    Raises:
      UserError: the tokenizer fails, or its numbers are not below the size of its vocabulary.
    """
    try:
        rows, vocabulary = [each.ids for each in encoder.encode_batch(texts)], encoder.get_vocab_size()
    except Exception as error:  # tokenizers raises no other class
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{folder / TOKENIZER} cannot number these texts ({reason})") from None
    if (largest := max(map(max, filter(None, rows)), default=0)) >= vocabulary:
        raise UserError(f"{folder / TOKENIZER} is damaged: token {largest} is outside its vocabulary of {vocabulary:,}")
    return rows, vocabulary


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
