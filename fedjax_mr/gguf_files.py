"""GGUF: one file with the weights and the tokenizer of a language model, the format of llama.cpp (extra ``text``)."""

from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.errors import UserError

SUFFIX = ".gguf"


def is_gguf(path: Path | str) -> bool:
    """Whether a path has the suffix of such files."""
    return Path(path).suffix == SUFFIX


def read_fields(path: Path | str, *names: str) -> dict[str, Any]:
    """The facts of a file by name: numbers, texts and lists. Those that it lacks are absent.

    Raises:
      UserError: the file is missing or damaged, or the package gguf is not installed.
    """
    reader = _opened(Path(path))
    return {name: reader.fields[name].contents() for name in names if name in reader.fields}


def read_tensors(path: Path | str) -> dict[str, np.ndarray]:
    """The tensors of a file by name, float32, dequantised.

    Raises:
      UserError: as `read_fields`, or a tensor has a quantisation that the package cannot undo.
    """
    from gguf import dequantize  # pyright: ignore[reportMissingImports]

    path = Path(path)
    tensors = {}
    for each in _opened(path).tensors:
        try:
            tensors[each.name] = np.array(dequantize(each.data, each.tensor_type), np.float32)
        except Exception as error:  # gguf and NumPy raise many kinds for the bytes that a file may have
            reason = " ".join(str(error).split())[:120]
            raise UserError(f"{path}: the tensor {each.name} cannot be read ({reason})") from None
    return tensors


def _opened(path: Path) -> Any:
    try:
        from gguf import GGUFReader  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("files of GGUF need the package gguf: pip install 'fedjax-mr[text]'") from None
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        return GGUFReader(path)
    except Exception as error:  # see read_tensors
        raise UserError(f"{path} is damaged or no GGUF file ({' '.join(str(error).split())[:120]})") from None
