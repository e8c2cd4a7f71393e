"""Reading of .npz files that may be damaged or forged."""

import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
MOST_COMPRESSED = 1032  # to one: deflate's limit


def read(path: Path) -> dict[str, Any]:
    """Return all arrays of a file.

    Nothing is unpickled, and no memory is taken for more values than the file holds.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is empty, truncated, damaged, or holds something other than plain arrays.
    """
    with open(path, "rb") as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                entries = archive.infolist()
                if any(entry.file_size > MOST_COMPRESSED * path.stat().st_size for entry in entries):
                    raise ValueError("a size in its list of contents is impossible")
                return {entry.filename.removesuffix(".npy"): _array(archive, entry) for entry in entries}
        except zipfile.BadZipFile as error:
            raise ValueError(f"no whole .npz file: {_brief(error)}") from None
        except MemoryError:
            raise ValueError("more values than the memory holds") from None
        except (
            OSError,
            ValueError,
            EOFError,
            KeyError,
            RuntimeError,
            OverflowError,
            struct.error,
            zlib.error,
        ) as error:
            raise ValueError(_brief(error)) from None  # RuntimeError: encrypted, or compressed in an unknown way


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """Return one array, whose header must fit the size of its entry."""
    with archive.open(entry) as member:
        return read_array(member, name=entry.filename, size=entry.file_size)


def read_array(stream: IO[bytes], *, name: str, size: int) -> np.ndarray:
    """Return the array of .npy data, whose header must fit their size: no memory is taken for more values.

    Args:
      stream: from the first byte to the last, seekable.
      name: of the array, for errors.
      size: bytes of the stream.

    Raises:
      ValueError: the header is damaged or of another size, or the array holds no plain numbers or texts.
    """
    shape, dtype = _header(stream)
    start = stream.tell()
    if dtype.hasobject or dtype.names:
        raise ValueError(f"{name} holds Python objects or records, no plain numbers or texts")
    if start + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name} says {dtype} of shape {shape}, but has {size - start} bytes")
    stream.seek(0)
    return npy.read_array(stream, allow_pickle=False)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = npy.read_magic(member)
    if version not in HEADERS:
        raise ValueError(f"an array of format {version}")
    try:
        shape, _, dtype = HEADERS[version](member)
    except Exception as error:  # NumPy's parser of Python literals raises many kinds
        raise ValueError(f"a damaged header: {_brief(error)}") from None
    return shape, dtype


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
