"""What a run leaves behind: its folder, metrics (jsonl and csv), summary, progress bar, TensorBoard events."""

import contextlib
import csv
import errno
import fcntl
import json
import math
import os
import re
import shutil
import statistics
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from fedjax_mr import config as configuration
from fedjax_mr import files
from fedjax_mr.checkpoint import Checkpoints
from fedjax_mr.config import Config
from fedjax_mr.errors import UserError

Row = dict[str, Any]

ROOT = "runs"  # where runs without --run_dir are kept
STATES = ("new", "started", "diverged", "finished")  # of a run folder, the furthest last; new has no checkpoint yet
COLUMNS = (
    "round", "accuracy", "loss", "train_loss", "similarity", "bytes_down", "bytes_up", "images", "seconds",
)  # fmt: skip
"""The columns of every run, in order: fractions in 0..1, nats, bytes, seconds; a strategy's own columns follow."""

CONTENTS = (
    "analysis", "checkpoints", "tensorboard", "metrics.jsonl", "metrics.csv", "summary.json", "diverged.txt",
    "clients.csv", "personal.png", "curves.png", "partition.npz", "partition.png", "run.flags", "config.json",
)  # fmt: skip
"""All that a run folder may hold, and all that overwriting one removes."""


class RunFolder:
    """The folder of one run, and its evaluations so far.

    Attributes:
      path: the folder.
      resumed: whether the run goes on from a checkpoint.
      writes: whether this process writes into it; of several processes only one does.
    """

    def __init__(self, path: Path, *, resumed: bool, writes: bool = True):
        """Take the folder for this process; `open` decides which one.

        Raises:
          UserError: the folder cannot be written, or another process is at work in it.
        """
        self.path = path
        self.resumed = resumed
        self.writes = writes
        if writes:
            weakref.finalize(self, os.close, _lock(path))
            (path / "diverged.txt").unlink(missing_ok=True)
        self._rows = read_rows(path) if (path / "metrics.jsonl").exists() else []
        self._columns: list[str] | None = None  # of the csv file, once this process has written it

    @classmethod
    def open(cls, config: Config) -> "RunFolder":
        """Return the folder of a run: a new one, an emptied one (``overwrite``), or the one to go on in (``resume``).

        Raises:
          UserError: the folder holds something already, has no checkpoint to resume from, was made with another
            configuration, or cannot be written; or a run to compare with is not there.
        """
        for other in config.compare_to:
            read_rows(other)
        if config.resume and config.overwrite:
            raise UserError("--resume goes on with a run and --overwrite replaces it: leave one of them out")
        if config.resume:
            return cls(_resumable(config), resumed=True)
        try:
            path = _numbered(config) if config.run_dir is None else _empty(config)
            folder = cls(path, resumed=False)
            if config.overwrite:
                folder._clear()
            configuration.save(config, path)
        except OSError as error:
            raise UserError(f"cannot write into {config.run_dir or ROOT} ({error.strerror})") from None
        return folder

    def _clear(self) -> None:
        for path in (self.path / name for name in CONTENTS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._rows = []

    def rows(self) -> list[Row]:
        """Return the evaluations so far; numbers that are not finite are None."""
        return list(self._rows)

    def last_row(self) -> Row | None:
        """Return the newest evaluation, or None."""
        return self._rows[-1] if self._rows else None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one evaluation to both files; it has reached the operating system when this returns.

        Raises:
          UserError: the files cannot be written.
        """
        plain: Row = _plain(row)
        self._rows.append(plain)
        if not self.writes:
            return
        if self._columns is None or not set(plain) <= set(self._columns):
            self._rewrite()
            return
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(_line(plain))
            with (self.path / "metrics.csv").open("a", encoding="utf-8", newline="") as file:
                _csv(file, self._columns).writerow(plain)
        except OSError as error:
            raise UserError(f"cannot write metrics into {self.path} ({error.strerror})") from error

    def cut(self, round: int) -> None:
        """Forget the evaluations after a round: those that are newer than the checkpoint to go on from."""
        self._rows = [row for row in self._rows if row["round"] <= round]
        if self.writes:
            self._rewrite()

    def _rewrite(self) -> None:
        self._columns = list(dict.fromkeys((*COLUMNS, *(name for row in self._rows for name in row))))
        with files.whole(self.path / "metrics.jsonl") as path:
            path.write_text("".join(map(_line, self._rows)), encoding="utf-8")
        with files.whole(self.path / "metrics.csv") as path, path.open("w", encoding="utf-8", newline="") as file:
            writer = _csv(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        with files.whole(self.path / "summary.json") as path:
            path.write_text(json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    def write_clients(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Write ``clients.csv``, one row per client; numbers that are not finite are left out."""
        with files.whole(self.path / "clients.csv") as path, path.open("w", encoding="utf-8", newline="") as file:
            writer = _csv(file, table)
            writer.writeheader()
            for values in zip(*table.values(), strict=True):
                writer.writerow(_plain(dict(zip(table, values, strict=True))))

    def note_divergence(self, message: str) -> None:
        """Write ``diverged.txt``, which says why the run ended early; going on with the run removes it."""
        if not self.writes:
            return
        with files.whole(self.path / "diverged.txt") as path:
            path.write_text(message + "\n", encoding="utf-8")


def read_rows(folder: Path | str) -> list[Row]:
    """Return the evaluations that a run folder holds; a last line that was cut short by a kill is left out.

    Raises:
      UserError: the folder holds no readable ``metrics.jsonl``.
    """
    path = Path(folder) / "metrics.jsonl"
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]
    except OSError as error:
        raise UserError(f"{folder} is not a run folder with metrics ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None


def read_summary(folder: Path | str) -> dict[str, Any]:
    """Return what a finished run came to.

    Raises:
      UserError: the folder holds no readable ``summary.json``.
    """
    path = Path(folder) / "summary.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder} is no finished run ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None


def best_of(folders: Sequence[str], num_clients: int | None = None) -> np.ndarray:
    """Return for each client the number of the run [N] whose model was best on the client's validation samples.

    Of a client without validation samples, its test samples decide; the first of equals wins.

    Args:
      folders: run folders with ``clients.csv``.
      num_clients: N; None: as many as the first folder has.

    Raises:
      UserError: a folder holds no such file, or one of other clients.
    """
    columns = []
    for folder in folders:
        path = Path(folder) / "clients.csv"
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            columns.append([float(row["validation_accuracy"] or row["accuracy"] or 0.0) for row in rows])
        except OSError as error:
            raise UserError(f"{folder} has no results per client ({path.name}: {error.strerror})") from None
        except (KeyError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error})") from None
        num_clients = len(rows) if num_clients is None else num_clients
        if len(rows) != num_clients:
            raise UserError(f"{path} is about {len(rows)} clients, not {num_clients}")
    return np.argmax(np.array(columns), axis=0)


def trained_alone(folders: Iterable[Path | str]) -> dict[str, dict[str, Path]]:
    """Return the finished runs of Local-only with a single network by their division of the data and by network.

    Of several with the same division and network, the one whose clients are best on average, judged as by `best_of`.
    """
    found: dict[str, dict[str, tuple[float, Path]]] = {}
    for folder in map(Path, folders):
        config = configuration.load(folder)
        if config.strategy == "local" and "," not in config.model and state(folder) == "finished":
            summary, last = read_summary(folder), read_rows(folder)[-1]
            known = [last.get(name) for name in ("validation_accuracy", "personal_accuracy")]
            quality = next((value for value in known if value is not None), 0.0)
            networks = found.setdefault(summary["partition_hash"], {})
            networks[config.model] = max(networks.get(config.model, (-1.0, folder)), (quality, folder))
    return {
        division: {network: folder for network, (_, folder) in networks.items()} for division, networks in found.items()
    }


def first_choices(config: Config, division: str) -> Sequence[str]:
    """Return the run folder of each network of ``architectures_from``.

    Args:
      config: names as many folders as networks, or one that holds the runs of all of them.
      division: the hash of the data's division, by which the runs in that one folder are found.

    Raises:
      UserError: a network has no such run.
    """
    named, networks = config.architectures_from, config.model.split(",")
    if len(named) == len(networks):
        return named
    runs = trained_alone(path.parent for path in sorted(Path(named[0]).rglob("config.json"))).get(division, {})
    if missing := [network for network in networks if network not in runs]:
        raise UserError(
            f"--architectures_from: {named[0]} holds no finished run of --strategy=local --model={missing[0]} with the "
            "same division of the data (seed, partition, shares)"
        )
    return [str(runs[network]) for network in networks]


def state(folder: Path | str) -> str:
    """Return how far the run of a folder is, one of `STATES`."""
    folder = Path(folder)
    for word, name in (("finished", "summary.json"), ("diverged", "diverged.txt")):
        if (folder / name).exists():
            return word
    return "started" if _has_checkpoint(folder) else "new"


def saved_round(folder: Path | str) -> int | None:
    """Return the round of a run folder's newest checkpoint, or None."""
    return max(Checkpoints(Path(folder) / "checkpoints").rounds(), default=None)


def is_taken(folder: Path | str) -> bool:
    """Return whether another process is at work in a folder."""
    if not Path(folder).is_dir():
        return False
    try:
        os.close(_lock(Path(folder)))
    except UserError:
        return True
    return False


# --- Which folder ----------------------------------------------------------------------------------------------------


def by_settings(parent: Path | str, pattern: str = "*") -> dict[str, list[Path]]:
    """Return the run folders in a folder by the digest of their settings, oldest first.

    The settings are those in ``config.json``, completed by the defaults of options that are younger than it. The digest
    in a folder's name is of the options that there were when it was named.

    Args:
      parent: the folder that holds them; it need not be there.
      pattern: of the names to look at.
    """
    found: dict[str, list[tuple[int, int, Path]]] = {}
    for file in Path(parent).glob(f"{pattern}/config.json"):
        folder = file.parent
        with contextlib.suppress(UserError, OSError):  # unreadable, or of a version with other options
            digest = configuration.digest(configuration.load(folder))
            found.setdefault(digest, []).append((file.stat().st_mtime_ns, _number(folder.name), folder))
    return {digest: [folder for _, _, folder in sorted(folders)] for digest, folders in found.items()}


def _stem(config: Config) -> str:
    dataset = re.sub(r"\W+", "_", Path(config.dataset).stem)
    return f"{config.strategy}-{dataset}-{config.model.replace(',', '+')}-"


def _number(name: str) -> int:
    """Return the number at the end of a folder's name, or 0."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _numbered(config: Config) -> Path:
    """Make the folder with the next free number; another process may be about to take the same."""
    stem = f"{_stem(config)}{configuration.digest(config)}-"
    number = max((_number(path.name) for path in Path(ROOT).glob(f"{stem}*")), default=0) + 1
    while True:
        path = Path(ROOT) / f"{stem}{number}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return path
        except FileExistsError:
            if path.parent.is_dir():
                number += 1
            else:
                raise


def _visible(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))


def _empty(config: Config) -> Path:
    """Return ``run_dir``, made if need be; what it holds must be nothing, or a run that may be overwritten."""
    path = Path(config.run_dir or "")
    path.mkdir(parents=True, exist_ok=True)
    found = _visible(path)
    if not found:
        return path
    if not config.overwrite:
        raise UserError(f"{path} is not empty: --resume goes on with the run in it, --overwrite replaces it")
    if not {"config.json", "run.flags"} <= set(found):
        raise UserError(f"{path} does not look like a run folder (no config.json, run.flags), so it is not overwritten")
    return path


def _resumable(config: Config) -> Path:
    if config.run_dir is not None:
        path = Path(config.run_dir)
        if not path.is_dir():
            raise UserError(f"cannot resume: there is no folder {path}; leave out --resume to start")
    else:
        runs = by_settings(ROOT, f"{_stem(config)}*").get(configuration.digest(config), [])
        if not runs:
            raise UserError(f"cannot resume: no run of this configuration in {ROOT}/; name its folder by --run_dir")
        path = next(filter(_has_checkpoint, reversed(runs)), runs[-1])  # one that ended too early has nothing to lose
    if not _has_checkpoint(path):
        remedy = "start it anew with --overwrite" if (path / "config.json").exists() else "is it a run folder?"
        raise UserError(f"cannot resume: {path} has no checkpoint; {remedy}")
    different = configuration.differences(config, configuration.load(path))
    if different:
        raise UserError(f"cannot resume {path}, which was made with other settings: {'; '.join(different)}")
    return path


def _has_checkpoint(path: Path) -> bool:
    return bool(Checkpoints(path / "checkpoints").rounds())


def _lock(path: Path) -> int:
    """Keep other processes out of a run folder while the returned file descriptor is open."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"cannot write into {path} ({error.strerror})") from None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            raise UserError(f"another process is at work in {path}") from None
        # Some network file systems have no locks; the run is worth more than the lock.
    return descriptor


# --- Rows ------------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: numbers of Python, and None where one is not finite."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "item"):  # a NumPy or JAX number
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _csv(file: TextIO, columns: Iterable[str]) -> csv.DictWriter:
    return csv.DictWriter(file, list(columns), lineterminator="\n")


def summarise(rows: Sequence[Row], target: float | None = None) -> dict[str, Any]:
    """Return what the evaluations come to; None where there is nothing to say.

    Args:
      rows: the evaluations, ascending.
      target: the accuracy whose first round is reported.
    """
    rows = [_plain(row) for row in rows]
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    last: Mapping[str, Any] = rows[-1] if rows else dict.fromkeys(COLUMNS)
    reached = [row["round"] for row in rows if target is not None and (row["accuracy"] or 0.0) >= target]
    ten = [row["accuracy"] for row in rows[-10:] if row["accuracy"] is not None]
    return {
        "accuracy_last": last["accuracy"],
        "accuracy_best": max(accuracies, default=None),
        "accuracy_mean_last_10": statistics.fmean(ten) if ten else None,
        "loss_last": last["loss"],
        "rounds": last["round"] or 0,
        "rounds_to_target": reached[0] if reached else None,
        "bytes_down": last["bytes_down"] or 0,
        "bytes_up": last["bytes_up"] or 0,
        **({"bytes_peer": last["bytes_peer"]} if "bytes_peer" in last else {}),
    }


def summary_table(summary: Mapping[str, Any]) -> str:
    """Return the short table that ends a run; lines whose value is missing are left out."""

    def number(format: str, name: str, unit: float = 1) -> str | None:
        return (
            None if summary.get(name) is None else format.format(summary[name] / unit if unit != 1 else summary[name])
        )

    lines = {
        "accuracy, last": number("{:.4f}", "accuracy_last"),
        "accuracy, best": number("{:.4f}", "accuracy_best"),
        "accuracy, mean of last 10": number("{:.4f}", "accuracy_mean_last_10"),
        "test loss": number("{:.4f} nats", "loss_last"),
        "clients' own models": number("{:.4f}", "personal_accuracy"),
        "worst tenth of them": number("{:.4f}", "personal_worst10"),
        "after fine-tuning": number("{:.4f}", "finetuned_accuracy"),
        "rounds": number("{:,}", "rounds"),
        "rounds to the target": number("{:,}", "rounds_to_target"),
        "sent to clients": number("{:,.1f} MB", "bytes_down", 1e6),
        "sent to the server": number("{:,.1f} MB", "bytes_up", 1e6),
        "sent among clients": number("{:,.1f} MB", "bytes_peer", 1e6),
        "compilation": number("{:.1f} s", "compile_seconds"),
        "per round": number("{:.3f} s", "seconds_per_round"),
        "of this the server": number("{:.3f} s", "server_seconds_per_round"),
        "speed": number("{:,.0f} images/s", "images_per_second"),
        "peak memory": number("{:,.0f} MB", "peak_memory_bytes", 1e6),
    }
    shown = {name: text for name, text in lines.items() if text is not None}
    width = max(map(len, shown), default=0)
    return "\n".join(f"  {name.ljust(width)}  {text}" for name, text in shown.items())


# --- While it runs ---------------------------------------------------------------------------------------------------


class Progress:
    """A bar on standard error: round, accuracy, images per second, time left."""

    def __init__(self, total: int, done: int = 0, *, quiet: bool = False):
        """Show the bar at ``done`` of ``total`` rounds; ``quiet`` shows none."""
        self._started = quiet
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=quiet,
            file=sys.stderr,
            dynamic_ncols=True,
            smoothing=0,
            mininterval=0.2 if sys.stderr.isatty() else 5.0,  # a log file needs fewer lines
            bar_format="round {n_fmt}/{total_fmt} |{bar}| {percentage:3.0f}%{postfix}, {remaining} left",
            postfix="compiling",
        )

    def update(self, done: int, *, images_per_second: float, row: Row | None = None) -> None:
        """Move the bar to ``done`` rounds; ``row`` is the newest evaluation."""
        accuracy = row["accuracy"] if row else None
        parts = [] if accuracy is None else [f"accuracy {accuracy:.4f}"]
        self._bar.set_postfix_str(", ".join([*parts, f"{images_per_second:,.0f} images/s"]), refresh=False)
        self._bar.update(done - self._bar.n)
        if not self._started:  # the first call compiles, which the time left must not extrapolate
            self._started, self._bar.initial = True, done
            self._bar.start_t = self._bar.last_print_t = time.time()

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        self._bar.close()


class TensorBoard:
    """Event files in ``tensorboard`` of a run folder; without the extra it says so once and does nothing."""

    def __init__(self, folder: Path | str):
        """Open an event file."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            print(
                "fedjax-mr: --tensorboard writes nothing because tensorboardX is missing: "
                "pip install 'fedjax-mr[tensorboard]'",
                file=sys.stderr,
            )
            self._writer = None
            return
        self._writer = SummaryWriter(str(Path(folder) / "tensorboard"))

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of an evaluation."""
        if self._writer is None:
            return
        for name, value in _plain(row).items():
            if name != "round" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
