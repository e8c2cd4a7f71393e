"""Time the same federated training in this simulator and in others, each in its own environment.

    python experiments/lab/peers.py                                  # all of them on one core, then on two
    python experiments/lab/peers.py --quick --cores=1                # one local epoch, two turns
    python experiments/lab/peers.py --contestants=ours,pfl --json=FILE
    python experiments/lab/peers.py --course=blazefl --contestants=ours,torch_best,blazefl --cores=2 --repeats=3

FedAvg with LeNet-5 (62,006 parameters) on synthetic images of CIFAR-10's shape: 100 clients of 500 samples, 10 of them
per round, five local epochs, batch 50, SGD with learning rate 0.01 and momentum 0.5, on the CPU. ``ours`` is this
project, ``torch_loop`` a plain PyTorch loop through a DataLoader, ``torch_best`` the same without a DataLoader,
``pfl`` the simulation of pfl-research, ``flower`` that of Flower, ``fedjax`` FedJAX, ``flgo`` FLGo, ``blazefl``
BlazeFL, ``fluke`` fluke, and ``flare`` the simulator of NVIDIA FLARE. On two and more cores, each arrangement of
processes and threads of a simulator has its own row.

``--course=blazefl`` has the numbers of BlazeFL's published benchmark: all 100 clients train in each round, each with
two of the ten classes, with learning rate 0.1 and without momentum. The images are synthetic here, too. BlazeFL 3 needs
Python 3.14 without its lock, so the newest version with worker processes takes part.

``--course=resnet18`` trains BlazeFL's other benchmark network, torchvision's ResNet-18 (11,181,642 parameters), with
two clients per round and one epoch. All clients have all ten classes. Statistics of BatchNorm are averaged, too.

``--course=flare`` has eight clients, and all of them train in each round. FLARE takes part in no other course: with
more clients than workers, it starts a process for each client in each round.

``--course=memory`` trains two clients per round, first 19 rounds, then 180 more: ``memory_before`` and ``memory`` show
whether the memory grows with the rounds. Two runs with equal last losses to all digits (``--json``) have the same bits.

``--course=seeds`` trains 16 seeds for 20 rounds each, as users start them: ours one after another in one process, which
compiles once, the others a process per seed, as many at once as there are cores (Flower: one with an actor per core).
``seconds`` is the time from the start of the first process to the last test, ``start`` how long a single process needs
until its first round.

``ours_async`` and ``flgo_async`` train with FedBuff: 20 clients train at the same simulated time, and the server
updates its model with every 10 uploads. Such an update counts as a round, so all rows train 10 clients per round.

Each contestant is a process bound to the cores of its table. Its driver is a file in the folder ``peers``. After one or
two rounds of warm-up, the contestants take turns with one round each, ``--repeats`` times. The table has medians of the
seconds per round, of the CPU seconds per round (all processes of the contestant; Linux only), and of their ratios to
ours in the same turn, and the memory after the last round (MiB of all processes, shared pages counted once). It also
has loss and accuracy on 2,000 test images before the first and after the last round, which shows that all do the same
work. For a contestant that fails, the row has the last line of its error, and the exit code is 1. Flower's Ray uses
about 5 % of a core while other contestants have their turn; the others are idle then.

The Python that runs this script creates the environments with pip, once, in ``--environments`` (a gigabyte each);
where it is too old, the newest ``python3.N`` of the PATH does.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DRIVERS = Path(__file__).parent / "peers"
CLIENTS, SAMPLES, TEST, EPOCHS, BATCH = 100, 500, 2_000, 5, 50
FIGURES = (
    "seconds", "ratio", "cpu_seconds", "cpu_ratio", "memory_before", "memory", "loss_before", "loss_after",
    "accuracy_after",
)  # fmt: skip
PATIENCE = 900  # seconds until a contestant that does not answer is given up
TORCH = "torch==2.13.0"


class Course(NamedTuple):
    """What distinguishes the work of a contest."""

    cohort: int
    lr: float
    momentum: float
    classes: int  # of each client
    warm_up: int  # rounds before the first turn
    more: int = 0  # rounds after those, which are not timed
    seeds: int = 0  # 0: one seed, round by round in turns. Otherwise whole runs of as many seeds
    rounds: int = 20  # of each seed
    network: str = "lenet5"
    parameters: int = 62_006  # of the network
    epochs: int = EPOCHS
    clients: int = CLIENTS


COURSES = {
    "peers": Course(10, 0.01, 0.5, 10, 2),
    "blazefl": Course(100, 0.1, 0.0, 2, 1),
    "memory": Course(2, 0.01, 0.0, 10, 19, 180),
    "seeds": Course(10, 0.01, 0.0, 10, 0, seeds=16),
    "resnet18": Course(2, 0.1, 0.0, 10, 1, network="resnet18", parameters=11_181_642, epochs=1),
    "flare": Course(8, 0.01, 0.5, 10, 2, clients=8),
}
APART = ("blazefl", "flare")  # not in the usual course: the one knows no momentum, the other needs a process per client
OLDEST = {"blazefl": (3, 12)}  # Python of an environment
ENVIRONMENTS = {  # what pip installs; nothing: the environment that runs this script
    "ours": (),
    "torch": (TORCH, "numpy"),
    "pfl": (TORCH, "pfl==0.6.0"),
    "flower": (TORCH, "flwr[simulation]==1.42.0"),
    # With JAX 0.10.2 its jit backend takes a third longer, and pmap no longer has what FedJAX calls.
    "fedjax": ("fedjax==0.0.17", "jax==0.5.3", "jaxlib==0.5.3", "dm-haiku==0.0.14"),
    "flgo": (TORCH, "flgo==0.4.4"),
    "blazefl": (TORCH, "blazefl==2.0.3", "numpy", "tqdm"),  # it imports tqdm and does not require it
    "fluke": (TORCH, "fluke-fl==0.8.1"),
    "flare": (TORCH, "nvflare==2.9.0", "numpy"),
}


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Number of processes that share the clients of a round, and threads of each. The driver reads ``variant``."""

    kind: str
    processes: int
    threads: int
    variant: str = ""

    def __str__(self) -> str:
        """The printed form."""
        plural = ("es" if self.kind.endswith("s") else "s") if self.processes > 1 else ""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.processes} {self.kind}{plural} x {threads}"


Arrange = Callable[[int], tuple[Arrangement, ...]]  # the arrangements on so many cores


def threads_or_processes(variant: str = "") -> Arrange:
    """The arrangements: one process with a thread per core, and a process per core with one thread."""
    return lambda cores: tuple(
        Arrangement("process", processes, cores // processes, variant) for processes in sorted({1, cores})
    )


def threads_alone(variant: str = "") -> Arrange:
    """The only arrangement: one process with a thread per core."""
    return lambda cores: (Arrangement("process", 1, cores, variant),)


def few_or_many_workers(cores: int) -> tuple[Arrangement, ...]:
    """The arrangements of FLARE: a worker per core, and eight of them."""
    return tuple(Arrangement("worker", workers, 1) for workers in sorted({cores, 8}))


def jit_or_pmap(cores: int) -> tuple[Arrangement, ...]:
    """The backends of FedJAX: all cores for one client, and a device per core."""
    devices = Arrangement("device", cores, 1, "pmap")
    return (Arrangement("device", 1, cores, "jit"), *((devices,) if cores > 1 else ()))


CONTESTANTS: dict[str, tuple[str, Arrange]] = {  # environment (and driver), arrangements
    "ours": ("ours", lambda cores: (Arrangement("device", cores, 1),)),
    "torch_loop": ("torch", threads_or_processes("loader")),
    "torch_best": ("torch", threads_or_processes()),
    "pfl": ("pfl", threads_or_processes()),
    "flower": ("flower", lambda cores: (Arrangement("actor", cores, 1),)),
    "fedjax": ("fedjax", jit_or_pmap),
    "flgo": ("flgo", threads_alone()),
    "blazefl": ("blazefl", lambda cores: (Arrangement("process", cores, 1),)),
    "fluke": ("fluke", threads_alone()),
    "flare": ("flare", few_or_many_workers),
    "ours_async": ("ours", lambda cores: (Arrangement("device", cores, 1, "async"),)),
    "flgo_async": ("flgo", threads_alone("async")),
}


class FailedError(Exception):
    """A contestant cannot take part or continue. The message is one line."""


# ---- The environments


def interpreter(name: str, folder: Path) -> str:
    """The Python of an environment. It is created unless a complete one exists.

    Raises:
      FailedError: it cannot be created.
    """
    if not (requirements := ENVIRONMENTS[name]):
        return sys.executable
    home, maker = folder / name, python_for(name)
    python, note = home / "bin" / "python", home / "made-of.txt"
    wanted = "\n".join((f"Python {maker}", *requirements)) + "\n"
    if note.exists() and note.read_text(encoding="utf-8") == wanted:
        return str(python)
    print(f"making {home} of {' '.join(requirements)}", flush=True)
    try:
        subprocess.run([maker, "-m", "venv", "--clear", str(home)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise FailedError(f"no environment in {home}: {error}") from None
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = last_line(done.stderr)
        raise FailedError(f"pip could not install {' '.join(requirements)}; is a package index in reach? {reason}")
    note.write_text(wanted, encoding="utf-8")
    return str(python)


def python_for(name: str) -> str:
    """The Python that makes an environment: the one that runs this script unless it is too old.

    Raises:
      FailedError: there is no newer one.
    """
    oldest = OLDEST.get(name, (3, 0))
    if sys.version_info >= oldest:
        return sys.executable
    for minor in range(20, oldest[1] - 1, -1):
        if path := shutil.which(f"python{oldest[0]}.{minor}"):
            return path
    raise FailedError(f"it needs Python {oldest[0]}.{oldest[1]}, and the PATH has no python{oldest[0]}.{oldest[1]}")


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


# ---- The data


def write_data(path: Path, classes: int, clients: int) -> None:
    """Write images of bytes that can be learnt: a pattern of 4 x 4 coloured squares per class, with noise.

    Clients have all ten classes, or fewer ``classes``: as many shards of the images in the order of their labels.
    """
    random = np.random.default_rng(0)
    patterns = random.integers(0, 128, (10, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    count = clients * SAMPLES
    y = random.integers(0, 10, count + TEST, np.int32)
    x = random.integers(0, 128, (len(y), 32, 32, 3), np.uint8)
    x += patterns[y]
    order = np.arange(count)
    if classes < 10:
        shards = np.argsort(y[:count], kind="stable").reshape(clients * classes, -1)
        order = shards[random.permutation(len(shards))].reshape(-1)
    by_client = lambda array: array[order].reshape(clients, SAMPLES, *array.shape[1:])
    np.savez(path, x=by_client(x), y=by_client(y), test_x=x[count:], test_y=y[count:])


# ---- The processes


@contextlib.contextmanager
def bound_to(cores: int, after: int = 0) -> Iterator[None]:
    """Bind this thread, and the processes that it starts meanwhile, to so many of its cores, ``after`` the first."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[after : after + cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def tree(pid: int) -> Iterator[tuple[int, int]]:
    """The ids of a process and of its descendants, with the clock ticks of CPU that each has used."""
    children: dict[int, list[int]] = {}
    ticks = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(entry.parent.name)
        children.setdefault(int(fields[1]), []).append(number)
        ticks[number] = sum(map(int, fields[11:15]))  # user and system, its own and of children that have ended
    pids = [pid] if pid in ticks else []
    for number in pids:
        pids += children.get(number, [])
        yield number, ticks[number]


def proportional_memory(pid: int) -> float:
    """The memory of a process in MiB; a page that several processes share counts for each by its share."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


class Contestant:
    """A simulator in one arrangement, with its own processes."""

    def __init__(self, name: str, arrangement: Arrangement, cores: int, course: Course) -> None:
        """Store the arguments. `start` starts the processes."""
        self.name, self.arrangement, self.cores, self.course = name, arrangement, cores, course
        self.first_core = 0
        self.seeds = range(1)
        self.memory_before: float | None = None  # after the rounds of warm-up
        self.memory: float | None = None  # after the last round
        self.environment = CONTESTANTS[name][0]
        self.facts: dict[str, Any] = {}
        self.tests: list[dict[str, float]] = []  # before the first round and after the last
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.error: str | None = None
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by `stop`)

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Call a function unless this contestant has failed, and store its error."""
        if self.error is None:
            try:
                action(*arguments)
            except FailedError as error:
                self.error = str(error)
                self.stop()

    def start(self, folder: Path, data: Path, epochs: int) -> None:
        """Start the processes, test the first model and warm up.

        Raises:
          FailedError: there is no environment in the folder, or the processes ended.
        """
        python = interpreter(self.environment, folder)
        threads = self.arrangement.threads
        job = {
            "data": str(data), "network": self.course.network, "cohort": self.course.cohort, "epochs": epochs,
            "batch": BATCH, "lr": self.course.lr, "momentum": self.course.momentum,
            "processes": self.arrangement.processes, "threads": threads, "variant": self.arrangement.variant,
            "seed": self.seeds.start, "seeds": len(self.seeds),
        }  # fmt: skip
        paths = [DRIVERS, DRIVERS.parent]
        if self.environment == "ours":
            paths += [DRIVERS.parents[2], *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            "PEERS_JOB": json.dumps(job), "PYTHONPATH": os.pathsep.join(map(str, paths)), "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        if self.environment != "ours":  # which gives every device the thread that it needs
            variables |= {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS")}
        with bound_to(self.cores, self.first_core):
            self.process = subprocess.Popen(
                [python, DRIVERS / f"drive_{self.environment}.py"], env=os.environ | variables, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True,
            )  # fmt: skip
        self.facts = self.answer()
        if self.facts["parameters"] != self.course.parameters:
            raise FailedError(f"its network has {self.facts['parameters']} parameters, not {self.course.parameters}")
        self.test()
        if self.course.warm_up:
            self.ask(self.course.warm_up)
        self.memory_before = self.memory_now()
        if self.course.more:
            self.ask(self.course.more)

    def memory_now(self) -> float:
        """The memory of all its processes in MiB."""
        assert self.process
        return sum(proportional_memory(number) for number, _ in tree(self.process.pid))

    def answer(self) -> dict[str, Any]:
        """The next answer of the driver.

        Raises:
          FailedError: the driver ended, or did not answer in time.
        """
        assert self.process and self.process.stdout
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise FailedError(f"no answer within {PATIENCE} seconds")
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        raise FailedError(last_line(self.errors.read()))

    def ask(self, rounds: int) -> dict[str, Any]:
        """Let it train a number of rounds, or test its model if the number is 0, and return its answer."""
        assert self.process and self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # why it ended is the answer
            self.process.stdin.write(f"{rounds}\n")
            self.process.stdin.flush()
        return self.answer()

    def test(self) -> None:
        """Note the loss and the accuracy of its model."""
        self.tests.append(self.ask(0))

    def race(self) -> None:
        """Train a round and note its seconds."""
        assert self.process
        pid = self.process.pid
        used = lambda: sum(ticks for _, ticks in tree(pid)) / os.sysconf("SC_CLK_TCK")
        before = used()
        self.seconds.append(self.ask(1)["seconds"])
        self.cpu_seconds.append(used() - before)
        self.memory = self.memory_now()

    def stop(self, patience: float = 20) -> None:
        """End its processes, also those that outlive their driver or need more seconds than ``patience``."""
        if self.process and self.process.stdin:
            descendants = [number for number, _ in tree(self.process.pid)][1:]
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            for number in descendants:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        self.errors.close()

    def row(self, ours: Sequence["Contestant"]) -> dict[str, Any]:
        """The figures of this contestant, with their ratios to ours if ours took part."""
        reference = next((contestant for contestant in ours if contestant.error is None), None)

        def ratio(figure: str) -> float | None:
            if reference is None:
                return None
            pairs = zip(getattr(self, figure), getattr(reference, figure), strict=True)
            return statistics.median(mine / other for mine, other in pairs)

        row: dict[str, Any] = {"cores": self.cores, "contestant": self.name, "arrangement": str(self.arrangement)}
        before, after = self.tests if self.error is None else ({}, {})
        if self.error is None and not after["loss"] < before["loss"]:
            self.error = f"it does not learn: its loss went from {before['loss']} to {after['loss']}"
        figures: dict[str, Any] = dict.fromkeys(FIGURES)
        if self.error is None:
            of_seconds = statistics.median(self.seconds), ratio("seconds")
            of_cpu = statistics.median(self.cpu_seconds), ratio("cpu_seconds")
            memory = self.memory_before, self.memory
            values = (*of_seconds, *of_cpu, *memory, before["loss"], after["loss"], after["accuracy"])
            figures = dict(zip(FIGURES, values, strict=True))
        return row | figures | {"versions": self.facts.get("versions"), "error": self.error}


# ---- The command


def compete(
    names: Sequence[str], cores: int, folder: Path, data: Path, *, course: Course, epochs: int, repeats: int
) -> list[dict]:
    """A row per contestant and arrangement on a number of cores."""
    contestants = [
        Contestant(name, arrangement, cores, course) for name in names for arrangement in CONTESTANTS[name][1](cores)
    ]
    try:
        for contestant in contestants:
            contestant.attempt(contestant.start, folder, data, epochs)
            print(
                f"{contestant.name}, {contestant.arrangement}: {contestant.error or 'ready'}",
                file=sys.stderr,
                flush=True,
            )
        for _ in range(repeats):
            for contestant in contestants:
                contestant.attempt(contestant.race)
        for contestant in contestants:
            contestant.attempt(contestant.test)
    finally:
        for contestant in contestants:
            contestant.stop()
    ours = [contestant for contestant in contestants if contestant.name == "ours"]
    return [contestant.row(ours) for contestant in contestants]


def campaign(name: str, cores: int, folder: Path, data: Path, *, course: Course, epochs: int) -> dict[str, Any]:
    """The row of a contestant that trains several whole runs: ours in one process, the others in one for each seed."""
    at_once = cores if CONTESTANTS[name][1](1)[0].kind == "process" else 1  # Flower's Ray does not share a machine
    arrangement = CONTESTANTS[name][1](cores // at_once)[0]
    groups = [range(course.seeds)] if name == "ours" else [range(seed, seed + 1) for seed in range(course.seeds)]
    free = list(range(at_once))  # cores without a run

    def whole_run(seeds: range) -> tuple[float, dict[str, float]]:
        contestant = Contestant(name, arrangement, cores // at_once, course)
        contestant.seeds, contestant.first_core = seeds, free.pop()
        try:
            began = time.perf_counter()
            contestant.start(folder, data, epochs)
            started = time.perf_counter() - began
            contestant.ask(course.rounds)
            contestant.test()
            return started, contestant.tests[-1]
        finally:
            contestant.stop(patience=0)  # its end is not timed
            free.append(contestant.first_core)

    row: dict[str, Any] = {"cores": cores, "contestant": name, "arrangement": f"{len(groups)} x {arrangement}"}
    row |= dict.fromkeys(("seconds", "start", "loss_after", "accuracy_after", "error"))
    try:
        interpreter(CONTESTANTS[name][0], folder)  # before the clock runs
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            runs = list(pool.map(whole_run, groups))
        row["seconds"] = time.perf_counter() - began
    except FailedError as error:
        return row | {"error": str(error)}
    mean = lambda figure: statistics.mean(tested[figure] for _, tested in runs)
    start = statistics.median(seconds for seconds, _ in runs)
    return row | {"start": start, "loss_after": mean("loss"), "accuracy_after": mean("accuracy")}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table; a contestant that failed shows its error."""
    text = lambda value: "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    cells = [list(rows[0])[:-1], *([text(value) for value in list(row.values())[:-1]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line, row in zip(cells, [{}, *rows], strict=True):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        if row.get("error"):
            print(f"  failed: {row['error']}")
    sys.stdout.flush()


def main(given: Sequence[str] | None = None) -> int:
    """Run the contest and print its tables. The exit code is 1 if a contestant failed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedjax_mr" / "peers"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("peers.py", description=__doc__, formatter_class=formatter)
    usual = ",".join(name for name in CONTESTANTS if name not in APART)
    parser.add_argument("--contestants", default=usual, help=f"names with commas (default {usual})")
    parser.add_argument("--course", default="peers", choices=COURSES, help="the work (default peers)")
    parser.add_argument("--cores", default="1,2", help="numbers with commas (default 1,2)")
    parser.add_argument("--repeats", type=int, help="turns (default 5; with --quick 2)")
    parser.add_argument("--environments", type=Path, default=cache, metavar="FOLDER", help=f"default {cache}")
    parser.add_argument("--quick", action="store_true", help="one local epoch")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    arguments = parser.parse_args(given)
    names = arguments.contestants.split(",")
    if unknown := set(names) - set(CONTESTANTS):
        parser.error(f"unknown contestant {', '.join(sorted(unknown))}; known: {', '.join(CONTESTANTS)}")
    if not hasattr(os, "sched_setaffinity"):
        parser.error("only Linux binds processes to cores")
    usable = len(os.sched_getaffinity(0))
    try:
        numbers = [int(word) for word in arguments.cores.split(",")]
    except ValueError:
        numbers = [0]
    if not all(1 <= number <= usable for number in numbers):
        parser.error(f"--cores={arguments.cores}: numbers with commas, of 1 to {usable} here")
    repeats = (2 if arguments.quick else 5) if arguments.repeats is None else arguments.repeats
    if repeats < 1:
        parser.error(f"--repeats={repeats}: at least 1")
    epochs = 1 if arguments.quick else COURSES[arguments.course].epochs
    folder = arguments.environments.resolve()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "images.npz"
        course = COURSES[arguments.course]
        write_data(data, course.classes, course.clients)
        for cores in numbers:
            work = {"course": course, "epochs": epochs}
            if course.seeds:
                new_rows = [campaign(name, cores, folder, data, **work) for name in names]
            else:
                new_rows = compete(names, cores, folder, data, **work, repeats=repeats)
            show(new_rows)
            rows += new_rows
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
