"""Texts as token numbers, token 0 for padding: by the tokenizer of a pretrained network, by hashed words, or by bytes.

Without a tokenizer, the number of a word is a hash of it (feature hashing: Weinberger et al., ICML 2009), so that no
vocabulary is made from the clients' texts and new texts need no file. Different words may share a number. Texts are
brought to Unicode's form NFC first, so that two spellings of the same letter have one number.

Tokens of a tokenizer or of bytes can be turned back into a text (`decode`), those of hashed words cannot.
"""

import functools
import re
import unicodedata
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr import files, gguf_files
from fedjax_mr.data import chat
from fedjax_mr.errors import UserError

TOKENIZER = "tokenizer.json"
BYTES = "bytes"  # the tokenizer whose tokens are the bytes of UTF-8, plus one
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
      tokenizer: a folder with `TOKENIZER` in the format of Hugging Face, a GGUF file, or `BYTES`. Default: hashed
        words.

    Returns:
      The numbers [M, T] int32, and how many different ones there may be.

    Raises:
      UserError: the tokenizer is missing, damaged, or does not pad with 0; its package is not installed; a text is no
        string; or the length is not positive.
    """
    rows, vocabulary = numbered(texts, tokenizer, _checked(length))
    return padded(rows, length), vocabulary


def encode_answers(
    prompts: Sequence[str], texts: Sequence[str], *, length: int = 48, tokenizer: str | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Number the tokens of prompts and of the texts that answer them, in the chat template of the tokenizer.

    Args:
      prompts: M texts.
      texts: M texts.
      length: T, see `encode`.
      tokenizer: see `encode`. One without a chat template has a line break between the two.

    Returns:
      The numbers [M, T] int32, how many of them belong to the prompt [M], and how many different ones there may be.

    Raises:
      UserError: as `encode`, or a prompt leaves no room for its answer.
    """
    pairs = chat.rendered(tokenizer, prompts, texts)
    (before, vocabulary), (after, _) = (numbered(each, tokenizer) for each in zip(*pairs, strict=True))
    sizes = np.array([len(row) for row in before], np.int32)
    if (longest := int(sizes.max(initial=0))) >= _checked(length):
        raise UserError(f"a prompt of {longest} tokens leaves no room for its answer: set text_length= above {longest}")
    return padded([[*one, *other] for one, other in zip(before, after, strict=True)], length), sizes, vocabulary


def encode_joined(
    texts: Sequence[str], owners: Sequence[Any], *, length: int = 48, tokenizer: str | None = None
) -> tuple[np.ndarray, list[Any], int]:
    """Join the texts of each owner by line breaks, and cut their tokens into rows of T without padding.

    Consecutive rows share one token, so that each token but the first is once the next one of another. The last row of
    an owner is padded.

    Args:
      texts: M texts.
      owners: [M] any values; equal ones are the same owner.
      length: T, see `encode`.
      tokenizer: see `encode`.

    Returns:
      The numbers [R, T] int32, the owner of each row [R], and how many different numbers there may be.

    Raises:
      UserError: as `encode`.
    """
    joined: dict[Any, list[str]] = {}
    for owner, text in zip(owners, texts, strict=True):
        joined.setdefault(owner, []).append(text)
    rows, vocabulary = numbered(["\n".join(each) for each in joined.values()], tokenizer)
    step = max(1, _checked(length) - 1)
    cut = [
        (owner, row[first : first + length])
        for owner, row in zip(joined, rows, strict=True)
        for first in range(0, max(1, len(row) - 1), step)
    ]
    return padded([row for _, row in cut], length), [owner for owner, _ in cut], vocabulary


def numbered(texts: Sequence[str], tokenizer: str | None, length: int | None = None) -> tuple[list[list[int]], int]:
    """The numbers of the tokens of each text, and how many different ones there may be.

    With a ``length``, a tokenizer cuts longer texts so that the separator at their end remains.

    Raises:
      UserError: as `encode`.
    """
    if wrong := [row for row, text in enumerate(texts) if not isinstance(text, str)]:
        raise UserError(f"text {wrong[0]} is a {type(texts[wrong[0]]).__name__}, not a string")
    # Half of a surrogate pair, as in a text that was cut within an emoji, has no UTF-8: it becomes a question mark.
    texts = [text.encode(errors="replace").decode() for text in texts]
    if tokenizer is None:
        return [[hashed(word) for word in words(text)] for text in texts], WORDS
    if tokenizer == BYTES:
        return [[1 + byte for byte in text.encode()] for text in texts], 257
    encoder, place = opened(tokenizer), _place(tokenizer)
    if length is not None:
        encoder.enable_truncation(length)  # it keeps the separator at the end
    return _numbered(encoder, texts, place)


def decode(row: Sequence[int], tokenizer: str | None) -> str:
    """The text of token numbers, without padding and special tokens. Incomplete characters become U+FFFD.

    Raises:
      UserError: the tokens are hashed words, or as `encode`.
    """
    if tokenizer is None:
        raise UserError("hashes of words cannot be turned back into words: train with --tokenizer or --pretrained")
    if tokenizer == BYTES:
        return bytes(number - 1 for number in row if number > 0).decode(errors="replace")
    return opened(tokenizer).decode([number for number in row if number > 0])


def special(tokenizer: str | None) -> list[int]:
    """The numbers of special tokens, such as the end of a text, and of padding. Raises a UserError: as `encode`."""
    if tokenizer in (None, BYTES):
        return [0]
    return [0, *(number for number, each in opened(tokenizer).get_added_tokens_decoder().items() if each.special)]


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Rows of numbers, cut to T or padded at the end with 0, as [M, T] int32."""
    x = np.zeros((len(rows), length), np.int32)
    for numbers, row in zip(x, rows, strict=True):
        numbers[: min(len(row), length)] = row[:length]
    return x


def _checked(length: int) -> int:
    if length < 1:
        raise UserError(f"length={length}: a text needs at least one token")
    return length


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


def _numbered(encoder: Any, texts: list[str], place: Path) -> tuple[list[list[int]], int]:
    """The numbers of the tokens of each text, and how many different ones the tokenizer has.

    Raises:
      UserError: the tokenizer fails, or its numbers are not below the size of its vocabulary.
    """
    try:
        rows, vocabulary = [each.ids for each in encoder.encode_batch(texts)], encoder.get_vocab_size()
    except Exception as error:  # tokenizers raises no other class
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{place} cannot number these texts ({reason})") from None
    if (largest := max(map(max, filter(None, rows)), default=0)) >= vocabulary:
        raise UserError(f"{place} is damaged: token {largest} is outside its vocabulary of {vocabulary:,}")
    return rows, vocabulary


def hashed(word: str) -> int:
    """The number of a word, from 1 to `WORDS` - 1."""
    return 1 + zlib.crc32(word.encode()) % (WORDS - 1)


def _place(tokenizer: str) -> Path:
    return Path(tokenizer) if gguf_files.is_gguf(tokenizer) else Path(tokenizer) / TOKENIZER


def source_of(tokenizer: str | None) -> list[Path]:
    """The file on which the numbers depend, if there is one."""
    return [place] if tokenizer not in (None, BYTES) and (place := _place(tokenizer)).is_file() else []


def opened(tokenizer: str) -> Any:
    """The tokenizer of a folder or a GGUF file: a ``tokenizers.Tokenizer`` without padding and truncation.

    Raises:
      UserError: it is missing, damaged, or does not pad with 0, or its package is not installed.
    """
    try:
        import tokenizers  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "the tokenizer of pretrained networks needs tokenizers: pip install 'fedjax-mr[text]'"
        ) from None
    path = _place(tokenizer)
    if gguf_files.is_gguf(path):
        found: Any = _of_gguf(tokenizers, path)
    else:
        if not path.is_file():
            raise UserError(f"{path.parent} has no {TOKENIZER}, which numbers the tokens of texts")
        try:
            found = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no other class
            raise UserError(f"{path} is damaged or of another kind ({' '.join(str(error).split())[:120]})") from None
    first = found.id_to_token(0) or ""
    if not any(word in first.lower() for word in ("pad", "endoftext")):  # neither stands inside a text
        raise UserError(f"{path}: token 0 is {found.id_to_token(0)!r}, but it must be padding")
    found.no_padding()
    found.no_truncation()
    return found


_CONTROL = 3  # the kind of tokens such as <|im_start|> in GGUF


def _of_gguf(tokenizers: Any, path: Path) -> Any:
    """A tokenizer by pairs of bytes, from its tokens and merges in a GGUF file.

    Raises:
      UserError: the file is damaged, or its tokenizer is of another kind.
    """
    prefix = "tokenizer.ggml."
    fields = gguf_files.read_fields(
        path, *(prefix + name for name in ("model", "pre", "tokens", "merges", "token_type"))
    )
    kind, pre = fields.get(f"{prefix}model"), fields.get(f"{prefix}pre", "default")
    digits = {"smollm": [tokenizers.pre_tokenizers.Digits(individual_digits=True)], "gpt-2": []}.get(pre)
    if kind != "gpt2" or digits is None:
        raise UserError(f"{path} has a tokenizer {kind} ({pre}): only gpt2 (smollm or gpt-2) is known")
    try:
        names = fields[f"{prefix}tokens"]
        merges = [tuple(each.split(" ")) for each in fields[f"{prefix}merges"]]
        found = tokenizers.Tokenizer(tokenizers.models.BPE({name: n for n, name in enumerate(names)}, merges))
        kinds = fields.get(f"{prefix}token_type", [])
        found.add_special_tokens([name for name, each in zip(names, kinds, strict=False) if each == _CONTROL])
    except Exception as error:  # tokenizers raises no other class
        raise UserError(f"{path}: its tokenizer is damaged ({' '.join(str(error).split())[:120]})") from None
    bytes_of = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*digits, bytes_of])
    found.decoder = tokenizers.decoders.ByteLevel()
    return found


def save(tokenizer: str, folder: Path) -> None:
    """Write a tokenizer as `TOKENIZER`, and its chat template, into a folder.

    Raises:
      UserError: as `opened`.
    """
    found = opened(tokenizer)
    with files.atomic_write(folder / TOKENIZER) as new:
        found.save(str(new))
    chat.save(tokenizer, folder)
