"""A reader for .npz files that may be damaged or malicious."""

import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
MOST_COMPRESSED = 1032  # the largest compression ratio of deflate


def read(path: Path) -> dict[str, Any]:
    """Read all arrays of a file.

    Nothing is unpickled, and no more memory is allocated than the values in the file need.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is empty, truncated or damaged, or contains anything but plain arrays.
    """
    with open(path, "rb") as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                entries = archive.infolist()
                if any(entry.file_size > MOST_COMPRESSED * path.stat().st_size for entry in entries):
                    raise ValueError("its directory has an entry of impossible size")
                return {entry.filename.removesuffix(".npy"): _array(archive, entry) for entry in entries}
        except zipfile.BadZipFile as error:
            raise ValueError(f"no complete .npz file: {_brief(error)}") from None
        except MemoryError:
            raise ValueError("more values than fit into memory") from None
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
    """Read one array, whose header must match the size of its entry."""
    with archive.open(entry) as member:
        return read_array(member, name=entry.filename, size=entry.file_size)


def read_array(stream: IO[bytes], *, name: str, size: int) -> np.ndarray:
    """Read an array in .npy format. Its header must match the size of the data before memory is allocated.

    Args:
      stream: the data from first to last byte, seekable.
      name: name of the array in errors.
      size: bytes of the stream.

    Raises:
      ValueError: the header is damaged or does not match the size, or the values are not plain numbers or texts.
    """
    shape, dtype = _header(stream)
    start = stream.tell()
    if dtype.hasobject or dtype.names:
        raise ValueError(f"{name} holds Python objects or records instead of plain numbers or texts")
    if start + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name} should be {dtype} of shape {shape}, but has {size - start} bytes")
    stream.seek(0)
    return npy.read_array(stream, allow_pickle=False)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = npy.read_magic(member)
    if version not in HEADERS:
        raise ValueError(f"unknown format {version} of an array")
    try:
        shape, _, dtype = HEADERS[version](member)
    except Exception as error:  # NumPy's parser of Python literals raises many kinds
        raise ValueError(f"a damaged header: {_brief(error)}") from None
    return shape, dtype


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
