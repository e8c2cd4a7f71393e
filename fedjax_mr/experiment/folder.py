"""The folder of a run: which one it is, its lock, its metrics (jsonl and csv), its summary."""

import contextlib
import dataclasses
import functools
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr import registry
from fedjax_mr.data import files, npz
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment import imports
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.locks import lock
from fedjax_mr.experiment.rows import (
    COLUMNS,
    EVALUATIONS,
    REMEDY,
    MetricsRow,
    checksums,
    csv_writer,
    line_of,
    next_checksum,
    plain_numbers,
    read_rows,
    read_summary,  # noqa: F401 (for those who read run folders)
    require_counted,
    write_summary,
)

RUNS = "runs"  # where runs without --run_dir are kept
FIXED = ("samples.json", "partition.npz")  # files that are written before the first round and never change
STATES = ("new", "started", "diverged", "finished")  # of a run folder, the furthest last; new has no checkpoint yet
PICTURES = ("png", "pdf", "svg")  # --picture_format
REAL_CLIENTS = "clients.json"  # in the folder of a run of real clients: who they were
CONTENTS = (
    "analysis", "checkpoints", "info", "tensorboard", "metrics.jsonl", "metrics.csv", "summary.json", "diverged.txt",
    "clients.csv", *(f"{name}.{format}" for name in ("personal", "curves") for format in PICTURES), "partition.npz",
    *(f"partition.{format}" for format in PICTURES), "samples.json", "logs.json", REAL_CLIENTS, "imports",
    "config.json", "run.flags",
)  # fmt: skip
"""All that a run folder may hold, and all that overwriting one removes, in this order: ``run.flags`` is the first file
to come and the last to go, so that whatever is left after a kill is known as a run folder."""


class RunFolder:
    """The folder of one run, and its evaluations so far.

    Attributes:
      path: the folder.
      resumed: whether the run goes on from a checkpoint.
      writes: whether this process writes into it; of several processes only one does.
      to_keep: whether there is a run to go on with: one that is resumed, or a new one from its first checkpoint on.
    """

    def __init__(self, path: Path, *, resumed: bool, writes: bool = True, made: Sequence[Path] = ()):
        """Take the folder for this process; `open` decides which one.

        Args:
          path: the folder, which is there.
          resumed: whether its run goes on.
          writes: whether this process writes into it.
          made: the folders that were made for it, deepest first; `withdraw` removes them.

        Raises:
          UserError: the folder cannot be written or holds links, another process is at work in it, or the metrics of
            its run are damaged.
        """
        if resumed:
            files.refuse_links(path)
        self.path = path
        self.resumed = self.to_keep = resumed
        self.writes = writes
        self._made = made
        self._begun = False
        self._locked_before = (path / ".lock").exists()
        self._keep([])
        self._columns: list[str] | None = None  # of the csv file, once this process has written it
        if writes:
            weakref.finalize(self, os.close, lock(path))
        if resumed and (path / "metrics.jsonl").exists():
            self._keep(read_rows(path))

    @classmethod
    def open(cls, config: Config) -> "RunFolder":
        """Return the folder of a run: a new one, one to empty (``overwrite``), or the one to go on in (``resume``).

        Nothing in it has changed yet: `begin` or `cut` is next.

        Raises:
          UserError: the folder holds something already, has no checkpoint to resume from, was made with another
            configuration, or cannot be written; or a run to compare with is not there.
        """
        for other in config.compare_to:
            read_rows(other)
        if config.resume and config.overwrite:
            raise UserError("--resume goes on with a run and --overwrite replaces it: leave one of them out")
        place = Path(config.run_dir or RUNS).absolute()
        if found := [sign for sign in "[]\\*?" if sign in str(place)]:
            raise UserError(
                f"{place} has {' '.join(found)} in it, which orbax takes for a pattern; choose another folder"
            )
        if config.resume:
            return cls(_to_resume(config), resumed=True)
        made: list[Path] = []
        try:
            path = _next_in_runs(config, made) if config.run_dir is None else _given(config, made)
            return cls(path, resumed=False, made=made)
        except (OSError, UserError) as error:
            _remove_empty(made)
            if isinstance(error, UserError):
                raise
            raise UserError(f"cannot write into {config.run_dir or RUNS} ({error.strerror})") from None

    def begin(self, config: Config) -> None:
        """Remove the run that was here (``overwrite``) and write the configuration of the new one.

        Raises:
          UserError: the folder cannot be written.
        """
        if not self.writes:
            return
        self._begun = True
        try:
            self._clear()
        except OSError as error:
            raise UserError(f"cannot write into {self.path} ({error.strerror})") from None
        configuration.save(config, self.path)

    def withdraw(self) -> None:
        """Remove what was made here, and the folder if it was; of a run ``to_keep`` nothing, nor what is older."""
        if self.to_keep or not self.writes:
            return
        with contextlib.suppress(OSError):  # what cannot be removed stays: there is an error to be told already
            if self._begun:
                self._clear()
            if not self._locked_before:
                (self.path / ".lock").unlink(missing_ok=True)
        _remove_empty(self._made)

    def _clear(self) -> None:
        for path in (self.path / name for name in CONTENTS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._keep([])

    def _keep(self, rows: list[MetricsRow]) -> None:
        self._rows, self._checksums = rows, checksums(rows)

    def rows(self) -> list[MetricsRow]:
        """Return the evaluations so far; numbers that are not finite are None."""
        return list(self._rows)

    def last_row(self) -> MetricsRow | None:
        """Return the newest evaluation, or None."""
        return self._rows[-1] if self._rows else None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one evaluation to both files; it has reached the operating system when this returns.

        Raises:
          UserError: the files cannot be written.
        """
        numbers: MetricsRow = plain_numbers(row)
        self._checksums.append(next_checksum(self._checksums[-1], numbers))
        self._rows.append(numbers)
        if not self.writes:
            return
        if self._columns is None or not set(numbers) <= set(self._columns):
            self._rewrite()
            return
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(line_of(numbers))
            with (self.path / "metrics.csv").open("a", encoding="utf-8", newline="") as file:
                csv_writer(file, self._columns).writerow(numbers)
        except OSError as error:
            raise UserError(f"cannot write metrics into {self.path} ({error.strerror})") from error

    def sync(self) -> None:
        """Return once all evaluations would outlast a power failure.

        Raises:
          UserError: they cannot be written to the disk.
        """
        try:
            for name in ("metrics.jsonl", "metrics.csv") if self.writes and self._columns else ():
                files.sync(self.path / name)
        except OSError as error:
            raise UserError(f"cannot write metrics into {self.path} ({error.strerror})") from error

    def checksums(self, *, due: Callable[[int], bool]) -> dict[str, Any]:
        """Return what a checkpoint says of the files that belong to it: checksums by name.

        Args:
          due: whether a round is evaluated although it is not the last one. An evaluation that is not due is forgotten
            if the run is extended; therefore the checksum without it is there, too.
        """
        last = self.last_row()
        evaluations = self._checksums[-1:] if last is None or due(last["round"]) else self._checksums[:-3:-1]
        return {EVALUATIONS: evaluations} | self._fixed

    @functools.cached_property
    def _fixed(self) -> dict[str, str]:
        found = {name: files.checksum(self.path / name) for name in FIXED}
        return {name: checksum for name, checksum in found.items() if checksum is not None}

    def cut(self, round: int, meta: Mapping[str, Any], *, due: Callable[[int], bool] = lambda round: True) -> None:
        """Forget the evaluations after a round: those that are newer than the checkpoint to go on from.

        Args:
          round: the round of the checkpoint.
          meta: what was saved with it; of some versions it says how many evaluations there were.
          due: whether a round is evaluated; the last one of a run that is now extended would not have been.

        Raises:
          UserError: evaluations, or parts of them, are missing or not those of the checkpoint; nothing was changed.
        """
        before = [row for row in self._rows if row["round"] <= round]
        rows = [row for row in before if due(row["round"])]
        extended = not due(round) and len(rows) == sum(map(due, range(1, round + 1)))  # perhaps cut before
        path, count = self.path / "metrics.jsonl", meta.get("rows")
        if count is not None and len(before) != count and not (extended and len(rows) == count - 1):
            raise UserError(
                f"{path} has {len(before)} evaluations up to round {round} and its checkpoint counts {count}: {REMEDY}"
            )
        require_counted(self._rows, round, meta, path)
        for row in rows:
            if missing := [name for name in COLUMNS if name not in row]:
                raise UserError(f"{path} is damaged (round {row['round']} has no {', '.join(missing)}): {REMEDY}")
        if wrong := [row["round"] for row in before if row["round"] != round and not due(row["round"])]:
            raise UserError(f"{path} is damaged (it has an evaluation of round {wrong[0]}, which has none): {REMEDY}")
        if self.writes:
            (self.path / "diverged.txt").unlink(missing_ok=True)
            if rows != self._rows:  # first what was made from them
                (self.path / "summary.json").unlink(missing_ok=True)
        self._keep(rows)
        if self.writes:
            self._rewrite()

    def extend(self, rounds: int) -> None:
        """Let the run that goes on end after so many rounds, and remove the results of an end that is none any more.

        Raises:
          UserError: the folder cannot be written.
        """
        saved = configuration.load(self.path)
        if not self.writes or saved.rounds == rounds:
            return
        pictures = (f"{name}.{format}" for name in ("personal", "curves") for format in PICTURES)
        for name in ("summary.json", "clients.csv", *pictures):
            (self.path / name).unlink(missing_ok=True)
        configuration.save(dataclasses.replace(saved, rounds=rounds), self.path)

    def write_info(self, round: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write ``info/ROUND.npz``: what a strategy tells of a round beside its metrics."""
        if not (self.writes and arrays):
            return
        try:
            (self.path / "info").mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write into {self.path} ({error.strerror})") from None
        with files.atomic_write(self.path / "info" / f"{round}.npz") as path:
            np.savez(path, allow_pickle=False, **arrays)

    def keep_info(self, rounds: Iterable[int]) -> None:
        """Remove the info of all rounds but these."""
        kept = {f"{round}.npz" for round in rounds}
        for path in (self.path / "info").glob("*.npz") if self.writes else ():
            if path.name not in kept and path.stem.isdecimal():  # other names are not ours to remove
                path.unlink()

    def _rewrite(self) -> None:
        self._columns = list(dict.fromkeys((*COLUMNS, *(name for row in self._rows for name in row))))
        with files.atomic_write(self.path / "metrics.jsonl") as path:
            path.write_text("".join(map(line_of, self._rows)), encoding="utf-8")
        with (
            files.atomic_write(self.path / "metrics.csv") as path,
            path.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv_writer(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        write_summary(self.path, summary, self._checksums[-1])

    def write_clients(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Write ``clients.csv``, one row per client; numbers that are not finite are left out."""
        with (
            files.atomic_write(self.path / "clients.csv") as path,
            path.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv_writer(file, table)
            writer.writeheader()
            for values in zip(*table.values(), strict=True):
                writer.writerow(plain_numbers(dict(zip(table, values, strict=True))))

    def note_divergence(self, message: str) -> None:
        """Write ``diverged.txt``, which says why the run ended early; going on with the run removes it."""
        if not self.writes:
            return
        with files.atomic_write(self.path / "diverged.txt") as path:
            path.write_text(message + "\n", encoding="utf-8")


def read_info(folder: Path | str, round: int) -> dict[str, np.ndarray]:
    """Return the arrays of a strategy's information on a round.

    Raises:
      UserError: nothing is kept of this round, or it is damaged.
    """
    path = Path(folder) / "info" / f"{round}.npz"
    try:
        return npz.read(path)
    except OSError as error:
        raise UserError(f"{folder} keeps nothing of round {round} ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None


def damaged_files(folder: Path, meta: Mapping[str, Any]) -> list[str]:
    """Return the names of files that are not those that a checkpoint was saved with, or are missing.

    Args:
      folder: the run folder.
      meta: what was saved with the checkpoint.
    """
    known = meta.get("checksums")
    known = known if isinstance(known, dict) else {}
    return [name for name in FIXED if name in known and files.checksum(folder / name) != known[name]]


def run_state(folder: Path | str) -> str:
    """Return how far the run of a folder is, one of `STATES`."""
    folder = Path(folder)
    for word, name in (("finished", "summary.json"), ("diverged", "diverged.txt")):
        if (folder / name).exists():
            return word
    return "started" if _has_checkpoint(folder) and not is_remains(folder) else "new"


def is_remains(folder: Path | str) -> bool:
    """Whether a folder contains only checkpoints, because its run folder was removed while one was written."""
    folder = Path(folder)
    if not folder.is_dir() or _visible_names(folder) != ["checkpoints"]:
        return False
    return Checkpoints(folder / "checkpoints").has_nothing_else()


def saved_round(folder: Path | str) -> int | None:
    """Return the round of a run folder's newest checkpoint, or None."""
    return max(Checkpoints(Path(folder) / "checkpoints").rounds(), default=None)


# --- Which folder ----------------------------------------------------------------------------------------------------


def runs_by_settings(parent: Path | str, pattern: str = "*", **changes: Any) -> dict[str, list[Path]]:
    """Return the run folders in a folder by the digest of their settings, oldest first.

    The settings are those in ``config.json``, completed by the defaults of options that are younger than it. The digest
    in a folder's name is of the options that there were when it was named.

    Args:
      parent: the folder that holds them; it need not be there.
      pattern: of the names to look at.
      changes: settings that count as equal, with the values that they are to have.
    """
    found: dict[str, list[tuple[int, int, Path]]] = {}
    for file in Path(parent).glob(f"{pattern}/config.json"):
        folder = file.parent
        with contextlib.suppress(UserError, OSError):  # unreadable, or of a version with other options
            digest = configuration.digest(dataclasses.replace(configuration.load(folder), **changes))
            found.setdefault(digest, []).append((file.stat().st_mtime_ns, _number(folder.name), folder))
    return {digest: [folder for _, _, folder in sorted(folders)] for digest, folders in found.items()}


def _stem(config: Config) -> str:
    """Return the start of the name of a configuration's folders in `RUNS`."""
    dataset = re.sub(r"\W+", "_", Path(registry.shown(config.dataset)).stem)
    return f"{config.strategy}-{dataset}-{registry.shown(config.model).replace(',', '+')}-"


def _number(name: str) -> int:
    """Return the number at the end of a folder's name, or 0."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _next_in_runs(config: Config, made: list[Path]) -> Path:
    """Return a new folder in `RUNS` with the next free number; another process may be about to take the same one."""
    stem = f"{_stem(config)}{configuration.digest(config)}-"
    number = max((_number(path.name) for path in Path(RUNS).glob(f"{stem}*")), default=0) + 1
    while True:
        path = Path(RUNS) / f"{stem}{number}"
        try:
            made[:] = files.make_folder(path.parent)
            path.mkdir()
            made.insert(0, path)
            files.sync(path.parent)
            return path
        except FileExistsError:
            if path.parent.is_dir():
                number += 1
            else:
                raise


def _visible_names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))


def _given(config: Config, made: list[Path]) -> Path:
    """Return ``run_dir``, made if need be; it must be empty, or hold a run that may be overwritten."""
    path = Path(config.run_dir or "")
    made += files.make_folder(path)
    found = _visible_names(path)
    if not found:
        return path
    if not config.overwrite:
        raise UserError(f"{path} is not empty: --resume goes on with the run in it, --overwrite replaces it")
    if "run.flags" not in found and not is_remains(path):
        raise UserError(f"{path} does not look like a run folder (no run.flags), so it is not overwritten")
    return path


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # another run has come into it
            folder.rmdir()


def _to_resume(config: Config) -> Path:
    """Return ``run_dir``, or the newest run of the same configuration in `RUNS`; it has a checkpoint."""
    if config.run_dir is not None:
        path = Path(config.run_dir)
        if not path.is_dir():
            raise UserError(f"cannot resume: there is no folder {path}; leave out --resume to start")
    else:
        digest, pattern = configuration.digest(config), f"{_stem(config)}*"
        runs = runs_by_settings(RUNS, pattern).get(digest) or []
        runs = runs or runs_by_settings(RUNS, pattern, rounds=config.rounds).get(digest, [])
        if not runs:
            raise UserError(f"cannot resume: no run of this configuration in {RUNS}/; name its folder by --run_dir")
        path = next(filter(_has_checkpoint, reversed(runs)), runs[-1])  # one that ended too early has nothing to lose
    if not _has_checkpoint(path):
        remedy = "start it anew with --overwrite" if (path / "config.json").exists() else "is it a run folder?"
        raise UserError(f"cannot resume: {path} has no checkpoint; {remedy}")
    saved = configuration.load(path)
    if imports.hashes(config.imports) != imports.hashes(saved.imports):
        raise UserError(
            f"cannot resume {path}, which was made with other code: --import={','.join(config.imports) or 'none'} "
            f"(saved {','.join(saved.imports) or 'none'}; copies are in {path / imports.FOLDER})"
        )
    done, rows = saved_round(path) or 0, read_rows(path) if (path / "metrics.jsonl").exists() else []
    if config.rounds < done or (config.rounds == done < saved.rounds and (not rows or rows[-1]["round"] < done)):
        more = "" if config.rounds < done else "more than "
        raise UserError(
            f"{path} has done {done} of {saved.rounds} rounds, so that it cannot end after --rounds={config.rounds}: "
            f"give {more}{done}, or start anew with --overwrite"
        )
    different = configuration.differences(dataclasses.replace(config, rounds=saved.rounds), saved)
    if different:
        raise UserError(f"cannot resume {path}, which was made with other settings: {'; '.join(different)}")
    return path


def _has_checkpoint(path: Path) -> bool:
    return bool(Checkpoints(path / "checkpoints").rounds())
