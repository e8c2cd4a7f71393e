"""Atomic writes: a file is complete or does not exist, even if the process is killed or the power fails."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedjax_mr.errors import UserError

# Windows cannot open a folder, and some network file systems cannot sync one; then its list of names is not synced.
_NO_SYNC_OF_FOLDERS = {errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOTSUP}

CHECKSUM = "checksum"  # the first entry of a JSON object, so that a user can remove its line


@contextlib.contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` with the same suffix, and rename it to ``path`` unless the block raises.

    The content reaches the disk before the rename, and the name before this function returns.

    Raises:
      UserError: the file cannot be written.
    """
    path = Path(path)
    # Containers that share a folder may have equal process ids, and a link with a known name would redirect the write.
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def cache_folder() -> Path | None:
    """The package's folder in the user's cache, which may be deleted at any time. None without a home folder.

    Users in containers often have neither an entry in the user database nor HOME.
    """
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "fedjax_mr"
    try:
        return Path.home() / ".cache" / "fedjax_mr"
    except RuntimeError:
        return None


def expand_home(path: Path | str) -> Path:
    """Replace ``~`` in a path by the home folder.

    Raises:
      UserError: the home folder is unknown.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: the home folder is unknown; set HOME, or use an absolute path") from None


def sync(path: Path | str) -> None:
    """Flush the content of a file, or the names in a folder, to the disk.

    Raises:
      OSError: the disk cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (os.path.isdir(path) and error.errno in _NO_SYNC_OF_FOLDERS):
            raise


def sync_tree(folder: Path | str) -> None:
    """Flush a folder and everything in it to the disk.

    Raises:
      OSError: the disk cannot be written.
    """
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(place)


def make_folder(path: Path | str) -> list[Path]:
    """Create a folder and its parents, and return the new ones, deepest first.

    Raises:
      OSError: a folder cannot be created.
    """
    path, created = Path(path), []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        created.append(folder)
    path.mkdir(parents=True, exist_ok=True)
    for folder in created:
        sync(folder.parent)
    return created


def refuse_links(folder: Path | str) -> None:
    """Check that a folder and its direct subfolders contain no symbolic links.

    A link in a folder from another person could make us write, rename or remove files outside of it.

    Raises:
      UserError: there is a link, or the folder cannot be listed.
    """
    try:
        names = sorted(Path(folder).iterdir()) if os.path.isdir(folder) else []
        for path in names:
            inside = sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
            if links := [each for each in (path, *inside) if each.is_symlink()]:
                raise UserError(
                    f"{links[0]} is a symbolic link, which is not allowed in {folder}: replace the link by a copy of "
                    "its target, or remove it"
                )
    except OSError as error:
        raise UserError(f"cannot read {folder} ({error.strerror})") from None


def with_checksum(values: dict[str, Any]) -> dict[str, Any]:
    """Add a checksum of all entries to a JSON object; `without_checksum` compares it."""
    return {CHECKSUM: _checksum_of(values), **values}


def without_checksum(values: Any) -> dict[str, Any]:
    """Verify the checksum of a JSON object and return the object without it; version 0.2 and earlier wrote none.

    Raises:
      ValueError: the value is not an object, or its entries have changed.
    """
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    content = {name: value for name, value in values.items() if name != CHECKSUM}
    if CHECKSUM in values and values[CHECKSUM] != _checksum_of(content):
        raise ValueError(
            f'its values do not fit its checksum: put back the file as it was, or remove the line "{CHECKSUM}" if the '
            "change was intended"
        )
    return content


def _checksum_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def checksum(path: Path | str) -> str | None:
    """The SHA-256 of a regular file, or None if it does not exist."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
