"""Run the parts of ``gpu_parts.py``, each in a process of its own and for a limited time: the work of ``gpu.sh``.

A part that dies or takes too long loses its remaining rows and nothing else. All parts together end before --minutes.
Parts that have finished in --out are skipped.
Exit code: 0 if every part finished, 1 if one did not, 2 for bad flags or where JAX finds no GPU.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
MARGIN = 8  # seconds of the time limit that are left for ending processes
LEAST = 5  # seconds that a part needs at least to be started
DRY_FACTOR = 10  # longer time limits of a dry run, whose machine may be slow and busy


class Part(NamedTuple):
    """A part by its name; ``run`` is its function in ``gpu_parts.py``."""

    seconds: int  # at most
    run: str
    about: str
    xla_flags: str = ""


AS_LENET5 = "as lenet5, and convolutions in fewer multiplications"
GRAPHS = "LeNet-5, one of the settings of CUDA graphs in notebook/accelerators.md"
PARTS = {  # the most important first: the last ones are lost if time runs out
    "facts": Part(60, "facts", "the device, the versions, the rates of large products and copies"),
    "correctness": Part(90, "correctness", "FedMR's evaluations on the GPU beside those on the CPU"),
    "lenet5": Part(100, "lenet5", "LeNet-5: images/s beside PyTorch, kernels beside the program compiled ahead"),
    "cnn_mcmahan": Part(100, "cnn_mcmahan", f"{AS_LENET5}, for McMahan's CNN"),
    "resnet20": Part(120, "resnet20", f"{AS_LENET5}, for ResNet-20"),
    "blazefl": Part(60, "blazefl", "BlazeFL's benchmark: LeNet-5, five rounds of all 100 clients"),
    "together": Part(90, "together", "1, 4 and 16 seeds in one program"),
    "race": Part(60, "race", "pfl-research's race (exp/pfl_race.flags), 100 rounds"),
    "vgg16": Part(150, "vgg16", f"{AS_LENET5}, for VGG-16"),
    "lanes": Part(90, "lanes", "LeNet-5 with 1, 2, 5 and 10 lanes"),
    "kernels": Part(90, "kernels", "the longest kernels of a local step of three networks"),
    "language": Part(120, "language", "tokens/s of LoRA over one SmolLM2 for 1, 8 and 32 clients, beside peft"),
    "graphs": Part(30, "graphs", f"{GRAPHS}: XLA's default"),
    "graphs_small": Part(30, "graphs", f"{GRAPHS}: from two kernels on", "--xla_gpu_graph_min_graph_size=2"),
    "graphs_loops": Part(30, "graphs", f"{GRAPHS}: loops too", "--xla_gpu_enable_command_buffer=+WHILE"),
    "graphs_none": Part(30, "graphs", f"{GRAPHS}: none", "--xla_gpu_enable_command_buffer="),
    "record": Part(900, "record", "ResNet-20 on CIFAR-10, 500 rounds: three methods, checkpoints in --out"),
}

Row = dict[str, Any]


class Record:
    """The results of the parts that have ended, in ``gpu.json`` and ``gpu.txt``."""

    def __init__(self, folder: Path, *, dry_run: bool) -> None:
        """Create the folder, or read what earlier calls have left there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.dry_run = folder, dry_run
        file = folder / "gpu.json"
        self.parts: dict[str, Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def has(self, name: str) -> bool:
        """Whether a part has finished, in a call of this kind."""
        part = self.parts.get(name)
        return part is not None and (part["ended"], part["dry_run"]) == ("finished", self.dry_run)

    def write(self, name: str, **facts: Any) -> None:
        """Replace the facts about a part."""
        self.parts[name] = facts | {"dry_run": self.dry_run}
        texts = {"gpu.json": json.dumps(self.parts, indent=1) + "\n", "gpu.txt": "\n".join(map(self.table, self.parts))}
        for file, text in texts.items():
            unfinished = self.folder / f"{file}.new"
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self.folder / file)

    def table(self, name: str) -> str:
        """A part as text: its head, then its rows. Neighbouring rows with equal columns form one table."""
        part = self.parts[name]
        lines = [f"== {name}: {PARTS[name].about} [{part['ended']}, {part['seconds']:.0f} s]"]
        previous: list[str] = []
        for position, row in enumerate(part["rows"]):
            if list(row) != previous:
                previous = list(row)
                neighbours = [neighbour for neighbour in part["rows"][position:] if list(neighbour) == previous]
                cells = [previous, *([shown(value) for value in neighbour.values()] for neighbour in neighbours)]
                widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
                lines.append("  ".join(cell.rjust(width) for cell, width in zip(previous, widths, strict=True)))
            cells = zip((shown(value) for value in row.values()), widths, strict=True)
            lines.append("  ".join(cell.rjust(width) for cell, width in cells))
        return "\n".join([*lines, *([f"! {part['error']}"] if part["error"] else []), ""])


def shown(value: Any) -> str:
    """The printed form of a value."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def rows_in(file: Path) -> list[Row]:
    """The rows that a part has written so far."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def run_part(name: str, record: Record, environment: dict[str, str], seconds: float, *flags: str) -> int | None:
    """Run a part for at most ``seconds``. Return its exit code, or None if it took too long."""
    part, started = PARTS[name], time.monotonic()
    environment = environment | {"XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {part.xla_flags}".strip()}
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows"), Path(folder, "log")
        command = [sys.executable, str(HERE / "gpu_parts.py"), part.run, f"--rows={rows}", *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, cwd=folder, start_new_session=True
            )
        written: list[Row] | None = None

        def note(ended: str, error: str = "") -> None:
            nonlocal written
            latest = rows_in(rows)
            if latest != written or ended != "running":
                written = latest
                record.write(name, ended=ended, seconds=time.monotonic() - started, rows=latest, error=error)

        try:
            while (code := process.poll()) is None and time.monotonic() - started < seconds:
                note("running")
                time.sleep(0.2)
        except BaseException:  # Ctrl-C or a termination signal
            note("interrupted")
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what the part has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            text = log.read_text(encoding="utf-8", errors="replace")
            with (record.folder / "gpu.log").open("a", encoding="utf-8") as whole:
                whole.write(f"==== {name}\n{text}\n")
        last = next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "no message")
        if code is None:
            note("stopped", f"stopped after {seconds:.0f} s; last message: {last}")
        else:
            note("finished" if code == 0 else "failed", last if code else "")
        return code


def install(wheels: Path, folder: Path) -> str:
    """Install all wheels of a folder into another one. Return the error, or ""."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return f"--wheels={wheels} has no wheels (*.whl)"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", f"--find-links={wheels}"]
    done = subprocess.run([*command, f"--target={folder}", *files], capture_output=True, text=True)
    return f"pip cannot install --wheels={wheels}: {done.stderr.strip()[-300:]}" if done.returncode else ""


def environment_of(options: argparse.Namespace, site: Path) -> dict[str, str]:
    """The environment variables of the parts: this checkout, the wheels, and memory for PyTorch on the same GPU."""
    paths = [str(HERE.parents[1]), str(HERE), str(site), os.environ.get("PYTHONPATH", "")]
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    changes["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes use the GPU, in turn or at once
    changes["GPU_OUT"] = str(options.out.resolve())
    if options.data_dir:
        changes["GPU_DATA"] = str(options.data_dir.resolve())
    if options.dry_run:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        changes |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    return os.environ | changes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print their tables and return the exit code."""
    started = time.monotonic()
    parts = "\n".join(f"  {name:13} {part.seconds:4} s  {part.about}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        "gpu.sh",
        description=__doc__,
        epilog=f"parts, with the longest time of each:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER", help="default: runs/gpu")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of missing packages")
    parser.add_argument("--data_dir", type=Path, metavar="FOLDER", help="holds CIFAR-10, for the part record")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help="some parts (default: all)")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all parts together (default: 9)")
    parser.add_argument(
        "--dry_run", action="store_true", help="try every part on the CPU with tiny sizes and long time limits"
    )
    options = parser.parse_args(arguments)
    names = [name for name in PARTS if name in options.only.split(",")]
    if unknown := set(options.only.split(",")) - set(PARTS):
        parser.error(f"--only={options.only}: unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if not options.minutes > 0:
        parser.error(f"--minutes={options.minutes}: must be above 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part in progress is ended
    record, codes = Record(options.out.resolve(), dry_run=options.dry_run), []
    if before := [name for name in names if record.has(name)]:
        print(f"finished before in {record.folder}: {', '.join(before)}")
        names = [name for name in names if name not in before]
    factor = DRY_FACTOR if options.dry_run else 1
    deadline = started + factor * 60 * options.minutes - MARGIN
    with tempfile.TemporaryDirectory() as site:
        if options.wheels and (problem := install(options.wheels.resolve(), Path(site))):
            parser.error(problem)
        environment = environment_of(options, Path(site))
        for name in names:
            seconds = min(factor * PARTS[name].seconds, deadline - time.monotonic())
            if seconds < LEAST:
                record.write(name, ended="not started", seconds=0.0, rows=[], error="no time was left for this part")
                codes.append(None)
            else:
                codes.append(run_part(name, record, environment, seconds, *(["--dry_run"] if options.dry_run else [])))
            print(record.table(name), flush=True)
            if codes[-1] == 2:  # bad input: the same for every part
                return 2
    lost = [name for name, code in zip(names, codes, strict=True) if code != 0]
    print(f"{len(names) - len(lost)} of {len(names)} parts finished in {time.monotonic() - started:.0f} s", end="")
    print(f"; not: {', '.join(lost)}" if lost else "", f"({record.folder})")
    return int(bool(lost))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
