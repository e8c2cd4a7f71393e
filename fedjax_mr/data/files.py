"""Files that appear whole or not at all, however suddenly the process dies or the power fails."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedjax_mr.errors import UserError

# Windows opens no folders, and some network file systems cannot sync one; there nothing more can be done for its names.
_NO_SYNC_OF_FOLDERS = {errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOTSUP}


CHECKSUM = "checksum"  # the first entry of a JSON table that has one, so that its line can be removed


@contextlib.contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` with its suffix; rename it to ``path`` unless the block fails.

    The content is on the disk before it gets its name, and the name when the block has ended.

    Raises:
      UserError: the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        temporary.unlink(missing_ok=True)  # a link of this name would lead the writing elsewhere
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
    """Return the package's folder in the user's cache, which may be deleted at any time; None if the user has no home.

    Containers often run as a user without an entry in the user database and without HOME.
    """
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "fedjax_mr"
    try:
        return Path.home() / ".cache" / "fedjax_mr"
    except RuntimeError:
        return None


def expanded(path: Path | str) -> Path:
    """Return a path with the home folder in place of its ``~``.

    Raises:
      UserError: the user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: the home folder is unknown; set HOME, or give the whole path") from None


def sync(path: Path | str) -> None:
    """Return once the content of a file, or the names in a folder, would outlast a power failure.

    Raises:
      OSError: it cannot be written to the disk.
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
    """`sync` all that a folder holds, and then its own list of names.

    Raises:
      OSError: something cannot be written to the disk.
    """
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(place)


def make_folder(path: Path | str) -> list[Path]:
    """Make a folder and those above it; return the ones that were not there, deepest first.

    Raises:
      OSError: it cannot be made.
    """
    path, made = Path(path), []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        made.append(folder)
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        sync(folder.parent)
    return made


def refuse_links(folder: Path | str) -> None:
    """Check that a run folder holds no symbolic links, neither in itself nor in its direct subfolders.

    Through a link in somebody else's run folder we would write, rename and remove files outside of it.

    Raises:
      UserError: it holds one, or cannot be listed.
    """
    try:
        names = sorted(Path(folder).iterdir()) if os.path.isdir(folder) else []
        for path in names:
            inside = sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
            if found := [each for each in (path, *inside) if each.is_symlink()]:
                raise UserError(
                    f"{found[0]} is a symbolic link, and a run folder must hold its files itself: replace the link "
                    "by a copy of its target, or remove it"
                )
    except OSError as error:
        raise UserError(f"cannot read {folder} ({error.strerror})") from None


def read_text(path: Path | str) -> str:
    """Return the text of an ordinary file; reading a named pipe would wait for somebody who writes into it.

    Raises:
      OSError: there is no such file, or it is something else.
      ValueError: it is not UTF-8.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return path.read_text(encoding="utf-8")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
      ValueError: it is not JSON, or nested more deeply than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON table with a checksum of its other entries; `unsealed` compares it."""
    return {CHECKSUM: _checksum_of(values), **values}


def unsealed(values: Any) -> dict[str, Any]:
    """Return a JSON table without its checksum; tables of version 0.2 and before have none.

    Raises:
      ValueError: it is no table, or its entries are not those that were written.
    """
    if not isinstance(values, dict):
        raise ValueError("it is no table of values")
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
    """Return the SHA-256 of an ordinary file, or None if there is none."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
