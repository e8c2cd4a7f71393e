"""Locks that prevent two runs, of one process or of two, from using one folder at the same time.

They are those of ``flock``, which belong to a descriptor. A lock of ``lockf`` belongs to the process: closing any other
descriptor of the file would release it.
"""

import errno
import fcntl
import os
from pathlib import Path

from fedjax_mr.errors import TakenError, UserError


def is_taken(folder: Path | str) -> bool:
    """Whether a run uses a folder.

    Raises:
      UserError: the folder cannot be written.
    """
    if not Path(folder).is_dir():
        return False
    try:
        os.close(lock(Path(folder)))
    except TakenError:
        return True
    return False


def lock(path: Path) -> int:
    """Lock a run folder. The lock lasts until the returned file descriptor is closed.

    Raises:
      UserError: the folder cannot be written.
      TakenError: another run uses it.
    """
    descriptor = lock_file(path / ".lock")
    if not (path / ".lock").exists():  # a rejected run has just removed its lock
        os.close(descriptor)
        raise TakenError(f"another run was at work in {path}: try again")
    return descriptor


def lock_file(path: Path) -> int:
    """Lock a file, created if necessary. The lock lasts until the returned file descriptor is closed.

    Raises:
      UserError: the file cannot be written.
      TakenError: it is locked already.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UserError(f"cannot write into {path.parent} ({error.strerror})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            raise TakenError(f"another run is at work in {path.parent}") from None
        # Some network file systems have no locks; the run continues without one.
    return descriptor
