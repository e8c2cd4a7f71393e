"""Rows ``kills`` and ``storage`` of chaos.py, and shared parts of all trials: processes, settings, bits of a run."""

import contextlib
import functools
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_mr import main
from fedjax_mr.experiment.checkpoint import MANIFEST, Checkpoints
from fedjax_mr.experiment.folder import read_rows, saved_round
from fedjax_mr.results import manifest
from fedjax_mr.strategies import STRATEGIES, on_any_network
from fedjax_mr.terminal import interrupts

ROUNDS = 16
PATIENCE = 1800  # seconds after which a process hangs; on a busy machine a run takes many times longer
FEW = {  # settings with which the server does little, and what a strategy needs
    "fedrep": ["--local_epochs=2"],  # one for the head, one for the rest
    "fedgen": ["--fedgen_steps=5", "--fedgen_batch_size=16", "--fedgen_hidden=16"],
    "pfedhr": ["--pfedhr_groups=2", "--pfedhr_max_candidates=2", "--pfedhr_server_epochs=1"],
}


class Ended(NamedTuple):
    """How a process ended: its exit code (negative: the signal that ended it), and all that it printed."""

    code: int
    said: str

    def __str__(self) -> str:
        return f"code {self.code}:\n{self.said}"


class Wrong(Exception):
    """A trial failed; the message says how."""


class World(NamedTuple):
    """What all trials share: a folder with a small data set, an uninterrupted run and its fingerprint."""

    folder: Path
    seed: int
    counts: dict[str, int]
    expected: str = ""
    each: float = 60  # seconds that a trial of the row may take on average

    @property
    def straight(self) -> Path:
        return self.folder / "straight"


# --- Processes -------------------------------------------------------------------------------------------------------


class Child:
    """A fork of this process that runs one function, whose result is its exit code, and writes into a file."""

    def __init__(self, function: Callable[[], int], *, log: Path, limit: int | None = None) -> None:
        """Start it; ``limit`` is of the size of its files in bytes, of which the one with its output is one."""
        self.log = log
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            code = function()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self, until: Callable[[], bool] = lambda: False) -> Ended | None:
        """Wait for the end and return how it ended, or None as soon as ``until`` holds.

        Raises:
          Wrong: it hangs.
        """
        deadline = time.monotonic() + PATIENCE
        while not until():
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return Ended(os.waitstatus_to_exitcode(status), self.log.read_text(errors="replace"))
            if time.monotonic() > deadline:
                self.kill()
                raise Wrong(f"hangs: nothing after {PATIENCE} seconds\n{self.log.read_text(errors='replace')}")
            time.sleep(0.002)
        return None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def settings(world: World, strategy: str) -> list[str]:
    """The flags of the smallest federation of a strategy."""
    public = ["--public_share=0.2"] if STRATEGIES[strategy].public else []
    return [
        f"--strategy={strategy}", f"--dataset={world.folder / 'tiny.npz'}", "--partition=iid", "--model=mlp",
        "--clients=4", "--cohort=3", "--local_epochs=1", f"--rounds={ROUNDS}", "--eval_every=2", "--checkpoint_every=1",
        "--devices=1", "--noprogress", *public, *FEW.get(strategy, []),
    ]  # fmt: skip


def start(arguments: Sequence[str], folder: Path, limit: int | None = None) -> Child:
    """Start the command with some flags and a run folder; it goes on with the run there, if there is one."""
    mode = "--overwrite" if saved_round(folder) is None else "--resume"
    log = folder.parent / f"{folder.name}.log"
    command = functools.partial(main.main, [*arguments, f"--run_dir={folder}", mode])
    return Child(lambda: interrupts.run(command) or 0, log=log, limit=limit)


def to_the_end(arguments: Sequence[str], folder: Path) -> None:
    """Let a run end, or go on until it has."""
    ended = start(arguments, folder).wait()
    if ended is None or ended.code != 0:
        raise Wrong(f"left alone, the run ends with {ended}")


def fingerprint(folder: Path) -> str:
    """A text of the bits of a run: the arrays of its newest checkpoint, and its metrics without times."""

    def show() -> int:
        checkpoints = Checkpoints(folder / "checkpoints")
        round = max(checkpoints.rounds())
        leaves = json.loads((checkpoints.folder / str(round) / MANIFEST).read_text())["content"]["leaves"]
        template = {}
        for name, described in leaves.items():
            dtype, _, shape = described.rstrip("]").partition("[")
            template[name] = np.empty([int(length) for length in shape.split(",") if length], dtype)
        tree, _ = checkpoints.restore(template)
        bits, rows = hashlib.sha256(), hashlib.sha256()
        for name in sorted(tree):
            bits.update(name.encode() + tree[name].tobytes())
        for row in read_rows(folder):
            row.pop("seconds")
            rows.update(json.dumps(row).encode())
        print(f"round {round}, arrays {bits.hexdigest()[:16]}, metrics {rows.hexdigest()[:16]}")
        return 0

    ended = Child(show, log=folder.parent / f"{folder.name}.bits").wait()
    if ended is None or ended.code != 0:
        raise Wrong(f"the bits of the run cannot be read: {ended}")
    return ended.said.strip()


def require_bits(folder: Path, expected: str) -> None:
    """Require that a run has the bits of the uninterrupted one."""
    actual = fingerprint(folder)
    if actual != expected:
        raise Wrong(f"other bits: {actual}; without interruption {expected}")


def require_one_line(ended: Ended) -> None:
    """Require a success, or a refusal in one line and nothing else."""
    refused = ended.code == 2 and ended.said.startswith("fedjax-mr: ") and ended.said.count("\n") == 1
    if not (refused or ended.code == 0) or "Traceback" in ended.said:
        raise Wrong(f"ends with code {ended.code}, not in one line:\n{ended.said}")


# --- Kills -----------------------------------------------------------------------------------------------------------


KILLED = on_any_network()


def kills(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Kill runs of one strategy; return the number of kills and a description."""
    strategy = KILLED[number]
    wanted = world.counts["kills"] // len(KILLED) + (number < world.counts["kills"] % len(KILLED))
    if not wanted:
        return 0, "fewer kills than strategies"
    chance = random.Random(f"{world.seed}/kills/{number}")
    return killed(world, chance, strategy, settings(world, strategy), wanted, folder), strategy


def killed(world: World, chance: random.Random, what: str, arguments: Sequence[str], wanted: int, folder: Path) -> int:
    """Kill runs with some flags and resume them; return how many kills there were."""
    run, done = folder / "run", 0
    began = time.monotonic()
    to_the_end(arguments, folder / "straight")  # compiles, so that the runs to kill need not
    expected, length, moments = fingerprint(folder / "straight"), (time.monotonic() - began) / 2, []
    while done < wanted and not (done and time.monotonic() - began > world.each):
        shutil.rmtree(run, ignore_errors=True)
        for _ in range(chance.randint(1, min(3, wanted - done))):
            child = start(arguments, run)
            moment, until = _moment(chance, run, length)
            if child.wait(until) is not None:  # it had ended before
                break
            child.kill()
            done += 1
            moments.append(moment)
        try:
            to_the_end(arguments, run)
            require_bits(run, expected)
        except Wrong as wrong:
            raise Wrong(f"{what}, killed {', '.join(moments)}: {wrong}") from None
    return done


def _moment(chance: random.Random, run: Path, length: float) -> tuple[str, Callable[[], bool]]:
    """A random moment of a run, in words and as a condition that becomes true then."""
    began = time.monotonic()
    if chance.random() < 0.5:
        after = chance.uniform(0.05, 1.0) * length
        return f"after {after:.2f} s", lambda: time.monotonic() - began > after
    first, delay = (saved_round(run) or 0) + chance.randint(0, 6), chance.uniform(0, 0.08)
    seen: list[float] = []

    def reached() -> bool:
        if not seen and (saved_round(run) or -1) >= first:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] > delay

    return f"{1000 * delay:.0f} ms after the checkpoint of round {first}", reached


# --- Storage ---------------------------------------------------------------------------------------------------------

DAMAGED = ("checkpoint", "metrics.jsonl", "config.json", "run.flags")


def storage(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Let one fault happen to a run that begins or goes on; then without the fault it reaches the same bits."""
    chance = random.Random(f"{world.seed}/storage/{number}")
    run = folder / "run"
    round = chance.choice([None, chance.randrange(2, ROUNDS)])
    kind = ("limit", "disk", "damage", "damage")[number % 4]
    if kind == "damage":
        return 1, _damage(world, chance, run, chance.randrange(2, ROUNDS))
    size = int(2 ** chance.uniform(10, 19) if kind == "limit" else 2 ** chance.uniform(14, 21))
    went = "a new run" if round is None else f"a run resumed after round {round}"
    tried = f"{went}, {'files of at most' if kind == 'limit' else 'a file system of'} {size:,} bytes"
    arguments = settings(world, "fedmr")
    with contextlib.ExitStack() as stack:
        if kind == "disk":
            run = folder / "disk" / "run"
            run.parent.mkdir()
            if not _mount(run.parent, 1 << 26):
                return 0, "no file system can be mounted"
            stack.callback(subprocess.run, ["umount", "-l", str(run.parent)], check=True)
        if round is not None:
            stopped(world, run, round)
        if kind == "disk":
            _mount(run.parent, max(size, 1 << 13) + _used(run.parent), again=True)
        ended = start(arguments, run, limit=size if kind == "limit" else None).wait()
        try:
            assert ended is not None
            require_one_line(ended)
            if round is not None and (saved_round(run) or 0) < round:
                raise Wrong(f"the checkpoint of round {round} is lost:\n{ended.said}")
            if kind == "disk":
                _mount(run.parent, 1 << 26, again=True)
            to_the_end(arguments, run)
            require_bits(run, world.expected)
        except Wrong as wrong:
            raise Wrong(f"{tried}: {wrong}") from None
    return 1, tried


def _mount(folder: Path, size: int, *, again: bool = False) -> bool:
    """Mount a file system in memory at a folder, or change its size; return whether this user may."""
    options = f"{'remount,' if again else ''}size={-(-size // 4096) * 4096}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


def _used(folder: Path) -> int:
    return shutil.disk_usage(folder).used


def stopped(world: World, run: Path, round: int) -> None:
    """Make the folder of a run that was stopped after a round, from the uninterrupted one."""
    stopped_from(world.straight, run, round)


def stopped_from(straight: Path, run: Path, round: int) -> None:
    """Make the folder of a run that was stopped after a round, from one that kept all checkpoints."""
    shutil.copytree(straight, run)
    (run / "summary.json").unlink()
    for path in (run / "checkpoints").iterdir():
        if int(path.name) > round or int(path.name) < round - 1:
            shutil.rmtree(path)
    metrics = run / "metrics.jsonl"
    rows = [line for line in metrics.read_text().splitlines() if json.loads(line)["round"] <= round]
    metrics.write_text("".join(f"{line}\n" for line in rows))
    sealed = manifest.read_run(run)
    of_metrics = {metrics.name: manifest.crc(metrics)}
    files = {name: crc for name, crc in sealed["files"].items() if (run / name).exists()} | of_metrics
    sizes = sealed.get("sizes", {}) | {metrics.name: metrics.stat().st_size}
    (run / manifest.MANIFEST).write_text(manifest.text_of(files, sizes=sizes))


def _damage(world: World, chance: random.Random, run: Path, round: int) -> str:
    """Damage one file of a stopped run, go on; if that is refused, put the file back and go on again."""
    stopped(world, run, round)
    which = chance.choice(DAMAGED)
    path = run / which
    if which == "checkpoint":
        path = chance.choice(
            sorted(entry for entry in (run / "checkpoints" / str(round)).rglob("*") if entry.is_file())
        )
    content = path.read_bytes()
    place = chance.randrange(max(1, len(content)))
    damage = chance.choice(("cut", "emptied", "one bit flipped", "deleted"))
    tried = f"{path.relative_to(run)} {damage} (byte {place}) of a run stopped after round {round}"
    if damage == "deleted":
        path.unlink()
    else:
        flipped = bytearray(content)
        if flipped:
            flipped[place] ^= 1 << chance.randrange(8)
        path.write_bytes({"cut": content[:place], "emptied": b""}.get(damage, bytes(flipped)))
    arguments = settings(world, "fedmr")
    flags = [f"--flagfile={path}"] if which == "run.flags" else arguments
    child = Child(lambda: main.main([*flags, f"--run_dir={run}", "--resume"]), log=run.parent / "damaged.log")
    try:
        ended = child.wait()
        assert ended is not None
        require_one_line(ended)
        if which == "checkpoint" and content and (ended.code or " is damaged (" not in ended.said):
            raise Wrong(f"a damaged newest checkpoint has to be told and left for the older one: {ended}")
        if ended.code:
            path.write_bytes(content)
            to_the_end(arguments, run)
        require_bits(run, world.expected)
    except Wrong as wrong:
        raise Wrong(f"{tried}: {wrong}") from None
    return tried
