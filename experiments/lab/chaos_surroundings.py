"""Rows ``sweeps`` and ``surroundings`` of chaos.py: real commands that are disturbed, or start in odd places."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos_runs import PATIENCE, ROUNDS, Ended, World, Wrong, require_bits, settings
from fedjax_mr.experiment.folder import run_state, saved_round
from fedjax_mr.results.locks import is_taken

STRANGER = 54321  # a user without an entry in the user database
SETPRIV, RMDIR = shutil.which("setpriv"), shutil.which("rmdir")  # a trial may take PATH away
REFUSED, CLOSED_PIPE, CANNOT_EXECUTE = 2, 141, (126, 127)


def command_of(module: str, *arguments: str) -> list[str]:
    """The command line of a module of the package."""
    return [sys.executable, "-m", f"fedjax_mr.{module}", *arguments]


def _end(process: subprocess.Popen) -> None:
    """Kill the remaining processes of a trial."""
    if process.poll() is None:
        process.kill()
        process.wait()


# --- Sweeps ----------------------------------------------------------------------------------------------------------

DISTURBED = (
    "the sweep killed",
    "the run killed",
    "the run aborted",
    "the sweep stopped",
    "two sweeps",
    "folder removed",
)


def sweeps(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Disturb a sweep of two methods; the same command again finishes it, with the bits of an undisturbed run."""
    chance = random.Random(f"{world.seed}/sweeps/{number}")
    kind = DISTURBED[number % len(DISTURBED)]
    when, delay = chance.randrange(ROUNDS - 2), chance.uniform(0, 0.5)
    tried = f"{kind} {delay:.2f} s after round {when} of the first run"
    flags = [flag for flag in settings(world, "fedmr") if not flag.startswith("--strategy")]
    command = command_of("sweep", *flags, "--strategies=fedmr,fedavg", f"--sweep_dir={folder / 'sweep'}")
    try:
        with started(command, folder / "first.log") as (process, ended):
            run = _first_run(folder / "sweep", process)
            wait(lambda: process.poll() is not None or (saved_round(run) or 0) >= when, ended)
            time.sleep(delay)
            _disturb(kind, process, run, command, folder)
            _require_named(kind, ended())
        wait(lambda: not is_taken(run), ended)  # a run ends with its sweep, and saves before
        again = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
        if again.returncode or "Traceback" in again.stderr:
            raise Wrong(f"left alone, the sweep ends with {Ended(again.returncode, again.stdout + again.stderr)}")
        states = {path.name: run_state(path) for path in (folder / "sweep").iterdir() if path.is_dir()}
        if sorted(states.values()) != ["finished"] * 2:
            raise Wrong(f"not every run is finished: {states}")
        require_bits(run, world.expected)
    except (Wrong, subprocess.TimeoutExpired) as wrong:
        raise Wrong(f"{tried}: {wrong}") from None
    return 1, tried


@contextlib.contextmanager
def started(command: list[str], log: Path) -> Any:
    """A process whose output goes to a file, and a function that waits for its end."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def ended() -> Ended:
        try:
            return Ended(process.wait(PATIENCE), log.read_text(errors="replace"))
        except subprocess.TimeoutExpired:
            raise Wrong(f"hangs: nothing after {PATIENCE} seconds\n{log.read_text(errors='replace')}") from None

    try:
        yield process, ended
    finally:
        _end(process)


def _first_run(folder: Path, process: subprocess.Popen) -> Path:
    """The folder of the run that the sweep trains first, once it exists."""
    found: list[Path] = []
    wait(lambda: bool(found.extend(folder.glob("fedmr-*/config.json")) or found or process.poll() is not None))
    if not found:
        raise Wrong(f"the sweep ended without a run, code {process.returncode}")
    return found[0].parent


def wait(until: Callable[[], bool], ended: Callable[[], Ended] | None = None) -> None:
    """Wait until a condition holds.

    Raises:
      Wrong: it takes too long.
    """
    deadline = time.monotonic() + PATIENCE
    while not until():
        if time.monotonic() > deadline:
            raise Wrong(f"hangs: nothing after {PATIENCE} seconds" + (f"\n{ended()}" if ended else ""))
        time.sleep(0.005)


def _disturb(kind: str, process: subprocess.Popen, run: Path, command: list[str], folder: Path) -> None:
    if kind == "two sweeps":
        with started(command, folder / "second.log") as (_, ended):
            other = ended()
        if other.code not in (0, REFUSED) or "Traceback" in other.said:
            raise Wrong(f"the second sweep ends with {other}")
    elif kind == "folder removed":
        shutil.rmtree(run, ignore_errors=True)  # the run may be writing into it
    elif kind.startswith("the sweep"):
        process.send_signal(signal.SIGKILL if kind == "the sweep killed" else signal.SIGTERM)
    else:
        for child in _children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL if kind == "the run killed" else signal.SIGABRT)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        threads = Path(f"/proc/{pid}/task").glob("*/children")  # any thread may have started the run
        return [int(child) for thread in threads for child in thread.read_text().split()]
    return []


def _require_named(kind: str, ended: Ended) -> None:
    """Require that a sweep ends as it should: of its own accord, or with the name of the signal of its run."""
    codes = {
        "the sweep killed": (-signal.SIGKILL, 0), "the sweep stopped": (128 + signal.SIGTERM, 0),
        "two sweeps": (0, REFUSED), "folder removed": (0, 1, REFUSED),
    }.get(kind, (0, 1))  # fmt: skip
    if ended.code not in codes or "Traceback" in ended.said:
        raise Wrong(f"the sweep ends with {ended}")
    name = {"the run killed": "killed by SIGKILL", "the run aborted": "killed by SIGABRT"}.get(kind, "")
    if ended.code == 1 and name not in ended.said:
        raise Wrong(f"the sweep does not say {name!r}: {ended}")


# --- Surroundings ----------------------------------------------------------------------------------------------------

OUTPUTS = ("", "", ">&-", ">/dev/full", "| closed")
ERRORS = ("", "", "2>&-", "2>/dev/full")
PLACES = ("", "", "deleted")
ENVIRONMENTS: tuple[dict[str, str | None], ...] = (
    {}, {"HOME": None, "XDG_CACHE_HOME": None}, {"HOME": "/nonexistent", "XDG_CACHE_HOME": None},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "1"},
    {"TERM": None, "PATH": ""}, {"PYTHONUNBUFFERED": "1"}, {"XDG_CACHE_HOME": "/dev/null"}, {"TZ": "x", "LANG": "x"},
)  # fmt: skip
OTHERS = (
    ("main", "--version"), ("main", "--help=all"), ("main", "--lrr=1"), ("models",), ("analysis", "table", "absent"),
    ("data",), ("sweep", "--seeds=0:2", "--dry_run"), ("deploy", "new", "app"), ("main", "--dataset=mnist"),
)  # fmt: skip


def surroundings(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Run a command with odd streams, folder, user and environment; a run has the bits of one in good order."""
    chance = random.Random(f"{world.seed}/surroundings/{number}")
    output, errors, place = chance.choice(OUTPUTS), chance.choice(ERRORS), chance.choice(PLACES)
    closed, environment = chance.choice(("", "<&-")), chance.choice(ENVIRONMENTS)
    stranger = chance.random() < 0.3 and os.getuid() == 0 and SETPRIV is not None
    run = folder / "run" if number % 3 == 0 else None
    if run is not None:
        command = command_of("main", *settings(world, "fedmr"), f"--run_dir={run}")
    else:
        command = command_of(*chance.choice(OTHERS))
    tried = f"{' '.join(command[2:5])} {output} {errors} {closed} in a folder {place or 'as usual'}, {environment}"
    tried += ", by a user without an entry" * stranger
    log = folder / "said"
    with contextlib.suppress(FileExistsError):
        (folder / "place").mkdir()
    for path in (world.folder, folder, folder / "place"):
        path.chmod(0o777)  # a stranger reads and writes there, too
    try:
        ended = _run(command, folder / "place", (closed, output, errors), place, environment, stranger, log)
        if stranger and ended.code in CANNOT_EXECUTE:
            return 0, "this Python is not for other users"
        _require_plain(ended, output, errors)
        if run is not None:
            expected = {">/dev/full": REFUSED, "| closed": CLOSED_PIPE}.get(output, 0)
            if ended.code != expected:
                raise Wrong(f"expected code {expected}: {ended}")
            require_bits(run, world.expected)
    except Wrong as wrong:
        raise Wrong(f"{tried}: {wrong}") from None
    return 1, tried


def _run(
    command: list[str], place: Path, streams: tuple[str, ...], where: str, environment: dict, stranger: bool, log: Path
) -> Ended:
    """Run a command in a shell that prepares its streams and its folder; return its code and its standard error."""
    deleted = f"{RMDIR} '{place}' && " if where == "deleted" else ""
    user = f"{SETPRIV} --reuid={STRANGER} --regid={STRANGER} --clear-groups" if stranger else ""
    line = f'{deleted}{user} "$0" "$@" {" ".join(stream for stream in streams if not stream.startswith("|"))}'
    variables = {name: value for name, value in (os.environ | environment).items() if value is not None}
    with log.open("w") as file:
        reader, writer = os.pipe()
        os.close(reader)
        output = writer if "| closed" in streams else subprocess.DEVNULL
        process = subprocess.Popen(
            ["/bin/sh", "-c", line, *command], cwd=place, env=variables, stdout=output, stderr=file,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(writer)
    try:
        return Ended(process.wait(PATIENCE), log.read_text(errors="replace"))
    except subprocess.TimeoutExpired:
        raise Wrong(f"hangs: nothing after {PATIENCE} seconds\n{log.read_text(errors='replace')}") from None
    finally:
        _end(process)


def _require_plain(ended: Ended, output: str, errors: str) -> None:
    """Require a foreseen code, no traceback and, where something is refused, one line of ours at the end."""
    if ended.code not in (0, REFUSED, CLOSED_PIPE) or (ended.code == CLOSED_PIPE) > (output == "| closed"):
        raise Wrong(f"ends with {ended}")
    if "Traceback" in ended.said or "Exception ignored" in ended.said:
        raise Wrong(f"a traceback: {ended}")
    if ended.code == REFUSED and not errors and not ended.said.splitlines()[-1].startswith("fedjax-mr: "):
        raise Wrong(f"a refusal does not end in a line of ours: {ended}")
