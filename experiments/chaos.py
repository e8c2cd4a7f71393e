"""Try to break runs: random kills, full disks, damaged and forged files, bad flags, malformed messages.

    python experiments/chaos.py                       # about ten minutes on two cores
    python experiments/chaos.py --only=kills,storage --minutes=30 --kills=400 --seed=7
    python experiments/chaos.py --only=flags --trial=1234
    python experiments/chaos.py --tries=4000          # all rows together, without a time limit

The table has one line per row: the numbers of trials and of failures. Every failure follows with a description of the
trial, the last printed lines, and the command that repeats it. The exit code is 1 if a trial failed. A trial depends
only on the seed, the row and its number; the moments of kills also depend on the machine.

kills     Runs of every registered strategy, killed (SIGKILL) at random moments, half of them while checkpoints are
          written, then resumed, killed again, and finally left to finish. The table counts kills. Metrics (without
          times) and the arrays of the last checkpoint must equal those of an undisturbed run, bit for bit.
storage   Limits of file size and small file systems (if this user may mount them), for new and for resumed runs, and
          damaged files. Code 0, or code 2 and one line; without the fault, the same bits as an undisturbed run.
files     Forged datasets, partitions and files of run folders. Code 2 and one line, or 0 if the file is still valid.
folders   Links and damage in the files of a run folder, read by resuming, by a table, by export. A link is rejected and
          its target unchanged. A changed digit or a swap is rejected in one line, or has no effect.
adapters  Damage in the frozen base of a run with adapters, read by resuming, by export, by a new run. It is rejected in
          one line, or has no effect on the bits.
clocks    Runs in simulated time, with slow clients, deadlines and asynchronous clients, killed and resumed as in kills.
flags     Invalid flags, made from the declarations of the settings. Code 2, one line, and no new file in the folder.
processes Runs of two or three processes, one of which is killed, frozen or stopped. The others end with one line (code
          4, or 143), no process keeps the port, and the resumed run has the bits of an undisturbed one.
sweeps    Sweeps of two runs: the sweep or the run is killed or stopped, or started twice, or loses a folder. The signal
          is named, and the same command again finishes all runs with the same bits.
tune      Tunings whose search space or folder is forged, or that are killed or stopped. A forged space is rejected in
          one line, and the same command again has the same results.
slurm     Folders of sweeps on Slurm with forged files and links, beside commands of Slurm that say anything. No file is
          executed or followed. The command ends without a traceback.
surroundings
          Commands with closed or full streams, a deleted folder, an unusual user or environment. Runs have the same
          bits, no command prints a traceback, and a rejection ends with one line of this package.
messages  Secure exchanges with one corrupted message: a SecureError immediately, without effects, or at the server.
clients   Real clients with fake messages, one of which replies arbitrarily: a lost client, one printable line, and the
          same answers of the others.
values    Real clients, one of which sends well-formed numbers that are extreme or not finite. It is lost, or the round
          counts it; the run does not diverge, and what it saves is finite.
servers   Real clients whose server sends arbitrary messages: an answer or one line, and the client works as before.

Trials are forks of this process, which has imported everything but has not started JAX. Plots are not drawn.
"""

import argparse
import collections
import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot  # noqa: F401 (imported once, before the forks)
import numpy as np
import orbax.checkpoint  # noqa: F401
from chaos_clocks import adapters, clocks
from chaos_deploy import clients, servers, values
from chaos_folders import folders
from chaos_inputs import files, flags
from chaos_messages import messages
from chaos_processes import processes
from chaos_runs import KILLED, Child, World, Wrong, fingerprint, kills, settings, storage, to_the_end
from chaos_studies import slurm, tunings
from chaos_surroundings import surroundings, sweeps

from fedjax_mr import plots
from fedjax_mr.engine.devices import add_xla_flags, usable_cores


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      function: makes a trial: world x number x empty folder -> (how often it tried, what).
      count: of tries; the row ``kills`` has several in each trial.
      weight: of the time that the row may take, relative to the other rows.
    """

    function: Callable[[World, int, Path], tuple[int, str]]
    count: int
    weight: float


ROWS = {
    "kills": Row(kills, 100, 52),
    "storage": Row(storage, 60, 18),
    "files": Row(files, 240, 14),
    "folders": Row(folders, 240, 10),
    "adapters": Row(adapters, 60, 10),
    "clocks": Row(clocks, 24, 14),
    "flags": Row(flags, 2000, 14),
    "sweeps": Row(sweeps, 12, 20),
    "tune": Row(tunings, 60, 14),
    "slurm": Row(slurm, 200, 6),
    "surroundings": Row(surroundings, 60, 20),
    "processes": Row(processes, 12, 10),
    "messages": Row(messages, 2400, 2),
    "clients": Row(clients, 700, 6),
    "values": Row(values, 100, 4),
    "servers": Row(servers, 400, 6),
}


def attempt(world: World, row: Row, number: int, place: Path) -> dict:
    """Make one trial in an empty folder; return what is told of it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        tried, what = row.function(world, number, place)
        return {"number": number, "tried": tried, "what": what, "wrong": None}
    except Exception as error:  # broad: whatever a trial raises is reported, and the next one is made
        wrong = str(error) if isinstance(error, Wrong) else traceback.format_exc()
        return {"number": number, "tried": 1, "wrong": wrong}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def work(world: World, row: str, numbers: Sequence[int], cores: int, seconds: float) -> list[dict]:
    """Make the trials of a row on all cores, beginning none after some seconds; return what is told of each."""
    until, children = time.monotonic() + seconds, []
    for core in range(cores):
        told = world.folder / f"{row}-{core}.jsonl"

        def mine(core: int = core, told: Path = told) -> int:
            with told.open("w") as file:
                for number in numbers[core::cores]:
                    if time.monotonic() > until:
                        break
                    told_of = attempt(world, ROWS[row], number, world.folder / f"{row}-{core}")
                    file.write(json.dumps(told_of) + "\n")
                    file.flush()
            return 0

        children.append((Child(mine, log=world.folder / f"{row}-{core}.log"), told))
    found = []
    for child, told in children:
        _, status = os.waitpid(child.pid, 0)
        found += [json.loads(line) for line in told.read_text().splitlines()]
        if status:
            found.append({"number": -1, "tried": 1, "wrong": f"the trials died:\n{child.log.read_text()}"})
    return found


def prepare(world: World) -> World:
    """Write the data set, train the uninterrupted run and return the world with its fingerprint."""
    rng, y = np.random.default_rng(0), np.arange(96) % 3
    x = (rng.normal(size=(96, 4, 4, 1)) + y[:, None, None, None]).astype(np.float32)
    np.savez(world.folder / "tiny.npz", x=x[:72], y=y[:72], x_test=x[72:], y_test=y[72:])
    os.environ["XDG_CACHE_HOME"] = str(world.folder / "cache")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    add_xla_flags({"xla_backend_optimization_level": "0"})  # programs that run for milliseconds
    for name in ("partition", "curves", "personal"):
        setattr(plots, name, lambda *_, **__: None)
    to_the_end([*settings(world, "fedmr"), "--keep_checkpoints=100"], world.straight)
    return world._replace(expected=fingerprint(world.straight))


def run(options: argparse.Namespace) -> int:
    """Make all trials, print the table and the failures, and return the exit code."""
    counts = {row: getattr(options, row) for row in ROWS}
    minutes = options.minutes or (10 if options.tries is None else math.inf)
    per_weight = 60 * minutes / sum(ROWS[row].weight for row in options.only)
    failures = []
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        world = prepare(World(Path(folder), options.seed, counts))
        print(f"{'row':14}{'tried':>8}{'failed':>8}{'left out':>10}{'seconds':>9}", flush=True)
        for row in options.only:
            trials = len(KILLED) if row == "kills" else counts[row]
            numbers = list(range(trials)) if options.trial is None else [options.trial]
            began, seconds = time.monotonic(), per_weight * ROWS[row].weight
            world = world._replace(each=seconds * options.cores / max(1, len(numbers)))
            told = work(world, row, numbers, options.cores, seconds)
            wrong = [each for each in told if each["wrong"]]
            tried, left = sum(each["tried"] for each in told), len(numbers) - len(told)
            spent = time.monotonic() - began
            print(f"{row:14}{tried:8,}{len(wrong):8,}{left:10,}{spent:9.0f}", flush=True)
            for what, count in collections.Counter(each["what"] for each in told if not each["tried"]).items():
                print(f"    {count} not tried: {what}", flush=True)
            failures += wrong
            for each in wrong:
                _describe(row, each, f"--seed={options.seed} --only={row} --{row}={counts[row]}")
    return 1 if failures else 0


def _describe(row: str, failed: dict, flags: str) -> None:
    """Print what failed, its last lines, and the command that repeats it."""
    last = [line[:300] for line in failed["wrong"].splitlines()]
    shown = last if len(last) <= 12 else [*last[:3], "...", *last[-8:]]
    print(f"\n{row}: {shown[0]}", *(f"    | {line}" for line in shown[1:]), sep="\n")
    print(f"    again: chaos.py {flags} --trial={failed['number']}\n", flush=True)


def read(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(ROWS), help="rows, with commas")
    parser.add_argument("--trial", type=int, help="only the trial of this number")
    parser.add_argument("--minutes", type=float, help="after which no trial begins; a row has its share (default 10)")
    parser.add_argument("--tries", type=int, help="of all rows together; then --minutes is unlimited if left out")
    parser.add_argument("--cores", type=int, default=min(2, usable_cores()), help="processes that make trials")
    for name, row in ROWS.items():
        parser.add_argument(f"--{name}", type=int, help=f"tries (default {row.count:,})")
    options = parser.parse_args(arguments)
    share = 1 if options.tries is None else options.tries / sum(row.count for row in ROWS.values())
    for name, row in ROWS.items():
        if getattr(options, name) is None:
            setattr(options, name, max(1, round(row.count * share)))
    if unknown := [row for row in options.only if row not in ROWS]:
        parser.error(f"unknown row {unknown[0]}: one of {', '.join(ROWS)}")
    return options


if __name__ == "__main__":
    sys.exit(run(read()))
