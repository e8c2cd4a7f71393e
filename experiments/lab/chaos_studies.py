"""Rows ``tune`` and ``slurm`` of chaos.py: tunings that are disturbed or forged, and folders of a sweep on Slurm."""

import fcntl
import importlib.util
import os
import pickle
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from chaos_inputs import TEXTS, command, spoil
from chaos_runs import PATIENCE, Ended, World, Wrong, fingerprint, require_one_line, settings
from chaos_surroundings import REFUSED, command_of, started, wait
from fedjax_mr.sweep import __main__ as sweep
from fedjax_mr.sweep import slurm as on_slurm
from fedjax_mr.tune import __main__ as tune

# --- Tunings ---------------------------------------------------------------------------------------------------------

SPACE = "--lr=log:0.01:0.3\n--momentum=0,0.5,0.9\n--fedprox_mu=0.01,0.1\n--local_epochs=lin:1:3  # whole numbers\n"
KINDS = ("the space spoiled", "a file of the folder spoiled", "the tuning killed", "the tuning stopped")


def tunings(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Forge the space or a file of a tuning, or end it at any moment; the same command again has the same results."""
    chance = random.Random(f"{world.seed}/tune/{number}")
    kind = KINDS[0] if number % 4 else KINDS[1 + number // 4 % 3]
    if kind == KINDS[0]:
        return _space(world, chance, folder)
    expected, place = _undisturbed(world), folder / "tuning"
    tried = kind
    try:
        if kind == KINDS[1]:
            shutil.copytree(world.folder / "tuning", place)
            path = chance.choice(sorted(entry for entry in place.rglob("*") if entry.is_file() and _is_read(entry)))
            content, how = spoil(chance, path.read_bytes())
            path.write_bytes(content)
            tried = f"{path.relative_to(place)} of a tuning, {how}"
        else:
            delay = chance.uniform(0, 12)
            tried = f"{kind} after {delay:.2f} s"
            with started(_command(world, place), folder / "first.log") as (process, ended):
                _sleep(process, delay)
                process.send_signal(signal.SIGKILL if kind == KINDS[2] else signal.SIGTERM)
                first = ended()
            # Python itself ends by the signal while it still imports the package.
            if (
                first.code not in (0, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
                or "Traceback" in first.said
            ):
                raise Wrong(f"the tuning ends with {first}")
        again = _run(world, place)
        if "Traceback" in again.said or again.code not in (0, 1, REFUSED):
            raise Wrong(f"the same command ends with {again}")
        if again.code and kind != KINDS[1]:
            raise Wrong(f"left alone, the tuning ends with {again}")
        if not again.code and (found := _results(place)) != expected:
            raise Wrong(f"other results:\n{found}\nwithout the disturbance:\n{expected}")
    except Wrong as wrong:
        raise Wrong(f"{tried}: {wrong}") from None
    return 1, tried


def _space(world: World, chance: random.Random, folder: Path) -> tuple[int, str]:
    place, path = folder / "place", folder / "space.flags"
    place.mkdir()
    content, how = spoil(chance, SPACE.encode())
    if chance.random() < 0.3:
        content, how = f"{SPACE}--dropout={','.join(map(str, range(10**5)))}".encode(), "with a long line"
    path.write_bytes(content)
    flags = [*_flags(world), "--strategies=fedavg,fedprox", f"--space={path}", "--dry_run", "--budget=3"]
    ended = command(tune.main, [*flags, f"--tune_dir={place / 'tuning'}"], place)
    tried = f"a space {how}"
    try:
        require_one_line(ended)
        if left := sorted(entry.name for entry in place.iterdir()):
            raise Wrong(f"a plan has left {left}:\n{ended.said}")
    except Wrong as wrong:
        raise Wrong(f"{tried}: {wrong}\n{content[:500]!r}") from None
    return 1, tried


def _flags(world: World) -> list[str]:
    short = ("--strategy", "--rounds", "--checkpoint_every")
    return [*(flag for flag in settings(world, "fedavg") if not flag.startswith(short)), "--rounds=6"]


def _command(world: World, place: Path) -> list[str]:
    flags = [*_flags(world), "--strategies=fedavg,fedmr", "--budget=3", "--eta=2", "--seeds=5"]
    return command_of("tune", *flags, f"--tune_dir={place}")


def _run(world: World, place: Path) -> Ended:
    try:
        done = subprocess.run(
            _command(world, place), capture_output=True, text=True, errors="replace", timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise Wrong(f"hangs: nothing after {PATIENCE} seconds") from None
    return Ended(done.returncode, done.stdout + done.stderr)


def _undisturbed(world: World) -> str:
    """The results of an undisturbed tuning; it is trained once."""
    place = world.folder / "tuning"
    with (world.folder / "tuning.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            ended = _run(world, place)
            if ended.code:
                raise Wrong(f"left alone, a tuning ends with {ended}")
            (place / "done").touch()
        return _results(place)


def _results(place: Path) -> str:
    """The scores of the trials, the chosen settings, and the bits of the tests, by the names of their folders."""
    texts = [path.read_text() for path in (place / "trials.csv", *sorted(place.glob("*.flags")))]
    bits = [f"{run.name} {fingerprint(run)}" for run in sorted((place / "tests").iterdir()) if run.is_dir()]
    return "\n".join([*texts, *bits])


def _is_read(path: Path) -> bool:
    return path.suffix in (".json", ".jsonl", ".csv", ".flags", ".npz") and path.name != "done"


def _sleep(process: subprocess.Popen, seconds: float) -> None:
    until = time.monotonic() + seconds
    wait(lambda: process.poll() is not None or time.monotonic() > until)


# --- Folders of a sweep on Slurm -------------------------------------------------------------------------------------

SAID_BY_SQUEUE = (
    "7_0 RUNNING\n7_1 PENDING", "7_0 COMPLETED\n7_1 FAILED", "7_0 COMPLETING\n7_1 COMPLETING", "", "7_0",
    "7_0 NEW_STATE", "\x1b[2J", "7_0 RUNNING and more\n\n8", "[" * 10**5, "../7 RUNNING", "é ü", "7_0 RUNNING\n" * 999,
)  # fmt: skip
SAID_BY_SBATCH = ("Submitted batch job 8", "Submitted batch job 8", "", "no number", "8;cluster", "x" * 10**5)
NAMES = ("7_0_result.pkl", "7_1_result.pkl", "8_0_result.pkl", "8_0_0_result.pkl", "7_0_submitted.pkl")
NAMES += ("8_submitted.pkl", "8_0_submitted.pkl", "7_0_code.txt", "7_1_code.txt", "8_0_code.txt", "jobs.json")
CODES = (b"0\n", b"1\n", b"2\n", b"143\n", b"-1\n", b"0", b"0\n0\n", b"99999\n", "²\n".encode(), b"\0\n")


class _Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def slurm(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Forge files of a sweep's jobs and the output of Slurm. Nothing is executed or followed; no traceback."""
    if importlib.util.find_spec("submitit") is None:
        return 0, "submitit is not installed"
    chance = random.Random(f"{world.seed}/slurm/{number}")
    place, bin, outside, mark = folder / "place", folder / "bin", folder / "outside", folder / "executed"
    for folder in (place, bin, outside):
        folder.mkdir()
    flags = [flag for flag in settings(world, "fedavg") if not flag.startswith("--strategy")]
    flags += ["--strategies=fedavg,fedmr", "--launcher=slurm", f"--sweep_dir={place / 'sweep'}"]
    before, on_slurm.SECONDS_PER_LOOK = os.environ["PATH"], 0.001
    os.environ["PATH"] = f"{bin}:{before}"
    try:
        _script(bin / "srun", "")
        _script(bin / "sbatch", "Submitted batch job 7")
        _script(bin / "squeue", "")
        first = command(sweep.main, [*flags, "--nowait"], place)
        if first.code:
            raise Wrong(f"left alone, a sweep cannot submit: {first}")
        tried = _forge(chance, place / "sweep" / "slurm", outside, mark)
        contents = {path.name: path.read_bytes() for path in outside.iterdir()}
        squeue, sbatch = chance.choice(SAID_BY_SQUEUE), chance.choice(SAID_BY_SBATCH)
        _script(bin / "squeue", squeue)
        _script(bin / "sbatch", sbatch)
        # Jobs that never end are not waited for.
        waits = "RUNNING" not in squeue and "COMPLETING" not in squeue
        tried += f"; squeue says {squeue[:40]!r}, sbatch says {sbatch[:40]!r}"
        try:
            ended = command(sweep.main, [*flags, *([] if waits else ["--nowait"])], place)
            if ended.code not in (0, 1, REFUSED) or "Traceback" in ended.said:
                raise Wrong(f"the sweep ends with {ended}")
            if mark.exists():
                raise Wrong(f"a file was executed:\n{ended.said}")
            if contents != {path.name: path.read_bytes() for path in outside.iterdir()}:
                raise Wrong(f"what a link leads to has changed:\n{ended.said}")
            last = ended.said.splitlines()[-1] if ended.said else ""
            if ended.code == REFUSED and (not last.startswith("fedjax-mr: ") or len(last) > 1000):
                raise Wrong(f"a refusal does not end in a line of ours: {ended}")
        except Wrong as wrong:
            raise Wrong(f"{tried}: {wrong}") from None
    finally:
        os.environ["PATH"] = before
    return 1, tried


def _script(path: Path, output: str) -> None:
    path.with_suffix(".txt").write_text(f"{output}\n" if output else "")
    path.write_text(f"#!/bin/sh\ncat {path.with_suffix('.txt')}\n")
    path.chmod(0o755)


def _forge(chance: random.Random, place: Path, outside: Path, mark: Path) -> str:
    """Forge one to three files of the folder of the jobs, and return it in words."""
    lines = []
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(NAMES)
        path, bomb = place / name, pickle.dumps(("success", _Bomb(mark)))
        kind = chance.choice(("a bomb", "a bomb", "spoiled", "spoiled", "a link", "a folder", "a pipe"))
        if path.exists() or path.is_symlink():
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b"{}"
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        else:
            content = bomb
        if kind == "a link":
            (outside / name).write_bytes(b"mine")
            path.symlink_to(outside / name)
        elif kind == "a folder":
            path.mkdir()
        elif kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a bomb" and path.suffix == ".pkl":
            path.write_bytes(bomb)
        elif path.suffix == ".txt":
            path.write_bytes(chance.choice((*CODES, *TEXTS)))
        else:
            path.write_bytes(spoil(chance, content)[0])
        lines.append(f"{name} {kind}")
    return ", ".join(lines)
