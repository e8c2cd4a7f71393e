"""What a real client keeps on its own disk: the federation's facts, and its memory by round.

A round may be asked for twice: a reply was lost, or the server goes on from an older checkpoint. So the memory after a
round is a file of that round, and a request says with which one it begins. The last two stay. Files appear whole or not
at all, and one process at a time is at work in the folder. A trained model tells of its samples: only the user who runs
the client can read the folder (modes 0700 and 0600).
"""

import fcntl
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.data import files, npz
from fedjax_mr.deploy import wire
from fedjax_mr.errors import UserError

_NAME = re.compile(r"[0-9a-f]{1,64}")


class Keep:
    """A client's folder of one run; a context, inside which no other process uses it."""

    def __init__(self, folder: Path | str, run: str) -> None:
        """Name the folder; nothing is read yet.

        Args:
          folder: the client's own, of all its runs.
          run: the run's name, which comes from the server.

        Raises:
          UserError: no run has such a name.
        """
        if not _NAME.fullmatch(run):
            raise UserError(f"{run[:80]!r} is no name of a run")
        self.folder = Path(folder) / run

    def __enter__(self) -> "Keep":
        """Wait for the folder.

        Raises:
          UserError: it cannot be written.
        """
        try:
            for made in files.make_folder(self.folder):
                made.chmod(0o700)
            self.folder.chmod(0o700)  # also one of version 0.2.0, whose files others could read
            self._lock = open(os.open(self.folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o600), "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(f"cannot write into {self.folder} ({error.strerror})") from None
        return self

    def __exit__(self, *error: object) -> None:
        """Let the folder go."""
        self._lock.close()

    def write(self, name: str, record: wire.Record) -> None:
        """Write arrays under a name."""
        with files.atomic_write(self.folder / f"{name}.npz") as path:
            arrays: dict[str, Any] = {key: np.asarray(value) for key, value in record.items()}
            np.savez(path, **arrays)
            path.chmod(0o600)

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays under a name.

        Raises:
          UserError: they are not there, or damaged.
        """
        path = self.folder / f"{name}.npz"
        try:
            return npz.read(path)
        except FileNotFoundError:
            raise UserError(f"{path} is gone, which this client needs to go on with the run") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    def memory(self, round: int, like: Any) -> Any:
        """Return the client's memory after a round.

        Raises:
          UserError: it is not there, damaged, or of another shape.
        """
        name = f"memory-{round}"
        return wire.unpack(self.read(name), like, who=str(self.folder / name), finite=False)

    def keep_memory(self, round: int, memory: Any, *, before: int) -> None:
        """Keep the memory after a round, and that with which the round began; the others go."""
        self.write(f"memory-{round}", wire.pack(memory))
        stay = {f"memory-{each}.npz" for each in (round, before)}
        for path in self.folder.glob("memory-*.npz"):
            if path.name not in stay:
                path.unlink(missing_ok=True)

    def keep_last(self, name: str, round: int, record: wire.Record) -> None:
        """Keep something of a round; that of other rounds goes."""
        self.write(f"{name}-{round}", record)
        for path in self.folder.glob(f"{name}-*.npz"):
            if path.name != f"{name}-{round}.npz":
                path.unlink(missing_ok=True)
