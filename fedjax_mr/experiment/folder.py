"""The folder of a run: its choice, its lock, its metrics (jsonl and csv), its summary."""

import contextlib
import csv
import dataclasses
import json
import os
import re
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr import files, registry
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports
from fedjax_mr.config.config import Config
from fedjax_mr.data import FederatedData, npz, partition_file
from fedjax_mr.data.facts import Facts
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.results import kept, manifest
from fedjax_mr.results.locks import lock
from fedjax_mr.results.manifest import MANIFEST, REMEDY
from fedjax_mr.results.rows import COLUMNS, MetricsRow, csv_writer, line_of, plain_numbers, read_rows
from fedjax_mr.results.rows import read_summary as read_summary

RUNS = "runs"  # parent folder of runs without --run_dir
DATA = ("samples.json", "partition.npz")  # files about the data, which do not change
STATES = ("new", "started", "diverged", "finished")  # of a run folder, in order; "new" has no checkpoint
WRITTEN_IN_ROUNDS = {MANIFEST, "checkpoints", "info", "metrics.jsonl", "metrics.csv"}  # while a run goes on
PICTURES = ("png", "pdf", "svg")  # --picture_format
ARRIVALS = "arrivals.json"  # the seconds of asynchronous real clients, in the folder of their run
REAL_CLIENTS = "clients.json"  # the identities of real clients, in the folder of their run
CONTENTS = (
    MANIFEST, "analysis", "checkpoints", "info", "tensorboard", "metrics.jsonl", "metrics.csv", "summary.json",
    "diverged.txt", "clients.csv", *(f"{name}.{format}" for name in ("personal", "curves") for format in PICTURES),
    "partition.npz", *(f"partition.{format}" for format in PICTURES), "samples.json", "logs.json",
    REAL_CLIENTS, ARRIVALS, "imports", "config.json", "run.flags",
)  # fmt: skip
"""All files of a run folder, in the order in which overwriting removes them. ``run.flags`` is written first and removed
last, so that a folder is recognised as a run folder after a kill at any moment."""


class RunFolder:
    """The folder of one run, and its evaluations so far.

    Attributes:
      path: the folder.
      resumed: whether the run continues from a checkpoint.
      writes: whether this process writes into the folder; only one of several processes does.
      to_keep: whether the folder contains a run that can be resumed: an older one, or this one after its first
        checkpoint.
    """

    def __init__(self, path: Path, *, resumed: bool, writes: bool = True, created: Sequence[Path] = ()):
        """Lock an existing folder until `close`; `open` chooses the folder.

        Args:
          path: the folder.
          resumed: whether its run continues.
          writes: whether this process writes into it.
          created: the folders that were created for it, deepest first; `close` may remove them.

        Raises:
          UserError: the folder cannot be written or contains links, another run uses it, or the metrics of its run
            are damaged.
        """
        if resumed:
            files.refuse_links(path)
        self.path = path
        self.resumed = self.to_keep = resumed
        self.writes = writes
        self._created = created
        self._begun = False
        self._locked_before = (path / ".lock").exists()
        self._rows: list[MetricsRow] = []
        self._columns: list[str] | None = None  # of the csv file, once this process has written it
        self._sealed: dict[str, dict[str, int]] = {"files": {}, "sizes": {}}  # the content of the manifest
        if writes:
            self._unlock = weakref.finalize(self, os.close, lock(path))
        if resumed and (path / "metrics.jsonl").exists():
            self._rows = read_rows(path)
        if resumed:
            self._sealed |= manifest.read_run(path)

    @staticmethod
    def check(config: Config) -> None:
        """Refuse a ``run_dir`` that `open` would refuse, as far as that is known before the samples are loaded.

        Raises:
          UserError: there is nothing to resume, or the folder is not empty.
        """
        if config.run_dir is None:
            return
        path = Path(config.run_dir)
        if config.resume:
            _require_checkpoint(path)
        elif path.is_dir():
            _require_empty(path, config)

    @classmethod
    def open(cls, config: Config) -> "RunFolder":
        """Choose the folder of a run: a new one, one to empty (``overwrite``), or one to resume (``resume``).

        Nothing in the folder changes until `begin` or `cut` is called.

        Raises:
          UserError: the folder is not empty, has no checkpoint to resume from, has another configuration, or cannot be
            written; or a run of ``compare_to`` does not exist.
        """
        for other in config.compare_to:
            read_rows(other)
        place = Path(config.run_dir or RUNS).absolute()
        if special := [sign for sign in "[]\\*?" if sign in str(place)]:
            raise UserError(
                f"{place} contains {' '.join(special)}, which orbax takes for a pattern; choose another folder"
            )
        if config.resume:
            return cls(_to_resume(config), resumed=True)
        created: list[Path] = []
        try:
            if config.run_dir is None:
                path = _new_in_runs(config, created)
            else:
                path = Path(config.run_dir)
                created += files.make_folder(path)
                _require_empty(path, config)
            return cls(path, resumed=False, created=created)
        except (OSError, UserError) as error:
            _remove_empty(created)
            if isinstance(error, UserError):
                raise
            raise UserError(f"cannot write into {config.run_dir or RUNS} ({error.strerror})") from None

    def begin(self, config: Config) -> None:
        """Remove an older run (``overwrite``) and write the configuration of the new one.

        Raises:
          UserError: the folder cannot be written.
        """
        self._begun = True
        try:
            self._clear()
        except OSError as error:
            raise UserError(f"cannot write into {self.path} ({error.strerror})") from None
        with self._sealing("config.json"):
            configuration.save(config, self.path)

    def close(self) -> None:
        """Remove all that this object has created, unless the run is ``to_keep``, and unlock the folder."""
        if not self.writes:
            return
        if not self.to_keep:
            with contextlib.suppress(OSError):  # an error is already being reported
                if self._begun:
                    self._clear()
                if not self._locked_before:
                    (self.path / ".lock").unlink(missing_ok=True)
            _remove_empty(self._created)
        self._unlock()

    def _clear(self) -> None:
        for path in (self.path / name for name in CONTENTS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._rows, self._sealed = [], {"files": {}, "sizes": {}}

    @contextlib.contextmanager
    def _sealing(self, *names: str) -> Iterator[None]:
        """Leave files out of the manifest while the block writes them, and add their new checksums at its end.

        So a kill at any moment leaves no file that seems damaged.
        """
        if any(name in self._sealed["files"] for name in names):
            for part in self._sealed.values():
                for name in names:
                    part.pop(name, None)
            self._write_manifest()
        yield
        there = [name for name in names if (self.path / name).exists()]
        self._sealed["files"] |= {name: manifest.crc(self.path / name) for name in there}
        self._write_manifest()

    def _write_manifest(self) -> None:
        with files.atomic_write(self.path / MANIFEST) as path:
            path.write_text(manifest.text_of(**self._sealed), encoding="utf-8")

    def seal(self) -> None:
        """Flush the evaluations so far to the disk and add them to the manifest.

        Raises:
          UserError: the folder cannot be written.
        """
        if not (self.writes and self._columns):
            return
        try:
            for name in ("metrics.jsonl", "metrics.csv"):
                files.sync(self.path / name)
        except OSError as error:
            raise UserError(f"cannot write metrics into {self.path} ({error.strerror})") from error
        text = "".join(map(line_of, self._rows)).encode()  # not from the disk, where it may be damaged
        self._sealed["files"]["metrics.jsonl"], self._sealed["sizes"]["metrics.jsonl"] = zlib.crc32(text), len(text)
        self._write_manifest()

    def rows(self) -> list[MetricsRow]:
        """The evaluations so far; numbers that are not finite are None."""
        return list(self._rows)

    def last_row(self) -> MetricsRow | None:
        """The newest evaluation, or None."""
        return self._rows[-1] if self._rows else None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one evaluation to both files and flush them to the operating system.

        Raises:
          UserError: the files cannot be written.
        """
        numbers: MetricsRow = plain_numbers(row)
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

    def cut(self, round: int, meta: Mapping[str, Any], *, due: Callable[[int], bool] = lambda round: True) -> None:
        """Remove the evaluations that are newer than the checkpoint from which the run continues.

        Args:
          round: the round of the checkpoint.
          meta: the dictionary that was saved with it. In some versions it contains the number of evaluations.
          due: whether a round is evaluated. The last round of a run that is now extended may not be.

        Raises:
          UserError: evaluations are missing, incomplete, or not those of the checkpoint. Nothing has changed.
        """
        before = [row for row in self._rows if row["round"] <= round]
        rows = [row for row in before if due(row["round"])]
        extended = not due(round) and len(rows) == sum(map(due, range(1, round + 1)))  # it may have been cut before
        path, count = self.path / "metrics.jsonl", meta.get("rows")
        if count is not None and len(before) != count and not (extended and len(rows) == count - 1):
            raise UserError(
                f"{path} has {len(before)} evaluations up to round {round} and its checkpoint counts {count}: {REMEDY}"
            )
        for row in rows:
            if missing := [name for name in COLUMNS if name not in row and name != "accuracy"]:
                raise UserError(f"{path} is damaged (round {row['round']} has no {', '.join(missing)}): {REMEDY}")
        if wrong := [row["round"] for row in before if row["round"] != round and not due(row["round"])]:
            raise UserError(f"{path} is damaged (its evaluation of round {wrong[0]} is not due): {REMEDY}")
        if not self.writes:
            self._rows = rows
            return
        (self.path / "diverged.txt").unlink(missing_ok=True)
        if rows != self._rows:  # remove first the file that is computed from them
            (self.path / "summary.json").unlink(missing_ok=True)
        unsealed = [name for name in ("config.json", *DATA) if name not in self._sealed["files"]]  # by version 0.3.0
        with self._sealing("metrics.jsonl", *unsealed):
            self._rows = rows
            self._rewrite()
        self.seal()

    def extend(self, rounds: int) -> None:
        """Change the number of rounds of a resumed run, and remove the results of its earlier end.

        Raises:
          UserError: the folder cannot be written.
        """
        saved = configuration.load(self.path)
        if not self.writes or saved.rounds == rounds:
            return
        pictures = (f"{name}.{format}" for name in ("personal", "curves") for format in PICTURES)
        for name in ("summary.json", "clients.csv", *pictures):
            (self.path / name).unlink(missing_ok=True)
        with self._sealing("config.json"):
            configuration.save(dataclasses.replace(saved, rounds=rounds), self.path)

    def write_data(self, federated: FederatedData) -> None:
        """Write the partition and the facts of the samples (shape, dtype, normalisation)."""
        with self._sealing(*DATA):
            if federated.plan is not None:
                partition_file.save(federated.plan, self.path / "partition.npz")
            Facts.of(federated.dataset).save(self.path)

    def repair(self, federated: FederatedData) -> list[str]:
        """Write the files about the data again if they are missing or differ from those of the run.

        Args:
          federated: the data, which are those of the run.

        Returns:
          The names of the damaged files.
        """
        damaged = [name for name in DATA if manifest.fault(self.path, self._sealed, name)]
        if damaged:
            self.write_data(federated)
        return damaged

    def write_info(self, round: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write ``info/ROUND.npz``: arrays of a round that a strategy reports beside its metrics."""
        if not (self.writes and arrays):
            return
        try:
            (self.path / "info").mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write into {self.path} ({error.strerror})") from None
        with files.atomic_write(self.path / "info" / f"{round}.npz") as path:
            np.savez(path, allow_pickle=False, **arrays)

    def keep_info(self, rounds: Iterable[int]) -> None:
        """Remove the info of all rounds except these."""
        kept = {f"{round}.npz" for round in rounds}
        for path in (self.path / "info").glob("*.npz") if self.writes else ():
            if path.name not in kept and path.stem.isdecimal():  # other files belong to the user
                path.unlink()

    def _rewrite(self) -> None:
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row)) or list(COLUMNS)
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
        with self._sealing("metrics.jsonl", "summary.json"), files.atomic_write(self.path / "summary.json") as path:
            path.write_text(json.dumps(plain_numbers(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    def write_clients(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Write ``clients.csv``, one row per client; numbers that are not finite are empty."""
        with (
            self._sealing("clients.csv"),
            files.atomic_write(self.path / "clients.csv") as path,
            path.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv_writer(file, table)
            writer.writeheader()
            for values in zip(*table.values(), strict=True):
                writer.writerow(plain_numbers(dict(zip(table, values, strict=True))))

    def note_divergence(self, message: str) -> None:
        """Write ``diverged.txt`` with the reason for the early end. Resuming the run removes it."""
        if not self.writes:
            return
        with files.atomic_write(self.path / "diverged.txt") as path:
            path.write_text(message + "\n", encoding="utf-8")


def read_info(folder: Path | str, round: int) -> dict[str, np.ndarray]:
    """The arrays that a strategy has reported in a round.

    Raises:
      UserError: there are none for this round, or the file is damaged.
    """
    path = Path(folder) / "info" / f"{round}.npz"
    try:
        return npz.read(path)
    except OSError as error:
        raise UserError(f"{folder} keeps nothing of round {round} ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None


def require_same_data(folder: Path, meta: dict[str, Any], federated: FederatedData) -> None:
    """Check that the data are those of a checkpoint.

    Args:
      folder: the run folder.
      meta: the dictionary that was saved with the checkpoint.
      federated: the data as they are now.

    Raises:
      UserError: the samples, their division, their normalisation or the test set differ.
    """
    if meta["data"] != federated.hash():
        raise UserError(f"{folder} was trained on other data: its partition hash is {meta['data']}")
    different = [] if meta.get("test_data", federated.test_hash) == federated.test_hash else ["the test samples"]
    intact = manifest.fault(folder, manifest.read_run(folder), "samples.json") is None
    if intact and (saved := Facts.read(folder)) is not None:
        now = vars(Facts.of(federated.dataset)) | {"name": saved.name}
        different += [f"{name} was {old} and is {now[name]}" for name, old in vars(saved).items() if old != now[name]]
    if different:
        raise UserError(
            f"{folder} was trained on other data ({'; '.join(different)}): restore the dataset, or start a new run"
        )


def read_clients(folder: Path | str) -> list[dict[str, str]]:
    """The rows of ``clients.csv``, one per client, with values by column.

    Raises:
      UserError: the folder has no such file, or the file has changed since the run ended.
    """
    path = Path(folder) / "clients.csv"
    manifest.require_unchanged(folder, path.name)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"{folder} has no results per client ({path.name}: {error.strerror})") from None


def run_state(folder: Path | str) -> str:
    """The state of a run folder, one of `STATES`."""
    folder = Path(folder)
    if kept_run := kept.run(folder):
        return "diverged" if kept_run.summary is None else "finished"
    for state, name in (("finished", "summary.json"), ("diverged", "diverged.txt")):
        if (folder / name).exists():
            return state
    return "started" if _has_checkpoint(folder) and not is_leftover(folder) else "new"


def is_leftover(folder: Path | str) -> bool:
    """Whether a folder contains only what its run wrote while the run folder was being removed."""
    folder = Path(folder)
    names = set(_visible_names(folder)) if folder.is_dir() else set()
    if names != {"checkpoints"} and not {MANIFEST} <= names <= WRITTEN_IN_ROUNDS:  # files of others have no manifest
        return False
    return "checkpoints" not in names or Checkpoints(folder / "checkpoints").has_nothing_else()


def saved_round(folder: Path | str) -> int | None:
    """The round of a run folder's newest checkpoint, or None."""
    return Checkpoints(Path(folder) / "checkpoints").latest()


# --- Which folder ----------------------------------------------------------------------------------------------------


def runs_by_settings(parent: Path | str, pattern: str = "*", **changes: Any) -> dict[str, list[Path]]:
    """The run folders in a folder by the digest of their settings, oldest first.

    The settings are those in ``config.json``, completed by the defaults of newer options. The digest in a folder's name
    covers only the options that existed when the folder was named.

    Args:
      parent: the folder that contains them; it may be missing.
      pattern: glob pattern of their names.
      changes: settings that replace those of each run.
    """
    folders: dict[str, list[tuple[int, int, Path]]] = {}
    for file in Path(parent).glob(f"{pattern}/config.json"):
        folder = file.parent
        with contextlib.suppress(UserError, OSError):  # unreadable, or from a version with other options
            digest = configuration.digest(dataclasses.replace(configuration.load(folder), **changes))
            folders.setdefault(digest, []).append((file.stat().st_mtime_ns, _number(folder.name), folder))
    return {digest: [folder for _, _, folder in sorted(entries)] for digest, entries in folders.items()}


def _stem(config: Config) -> str:
    """The start of the names of a configuration's folders in `RUNS`."""
    dataset = re.sub(r"\W+", "_", Path(registry.shown(config.dataset)).stem)
    return f"{config.strategy}-{dataset}-{registry.shown(config.model).replace(',', '+')}-"


def _number(name: str) -> int:
    """The number at the end of a folder's name, or 0."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _new_in_runs(config: Config, created: list[Path]) -> Path:
    """Create a folder in `RUNS` with the next free number, even if other processes do the same."""
    stem = f"{_stem(config)}{configuration.digest(config)}-"
    number = max((_number(path.name) for path in Path(RUNS).glob(f"{stem}*")), default=0) + 1
    while True:
        path = Path(RUNS) / f"{stem}{number}"
        try:
            created[:] = files.make_folder(path.parent)
            path.mkdir()
            created.insert(0, path)
            files.sync(path.parent)
            return path
        except FileExistsError:
            if path.parent.is_dir():
                number += 1
            else:
                raise


def _visible_names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))


def _require_empty(path: Path, config: Config) -> None:
    """Check that a folder is empty, or contains a run that may be overwritten."""
    names = _visible_names(path)
    if names and not config.overwrite:
        raise UserError(f"{path} is not empty: resume=True continues the run in it, overwrite=True replaces it")
    if names and "run.flags" not in names and not is_leftover(path):
        raise UserError(f"{path} does not look like a run folder (no run.flags), so it is not overwritten")


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # another run has started in it
            folder.rmdir()


def _to_resume(config: Config) -> Path:
    """The folder to resume: ``run_dir``, or the newest run of the same configuration in `RUNS`. It has a checkpoint."""
    if config.run_dir is not None:
        path = Path(config.run_dir)
    else:
        digest, pattern = configuration.digest(config), f"{_stem(config)}*"
        runs = runs_by_settings(RUNS, pattern).get(digest) or []
        runs = runs or runs_by_settings(RUNS, pattern, rounds=config.rounds).get(digest, [])
        if not runs:
            raise UserError(f"cannot resume: no run of this configuration in {RUNS}/; set --run_dir to its folder")
        path = next(filter(_has_checkpoint, reversed(runs)), runs[-1])  # a run without one has nothing to resume
    _require_checkpoint(path)
    saved = configuration.load(path)
    if imports.hashes(config.imports) != imports.hashes(saved.imports):
        raise UserError(
            f"cannot resume {path}, which was trained with other code: --import={','.join(config.imports) or 'none'} "
            f"(saved {','.join(saved.imports) or 'none'}; copies are in {path / imports.FOLDER})"
        )
    done, rows = saved_round(path) or 0, read_rows(path) if (path / "metrics.jsonl").exists() else []
    if config.rounds < done or (config.rounds == done < saved.rounds and (not rows or rows[-1]["round"] < done)):
        more = "" if config.rounds < done else "more than "
        raise UserError(
            f"{path} has trained {done} of {saved.rounds} rounds, so it cannot end after --rounds={config.rounds}: "
            f"set --rounds to {more}{done}, or start anew with --overwrite"
        )
    different = configuration.differences(dataclasses.replace(config, rounds=saved.rounds), saved)
    if different:
        remedy = ""
        if config.lr != saved.lr:
            remedy = (
                ". A learning rate that changes during a run is a part of it: use --lr_schedule, or start a new run "
                "from these weights (python -m fedjax_mr.export, then --pretrained)"
            )
        raise UserError(f"cannot resume {path}, which was trained with other settings: {'; '.join(different)}{remedy}")
    return path


def _require_checkpoint(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"cannot resume: there is no folder {path}; omit --resume to start a new run")
    if not _has_checkpoint(path):
        remedy = "start it anew with --overwrite" if (path / "config.json").exists() else "is it a run folder?"
        raise UserError(f"cannot resume: {path} has no checkpoint; {remedy}")


def _has_checkpoint(path: Path) -> bool:
    return saved_round(path) is not None
