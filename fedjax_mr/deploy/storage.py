"""A real client's folder on its own disk: the facts of the federation, and the client's memory by round.

A server may request a round twice, because a reply was lost or because it continues from an older checkpoint. Therefore
each round's memory has its own file, and a request names the round whose memory it starts from. The files of the last
two rounds are kept. Each file is written atomically, and one process at a time uses the folder. A trained model reveals
something about its samples, so only the user who runs the client can read the folder (modes 0700 and 0600).
"""

import fcntl
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr import files
from fedjax_mr.data import npz
from fedjax_mr.deploy import wire
from fedjax_mr.errors import UserError

_NAME = re.compile(r"[0-9a-f]{1,64}")


class ClientStorage:
    """A client's folder for one run; a context manager that keeps other processes out."""

    def __init__(self, folder: Path | str, run: str) -> None:
        """Name the folder; nothing is read yet.

        Args:
          folder: the client's folder for all its runs.
          run: the run's name, sent by the server.

        Raises:
          UserError: the name is invalid.
        """
        if not _NAME.fullmatch(run):
            raise UserError(f"{run[:80]!r} is not a valid name of a run")
        self.folder = Path(folder) / run

    def __enter__(self) -> "ClientStorage":
        """Create the folder and wait until no other process uses it.

        Raises:
          UserError: the folder cannot be written.
        """
        try:
            for made in files.make_folder(self.folder):
                made.chmod(0o700)
            self.folder.chmod(0o700)  # version 0.2.0 left it readable for others
            self._lock = open(os.open(self.folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o600), "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(f"cannot write into {self.folder} ({error.strerror})") from None
        return self

    def __exit__(self, *error: object) -> None:
        """Release the folder."""
        self._lock.close()

    def write(self, name: str, record: wire.Record) -> None:
        """Write arrays to the file of a name."""
        with files.atomic_write(self.folder / f"{name}.npz") as path:
            arrays: dict[str, Any] = {key: np.asarray(value) for key, value in record.items()}
            np.savez(path, **arrays)
            path.chmod(0o600)

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Read the arrays from the file of a name.

        Raises:
          UserError: the file is missing or damaged.
        """
        path = self.folder / f"{name}.npz"
        try:
            return npz.read(path)
        except FileNotFoundError:
            raise UserError(f"{path} is missing; this client needs it to continue the run") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    def memory(self, round: int, like: Any) -> Any:
        """The client's memory after a round.

        Args:
          round: the round.
          like: a tree of the memory's shapes and dtypes.

        Raises:
          UserError: the file is missing, damaged, or has other shapes.
        """
        name = f"memory-{round}"
        return wire.unpack(self.read(name), like, who=str(self.folder / name), finite=False)

    def write_memory(self, round: int, memory: Any, *, before: int) -> None:
        """Write the memory after a round, keep that of the round ``before``, and delete all others."""
        self.write(f"memory-{round}", wire.pack(memory))
        stay = {f"memory-{each}.npz" for each in (round, before)}
        for path in self.folder.glob("memory-*.npz"):
            if path.name not in stay:
                path.unlink(missing_ok=True)

    def write_last(self, name: str, round: int, record: wire.Record) -> None:
        """Write the record of a round, and delete the records of other rounds."""
        self.write(f"{name}-{round}", record)
        for path in self.folder.glob(f"{name}-*.npz"):
            if path.name != f"{name}-{round}.npz":
                path.unlink(missing_ok=True)
