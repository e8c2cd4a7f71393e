"""The parts of ``gpu.sh``, one per call: ``python experiments/lab/gpu_parts.py PART --rows=FILE``.

A part appends each row to FILE at once, one JSON object per line. ``gpu.py`` gives each part a process, a time
limit and its XLA flags. With --dry_run everything runs on the CPU with tiny sizes, and the figures have no meaning.
"""

import argparse
import dataclasses
import functools
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Emit = Callable[..., None]
# What accelerators.py said of the same programs, with --target=h100 --strategies=fedavg and --json of this file
COMPILED = Path(__file__).parent / "compiled_h100.json"
HEAVY = ("resnet20", "vgg16")  # one local epoch

# How far FedMR's evaluations on the GPU may be from those on the CPU. On CPUs, another order of sums changes the
# losses of rounds 1 to 4 by 1e-7, that of round 10 by 3 %, and the mean accuracy of rounds 21 to 30 by 0.2 points.
# TF32 rounds the factors of products to 10 bits.
FIRST_ROUNDS = 4
FIRST_LOSSES = {"float32": 1e-3, "TF32": 5e-2}  # largest relative difference of the test loss in these rounds
LAST_ACCURACY = {"float32": 0.015, "TF32": 0.02}  # difference of the mean accuracy of the last ten evaluations


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    dry: bool
    clients: int = 10
    samples: int = 500  # per client
    repeats: int = 5
    patience: float = 70.0  # seconds until PyTorch must have compiled; a part of a network has 100 and more
    turn_seconds: float = 0.5  # of our engine
    product: int = 8192
    copied_bytes: int = 2**31
    correctness_rounds: int = 30
    trials: tuple[int, ...] = (1, 4, 16)  # seeds
    trial_rounds: int = 50
    lanes: tuple[int, ...] = (10, 5, 2, 1)
    kernels: int = 20


REAL = Sizes(dry=False)
TINY = Sizes(
    dry=True, clients=2, samples=2, repeats=2, patience=1200.0, turn_seconds=0.0, product=64, copied_bytes=2**16,
    correctness_rounds=2, trials=(1, 2), trial_rounds=2, lanes=(2, 1),
)  # fmt: skip


# ---- The device


def facts(emit: Emit, sizes: Sizes) -> None:
    """Emit the names of the device and of the software, then their peak rates."""
    import jax
    import jax.numpy as jnp

    from benchmark import Product

    note = lambda fact, value: emit(fact=fact, value=value)
    device = jax.devices()[0]
    note("device", f"{len(jax.devices())} x {device.device_kind}")
    query = "--query-gpu=name,memory.total,driver_version,power.limit,clocks.max.sm"
    note("nvidia-smi", of_command("nvidia-smi", query, "--format=csv,noheader"))
    limit = (device.memory_stats() or {}).get("bytes_limit")
    note("memory that JAX may use, GB", limit and limit / 1e9)
    note("CPU cores", len(os.sched_getaffinity(0)))
    note("Python", platform.python_version())
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch"):
        note(name, version(name))
    # It also brings PyTorch's files into memory, so the next part does not wait for them.
    note("CUDA of PyTorch", of_command(sys.executable, "-c", CUDA_OF_TORCH))
    for dtype, precision, title in (
        (jnp.bfloat16, "default", "bfloat16"),
        (jnp.float32, "default", "float32 as XLA multiplies by default (TF32)"),
        (jnp.float32, "highest", "float32"),
    ):
        product = Product(1, sizes.product, dtype=dtype, precision=precision)
        for _ in range(sizes.repeats):
            product.race()
        note(f"product of {sizes.product} x {sizes.product}, {title}, TFLOP/s", product.rate() / 1e12)
    array = jnp.zeros(sizes.copied_bytes // 4, jnp.float32)
    note("copy, read and written, GB/s", 2 * array.nbytes / median_seconds(jax.jit(lambda x: x + 1), array) / 1e9)
    small = jnp.ones((64, 64))
    note("a call of a small program, us", 1e6 * median_seconds(jax.jit(lambda x: x + 1), small))
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda _, y: jnp.tanh(y @ x), x))
    note("a turn of a loop with one small product, us", 1e3 * median_seconds(loop, small))


CUDA_OF_TORCH = "import torch; print(torch.version.cuda if torch.cuda.is_available() else 'finds no GPU')"


def of_command(*command: str) -> str | None:
    """The output of a command, or None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def version(package: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def median_seconds(call: Callable, *arguments: Any) -> float:
    """Median seconds of ten calls after the first."""
    import jax

    def seconds() -> float:
        started = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        return time.perf_counter() - started

    seconds()
    return statistics.median(seconds() for _ in range(10))


# ---- Correctness


def correctness(emit: Emit, sizes: Sizes) -> None:
    """Emit FedMR's evaluations on the digits here and on the CPU, and their differences.

    The command runs as users run it, at the same time on the CPU, here in float32 and here in TF32.

    Raises:
      SystemExit: a run failed, or a difference is larger than allowed.
    """
    kinds: dict[str, dict[str, str]] = {
        "CPU": {"JAX_PLATFORMS": "cpu"},
        "float32": {"JAX_DEFAULT_MATMUL_PRECISION": "highest"},
        "TF32": {},
    }
    flags = [f"--rounds={sizes.correctness_rounds}", "--eval_every=1", "--devices=1", "--noprogress"]
    command = [sys.executable, "-m", "fedjax_mr.main", "--strategy=fedmr", "--flagfile=exp/quickstart.flags", *flags]
    with tempfile.TemporaryDirectory() as folder:
        start = lambda kind: subprocess.Popen(
            # In a dry run all are on the CPU: other lanes make another program, whose results differ by rounding.
            [*command, f"--run_dir={folder}/{kind}", *(["--lanes=5"] if sizes.dry and kind != "CPU" else [])],
            env=os.environ | kinds[kind],
        )
        runs = {kind: start(kind) for kind in kinds}
        failed = [kind for kind, run in runs.items() if run.wait()]
        if failed:
            raise SystemExit(f"the run failed: {', '.join(failed)}")
        rows = {
            kind: [json.loads(line) for line in Path(folder, kind, "metrics.jsonl").read_text("utf-8").splitlines()]
            for kind in kinds
        }
        summaries = {kind: json.loads(Path(folder, kind, "summary.json").read_text("utf-8")) for kind in kinds}
    for kind, summary in summaries.items():
        names = ("lanes", "seconds_per_round", "compile_seconds", "accuracy_mean_last_10")
        emit(run=kind, devices=", ".join(summary["devices"]), **{name: summary[name] for name in names})
    compared = [row for kind in FIRST_LOSSES for row in differences(kind, rows[kind], rows["CPU"])]
    for row in compared:
        emit(**row)
    for evaluations in zip(*rows.values(), strict=True):
        emit(
            round=evaluations[0]["round"],
            **{f"loss, {kind}": row["loss"] for kind, row in zip(kinds, evaluations, strict=True)},
        )
    if wrong := [f"{row['figure']} ({row['run']})" for row in compared if not row["fine"]]:
        raise SystemExit(f"differs from the CPU by more than allowed: {', '.join(wrong)}")


def differences(kind: str, here: Sequence[dict[str, Any]], cpu: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Differences between the evaluations of a run and those of the CPU, with the allowed differences."""
    last = lambda rows: statistics.fmean(row["accuracy"] for row in rows[-10:])
    pairs = zip(here[:FIRST_ROUNDS], cpu, strict=False)
    first = float(np.max([abs(row["loss"] / of_cpu["loss"] - 1) for row, of_cpu in pairs]))  # NaN if one is
    for figure, differs, allowed in (
        (f"loss in rounds 1 to {FIRST_ROUNDS}, relative", first, FIRST_LOSSES[kind]),
        ("mean accuracy of the last 10", abs(last(here) - last(cpu)), LAST_ACCURACY[kind]),
    ):
        # Not a number is never fine.
        yield {"run": kind, "figure": figure, "differs": differs, "allowed": allowed, "fine": differs <= allowed}


# ---- Speed


def network_config(name: str, sizes: Sizes, **changes: Any) -> Any:
    """The setting of ``benchmark.py models``: FedAvg, every client in every round."""
    import benchmark
    import fedjax_mr as fmr

    settings: dict[str, Any] = {
        "strategy": "fedavg", "model": name, "partition": "iid", "clients": sizes.clients, "cohort": sizes.clients,
        "local_epochs": 1 if name in HEAVY or sizes.dry else 5, "batch_size": min(benchmark.BATCH, sizes.samples),
        "lr": benchmark.LR, "momentum": benchmark.MOMENTUM,
    }  # fmt: skip
    return fmr.Config(**settings | changes)


def images_for(name: str, sizes: Sizes) -> Any:
    """Synthetic images for a network."""
    from benchmark import synthetic
    from fedjax_mr.models import MODELS

    return synthetic(MODELS[name].input_shape, MODELS[name].num_classes, sizes.clients * sizes.samples)


def timed(name: str, sizes: Sizes, *, title: str = "ours", lanes: int | None = None, **changes: Any) -> Any:
    """Our compiled engine, with enough rounds per turn for a precise measurement."""
    from benchmark import Contestant

    lanes = lanes or sizes.clients
    config = network_config(name, sizes, **changes)
    engine = Contestant(title, config, dataset=images_for(name, sizes), devices=1, lanes=lanes)
    engine.race()
    _, seconds = engine.timings.pop()
    engine.rounds = max(1, min(200, int(sizes.turn_seconds / seconds)))
    return engine


def speed(name: str, emit: Emit, sizes: Sizes) -> None:
    """Emit images/s of a network, ours and in PyTorch, then the figures of the compiled local step."""
    import accelerators

    if not sizes.dry:  # what the host launches is in XLA's dump
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={accelerators.dumps()}".strip()
    import jax

    import benchmark
    from fedjax_mr.models.__main__ import multiply_adds

    started = time.monotonic()
    opponents, excuse = torch_opponents(name, sizes)  # they start while ours is compiled
    ours, filtered = timed(name, sizes), []
    if name in benchmark.FILTERED:
        filtered = [timed(name, sizes, title="ours, minimal filtering", convolution="minimal")]
    product = benchmark.Product(1, sizes.product)
    ready = []
    for opponent in opponents:
        try:
            opponent.wait(started + sizes.patience - time.monotonic())
            ready.append(opponent)
        except (RuntimeError, EOFError) as error:
            emit(**speed_row(name, opponent.name, error=" ".join(str(error).split())[:200] or "its process died"))
            opponent.kill()
    benchmark.PAUSE_SECONDS = 0.05  # enough for the queue of a GPU
    benchmark.take_turns([product, ours, *filtered, *ready], sizes.repeats, seconds=15)
    for opponent in ready:
        opponent.stop()
    operations = 6 * multiply_adds(ours.model)
    for contestant in (ours, *filtered, *ready):
        emit(
            **speed_row(
                name,
                contestant.name,
                images_per_second=contestant.speed(),
                ours_over_it=ours.speed() / contestant.speed(),
                share_of_limit=contestant.speed() * operations / product.rate(),
                compile_seconds=getattr(contestant, "compile_seconds", None),
                peak_GB=contestant.peak_memory_bytes / 1e9 if contestant not in ready else None,
            )
        )
    if excuse:
        emit(**speed_row(name, "PyTorch", error=excuse))
    for row in compiled_ahead(name):
        emit(**row)
    target = next((kind for kind in ("h200", "h100") if kind in jax.devices()[0].device_kind.lower()), "h100")
    engine = ours.engine
    done = accelerators.Compiled(engine, accelerators.Built(engine.programs.compiled("rounds")), None, ours.model)
    rows = accelerators.table(target, ours.config, done)
    groups = math.ceil(ours.config.cohort / engine.axis.lanes)
    steps = ours.config.local_epochs * math.ceil(sizes.samples / ours.config.batch_size) * groups
    seconds = sizes.clients * sizes.samples * ours.config.local_epochs / ours.speed() / steps
    emit(**kernels_row("here", rows, measured_ms=1e3 * seconds))


def speed_row(name: str, engine: str, **values: Any) -> dict[str, Any]:
    """A row of speeds. Unknown speeds are None."""
    figures = ("images_per_second", "ours_over_it", "share_of_limit", "compile_seconds", "peak_GB", "error")
    return {"network": name, "engine": engine} | dict.fromkeys(figures) | values


def torch_opponents(name: str, sizes: Sizes) -> tuple[list[Any], str | None]:
    """The started arrangements of PyTorch, and the reason if there is none."""
    if version("torch") is None:
        return [], "PyTorch is not installed"
    import torch

    if not (sizes.dry or torch.cuda.is_available()):
        return [], f"PyTorch {torch.__version__} sees no GPU"
    import torch_vmap
    from benchmark import TorchContestant

    device = "cpu" if sizes.dry else "cuda"
    start = functools.partial(
        TorchContestant, arguments=(name, device), processes=1, threads=len(os.sched_getaffinity(0)),
        epochs=network_config(name, sizes).local_epochs, dataset=images_for(name, sizes), num_clients=sizes.clients,
    )  # fmt: skip
    vmapped = functools.partial(start, make=torch_vmap.side_by_side, compiled=not sizes.dry)
    opponents = [
        start("torch_loop", loader=True),  # as the papers' code trains
        start("torch_best", loader=False),  # the same with the images on the device
        vmapped("torch_vmap"),
    ]
    if not sizes.dry:
        opponents.append(vmapped("torch_vmap_graph", graph=True))  # its step as one CUDA graph
    return opponents, None


def compiled_ahead(name: str) -> Iterator[dict[str, Any]]:
    """The row of a network in the table that was compiled without a device."""
    rows = [row for row in json.loads(COMPILED.read_text(encoding="utf-8")) if row["model"] == name]
    if rows:
        yield kernels_row(f"compiled ahead, {rows[0]['target']}", rows)


def kernels_row(where: str, rows: Sequence[dict[str, Any]], *, measured_ms: float | None = None) -> dict[str, Any]:
    """The figures of `accelerators.table` for a local step, with its measured time."""
    by_program = {row["program"]: row for row in rows}
    step, round_row = by_program["local_step"], by_program["round"]
    return {
        "local_step": where,
        "lanes": step["lanes"],
        "kernels": step["kernels_per_step"],
        "launches": step["launches_per_step"],
        "MB": step["bytes_per_step"] / 1e6,
        "temporaries_MB": round_row["temp_bytes"] / 1e6,
        "compile_seconds": round_row["compile_seconds"],
        "roofline_ms": 1e3 * step["roofline_seconds"],
        "measured_ms": measured_ms,
    }


def lanes(emit: Emit, sizes: Sizes) -> None:
    """Emit the speed of LeNet-5 with several numbers of lanes."""
    from fedjax_mr.engine.program import memory_needed

    for count in sizes.lanes:
        engine = timed("lenet5", sizes, lanes=count)
        for _ in range(sizes.repeats):
            engine.race()
        needed = memory_needed(engine.engine.programs.compiled("rounds"))
        emit(lanes=count, images_per_second=engine.speed(), MB=needed / 1e6, compile_seconds=engine.compile_seconds)


def kernels(emit: Emit, sizes: Sizes) -> None:
    """Emit the kernels in which the local steps of a round spend their time, by JAX's profiler."""
    import jax

    for name in ("lenet5", "cnn_mcmahan", "resnet20"):
        engine = timed(name, sizes)
        engine.rounds = 1
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                engine.race()
            (file,) = Path(folder).rglob("*.trace.json.gz")
            events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        steps = engine.config.local_epochs * math.ceil(sizes.samples / engine.config.batch_size)
        for kernel, (calls, microseconds) in itertools.islice(longest_kernels(events), sizes.kernels):
            emit(network=name, kernel=kernel[:70], calls_per_step=calls / steps, us_per_step=microseconds / steps)


def longest_kernels(events: Sequence[dict[str, Any]]) -> Iterator[tuple[str, tuple[int, float]]]:
    """The kernels of a trace as (name, (calls, microseconds)), the longest first."""
    named = [event for event in events if event.get("ph") == "M" and "name" in event.get("args", {})]
    devices = {event["pid"] for event in named if event["name"] == "process_name" and "GPU" in event["args"]["name"]}
    streams = {
        (event["pid"], event["tid"])
        for event in named
        if event["name"] == "thread_name" and event["pid"] in devices and "Stream" in event["args"]["name"]
    }
    durations: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            durations.setdefault(event["name"], []).append(event["dur"])
    for kernel in sorted(durations, key=lambda name: -sum(durations[name])):
        yield kernel, (len(durations[kernel]), sum(durations[kernel]))


def race(emit: Emit, sizes: Sizes) -> None:
    """Emit the seconds of the benchmark run of pfl-research."""
    import benchmark

    options = benchmark.Options(models=(), strategies=(), repeats=1, seconds=math.inf, quick=True)
    for row in benchmark.run_race(options, part=25 if sizes.dry else 1):
        emit(**row)


def blazefl(emit: Emit, sizes: Sizes) -> None:
    """Emit the seconds of BlazeFL's benchmark, and the published ones. Evaluations are included, compilation is not."""
    import fedjax_mr as fmr
    import peers

    course, clients = peers.COURSES["blazefl"], 4 if sizes.dry else peers.CLIENTS
    with tempfile.TemporaryDirectory() as folder:
        peers.write_data(file := Path(folder, "images.npz"), course.classes, clients)
        with np.load(file) as images:
            x, y = images["x"], images["y"]
            test = images["test_x"], images["test_y"]
        half, names = (0.5,) * 3, tuple(map(str, range(clients)))
        of_client = np.repeat(np.arange(clients, dtype=np.int32), y.shape[1])
        dataset = fmr.Dataset(
            "synthetic", x.reshape(-1, *x.shape[2:]), y.reshape(-1), *test, 10, mean=half, std=half, client=of_client,
            client_names=names,
        )  # fmt: skip
        config = fmr.Config(
            strategy="fedavg", model="lenet5", partition="natural", clients=0, cohort=clients, batch_size=peers.BATCH,
            local_epochs=1 if sizes.dry else peers.EPOCHS, lr=course.lr, momentum=course.momentum, rounds=5,
            eval_every=1, devices=1, progress=False, run_dir=f"{folder}/run",
        )  # fmt: skip
        summary = fmr.run(config, dataset=dataset, record=False).summary
    row = lambda engine, seconds, **values: emit(engine=engine, seconds=seconds, **values)
    figures = {name: summary[name] for name in ("lanes", "compile_seconds", "accuracy_last")}
    row("ours", summary["seconds"], **figures)
    for engine, seconds in (("BlazeFL", 25), ("Flower", 65)):
        row(f"{engine}, published, 16 workers on hardware that is not stated", seconds, **dict.fromkeys(figures))


def record(emit: Emit, sizes: Sizes) -> None:
    """Train the runs of the record that take seven hours each on two cores, one after the other.

    Emits the last evaluation of each run. The next call goes on from the checkpoints in the folder of ``gpu.sh``.

    Raises:
      SystemExit: a run failed.
    """
    from fedjax_mr.experiment.folder import read_rows

    folder = Path(os.environ["GPU_OUT"], "record_dry" if sizes.dry else "record")
    flags = ["--flagfile=exp/cifar10.flags", "--model=resnet20", "--fedmr_stage1_rounds=100", "--seeds=0"]
    if sizes.dry:
        flags = ["--flagfile=exp/quickstart.flags", "--rounds=2", "--local_epochs=1", "--seeds=0"]
    elif data := os.environ.get("GPU_DATA"):
        flags.append(f"--data_dir={data}")
    command = [sys.executable, "-m", "fedjax_mr.sweep", f"--sweep_dir={folder}", "--devices=1", *flags]
    runs = subprocess.Popen([*command, "--strategies=fedmr,fedavg,fedcross"])
    shown: dict[Path, int] = {}

    def show() -> None:
        for file in folder.glob("*/metrics.jsonl"):
            if (rows := read_rows(file.parent)) and rows[-1]["round"] >= shown.get(file, -1) + 50:
                shown[file] = rows[-1]["round"]
                names = ("round", "accuracy", "seconds")
                emit(run=file.parent.name, **{name: rows[-1][name] for name in names})

    while runs.poll() is None:
        time.sleep(1)
        show()
    if runs.returncode:
        raise SystemExit("a run failed")
    for file in sorted(folder.glob("*/summary.json")):
        summary = json.loads(file.read_text(encoding="utf-8"))
        names = ("accuracy_mean_last_10", "seconds_per_round", "images_per_second")
        emit(run=file.parent.name, **{name: summary[name] for name in names})


def together(emit: Emit, sizes: Sizes) -> None:
    """Emit the seconds of several seeds of the quickstart in one program."""
    import fedjax_mr as fmr
    from fedjax_mr.config import config as configuration

    flags = ["--flagfile=exp/quickstart.flags", "--strategy=fedmr", "--devices=1", f"--rounds={sizes.trial_rounds}"]
    base = dataclasses.replace(configuration.parse(flags), eval_every=sizes.trial_rounds, progress=False)
    alone = None
    for seeds in sizes.trials:
        with tempfile.TemporaryDirectory() as folder:
            trials = [dataclasses.replace(base, seed=seed, run_dir=f"{folder}/{seed}") for seed in range(seeds)]
            started = time.perf_counter()
            results = fmr.run_together(trials)
            wall = time.perf_counter() - started
        if errors := [result for result in results if isinstance(result, Exception)]:
            raise errors[0]
        summaries = [result.summary for result in results if isinstance(result, fmr.Result)]
        seconds = sum(summary["seconds_per_round"] for summary in summaries)  # each trial has its share
        alone = alone or seconds
        emit(
            seeds=seeds,
            ms_per_round=1e3 * seconds,
            times_one_seed=seconds / alone,
            images_per_second=statistics.fmean(summary["images_per_second"] for summary in summaries),
            compile_seconds=sum(summary["compile_seconds"] for summary in summaries),
            wall_seconds=wall,
            mean_accuracy=statistics.fmean(summary["accuracy_last"] for summary in summaries),
        )


def graphs(emit: Emit, sizes: Sizes) -> None:
    """Emit the speed of LeNet-5 with the XLA flags of this process."""
    engine = timed("lenet5", sizes)
    for _ in range(sizes.repeats):
        engine.race()
    flags = os.environ.get("XLA_FLAGS")
    emit(xla_flags=flags, images_per_second=engine.speed(), compile_seconds=engine.compile_seconds)


def language(emit: Emit, sizes: Sizes) -> None:
    """Tokens per second of K clients' LoRA over one frozen SmolLM2 of random weights, beside a loop with peft."""
    import language as lab

    available = all(importlib.util.find_spec(name) for name in ("torch", "peft", "transformers"))
    flags = ["speed" if available else "memory", f"--network={'llama_tiny' if sizes.dry else 'smollm2_135m'}"]
    for clients in (1, 8) if sizes.dry else (1, 8, 32):
        for row in lab.measure(lab.options_of([*flags, f"--clients={clients}", f"--repeats={sizes.repeats}"])):
            emit(**row)


PARTS: dict[str, Callable[[Emit, Sizes], None]] = {
    "language": language,
    "facts": facts,
    "correctness": correctness,
    **{name: functools.partial(speed, name) for name in ("lenet5", "cnn_mcmahan", "resnet20", "vgg16")},
    "race": race,
    "blazefl": blazefl,
    "record": record,
    "together": together,
    "lanes": lanes,
    "kernels": kernels,
    "graphs": graphs,
}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE")
    parser.add_argument("--dry_run", action="store_true")
    options = parser.parse_args()

    def emit(**row: Any) -> None:
        with options.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    if options.part not in ("correctness", "record"):  # their runs are processes of their own
        from fedjax_mr.engine.devices import set_up_jax

        set_up_jax(devices=1, cohort_size=1)
    if options.part == "facts" and not options.dry_run:
        import jax

        if jax.default_backend() != "gpu":
            print(f"JAX {jax.__version__} finds no GPU, only: {jax.devices()[0].platform}; --dry_run needs none")
            sys.exit(2)
    PARTS[options.part](emit, TINY if options.dry_run else REAL)


if __name__ == "__main__":
    main()
