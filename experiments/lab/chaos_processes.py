"""Row ``processes`` of chaos.py: one of two or three processes of a run is killed, frozen or asked to stop."""

import contextlib
import fcntl
import os
import random
import re
import signal
import socket
import sys
import time
from pathlib import Path

from chaos_runs import PATIENCE, Child, World, Wrong, fingerprint, require_bits, settings
from fedjax_mr.experiment.folder import saved_round

ROUNDS = 60
ENDED_SECONDS = PATIENCE  # after which the others must have ended
LOST = 4
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "asked to stop": signal.SIGTERM}
OTHERS = re.compile(r"\[Gloo\]|$|stopping after the current rounds")  # lines of a library, and of a stop
PORT_SECONDS = 60  # within which the coordinator's port is free again


def processes(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Disturb one process; the others end with our line, and the resumed run has the bits of an undisturbed one."""
    chance = random.Random(f"{world.seed}/processes/{number}")
    count = 2 + number % 2
    victim = chance.choice([0, chance.randrange(count)])  # mostly process 0, whose service connects the others
    kind = chance.choice(["killed", "killed", "killed", "frozen", "asked to stop"])
    first, delay = chance.randrange(1, ROUNDS), chance.uniform(0, 0.3)
    tried = f"process {victim} of {count} {kind} {delay:.2f} s after the checkpoint of round {first}"
    try:
        expected = _undisturbed(world, count)
        run, port = folder / "run", _free_port()
        _disturb(_start(world, run, count, port), run, victim, kind, first, delay)
        _require_free(port)
        _to_the_end(world, run, count)
        require_bits(run, expected)
    except Wrong as wrong:
        raise Wrong(f"{tried}: {wrong}") from None
    return 1, tried


def _disturb(started: list[Child], run: Path, victim: int, kind: str, round: int, delay: float) -> None:
    """Disturb one process after a checkpoint, and require that the others end as they should."""
    running = dict(enumerate(started))
    code, line = LOST, r"fedjax-mr: another process of this run is lost.*go on with --resume \(.*\)\n"
    if kind == "asked to stop":
        code, line = 128 + signal.SIGTERM, r"fedjax-mr: stopped after round \d+ of \d+, saved; go on with: .*\n"
    try:
        if (ended := started[0].wait(lambda: (saved_round(run) or 0) >= round)) is not None:
            del running[0]
            raise Wrong(f"left alone, process 0 ends with {ended}")
        time.sleep(delay)
        os.kill(started[victim].pid, SIGNALS[kind])
        for index, child in enumerate(started):
            if index == victim and kind != "asked to stop":
                continue
            until = time.monotonic() + ENDED_SECONDS
            ended = child.wait(lambda until=until: time.monotonic() > until)
            if ended is None:
                raise Wrong(f"process {index} is still there after {ENDED_SECONDS} seconds:\n{child.log.read_text()}")
            del running[index]
            lines = [each for each in ended.said.splitlines(True) if not OTHERS.match(each)]
            said = "".join(lines[-1:] if code == LOST else lines)  # JAX may say more before
            if (ended.code != code or not re.fullmatch(line, said)) and not (ended.code == 0 and _complete(run)):
                raise Wrong(f"process {index} ends with {ended}")
    finally:
        for child in running.values():
            child.kill()


def _complete(run: Path) -> bool:
    return saved_round(run) == ROUNDS


def _undisturbed(world: World, count: int) -> str:
    """The fingerprint of an undisturbed run of this many processes; it is trained once."""
    folder = world.folder / f"straight-{count}"
    with (world.folder / f"straight-{count}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _complete(folder):
            _to_the_end(world, folder, count)
        return fingerprint(folder)


def _start(world: World, run: Path, count: int, port: int) -> list[Child]:
    """Start the processes of a run, or of one that goes on, as commands of their own."""
    started = []
    for index in range(count):
        command = [
            sys.executable, "-m", "fedjax_mr.main", *settings(world, "fedmr"),
            f"--rounds={ROUNDS}", f"--devices={count}",
            f"--run_dir={run}", "--overwrite" if saved_round(run) is None else "--resume",
            f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={index}",
        ]  # fmt: skip

        def execute(command: list[str] = command) -> int:
            os.execv(command[0], command)

        started.append(Child(execute, log=run.parent / f"{run.name}-{index}.log"))
    return started


def _to_the_end(world: World, run: Path, count: int) -> None:
    for index, child in enumerate(_start(world, run, count, _free_port())):
        ended = child.wait()
        if ended is None or ended.code != 0:
            raise Wrong(f"left alone, process {index} ends with {ended}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _require_free(port: int) -> None:
    """Require that nobody listens at the coordinator's port any more, soon after the end of all processes."""
    until = time.monotonic() + PORT_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    raise Wrong(f"port {port} is still taken")
