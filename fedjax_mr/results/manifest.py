"""Manifests: the checksums of the files of a checkpoint or of a run folder, compared when a file is read.

Fills: disks and copies change bytes unnoticed, and neither orbax nor TensorStore detects every one. A checksum is a
CRC-32, which finds damage and edits. It does not stop anybody who computes it anew.

``manifest.json`` holds ``{"content": {"files": {NAME: CRC, ...}, ...}, "checksum": CRC of the content}``. A file that
it does not name is not checked, and a folder of version 0.3.0 or earlier has none, so its files are read as they are.
To change a file on purpose, remove the manifest.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_mr import untrusted
from fedjax_mr.errors import UserError

MANIFEST = "manifest.json"
REMEDY = "put back the whole file, or start anew with --overwrite"


class DamageError(Exception):
    """A file differs from the one that was written."""


def text_of(files: Mapping[str, int], **content: Any) -> str:
    """The text of a manifest: the checksums of files by name, and other values that JSON represents."""
    content = {"files": dict(files), **content}
    return json.dumps({"content": content, "checksum": _crc_of(content)})


def checksums(folder: Path) -> dict[str, int]:
    """The checksums of all files in a folder and below it, by name."""
    return {str(path.relative_to(folder)): crc(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def read(folder: Path, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the content of a folder's manifest.

    Args:
      folder: the folder.
      schema: the schemas of the values beside ``files`` (see `untrusted`).

    Raises:
      DamageError: it is missing or damaged.
    """
    schema = {"content": {"files": {str: int}, **(schema or {})}, "checksum": int}
    try:
        manifest = untrusted.parse_json(untrusted.read_text(folder / MANIFEST), schema)
    except FileNotFoundError:
        raise DamageError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise DamageError(f"{MANIFEST} cannot be read: {' '.join(str(error).split())}") from None
    if manifest["checksum"] != _crc_of(manifest["content"]):
        raise DamageError(f"{MANIFEST} was changed")
    return manifest["content"]


def fault(folder: Path, content: Mapping[str, Any], name: str) -> str | None:
    """How a file differs from the content of a manifest, such as "was changed". None if it does not, or is not named.

    Of a file that grows, such as ``metrics.jsonl``, ``sizes`` has the number of bytes that are compared.
    """
    if name not in content["files"]:
        return None
    try:
        checksum = crc(folder / name, content.get("sizes", {}).get(name))
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return None if checksum == content["files"][name] else "was changed"


def read_run(folder: Path) -> dict[str, Any]:
    """Read the content of a run folder's manifest. Without one, no file is compared.

    Raises:
      UserError: it is damaged.
    """
    if not (folder / MANIFEST).exists():
        return {"files": {}}
    try:
        return read(folder, {"sizes?": {str: int}})
    except DamageError as error:
        raise UserError(f"{folder} is damaged ({error}): remove this file if all others are as they were") from None


def require_unchanged(folder: Path | str, *names: str) -> None:
    """Compare files of a run folder with its manifest. Missing files are no error.

    Raises:
      UserError: a file has changed since it was written, or the manifest is damaged.
    """
    folder = Path(folder)
    content = read_run(folder)
    for name in names:
        if (folder / name).exists() and (reason := fault(folder, content, name)):
            raise UserError(
                f"{folder / name} is damaged (it {reason}): {REMEDY}; if the change was intended, remove {MANIFEST}"
            )


def crc(path: Path, size: int | None = None) -> int:
    """The CRC-32 of the first ``size`` bytes of a regular file. Default: of all.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not a regular file. Reading a named pipe would never end.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    checksum, left = 0, path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            checksum, left = zlib.crc32(block, checksum), left - len(block)
    return checksum


def _crc_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
