"""Compile the programs of a round for GPUs and TPUs that are not present, and print the compiler's figures.

    python experiments/lab/accelerators.py --target=h200 --models=lenet5,resnet20 --strategies=fedmr,fedcross
    python experiments/lab/accelerators.py --target=v5e:2x4 --cohort=8 --lanes=1
    python experiments/lab/accelerators.py --target=h200x8 --cohort=16 --json=FILE

Needs the extra ``accelerators`` (the compilers, no driver). Nothing is executed. A target is ``h100``, ``h200``
(``x8``: eight of them in one machine) or a TPU topology ``v4:2x2x1 | v5e:2x4 | v5p:... | v6e:...``.

Rows: ``round`` is the program that runs whole rounds, with its memory and its collectives. ``local_step`` is the body
of its loop over a client's batches. ``server`` is the rest of a round. ``evaluation`` is the test of one model on
10,000 samples. Memory is per device.

* Multiply-adds are those of the network: three times a forward pass for training.
* Bytes are those that the kernels read and write if nothing stays in a cache. A gather counts its whole array, so the
  default number of samples is small.
* launches_per_step counts launches by the host. XLA joins kernels to CUDA graphs, and a graph is one launch.
* The roofline is computed from data sheets: the largest of one launch per kernel, bytes over bandwidth, and
  multiply-adds over their rate.
* compiler_seconds are the cycles that the TPU's compiler estimates for a local step, over the rate of the chip.
* exchange_bytes are the payloads and uploads of the clients. collective_bytes are all bytes between devices.

On GPUs autotuning needs a device, so XLA may choose other algorithms for convolutions than on a real one. The exit
code is 1 if devices wait for the host in a round, or for each other while clients train.
"""

import argparse
import atexit
import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import fedjax_mr as fmr
from fedjax_mr import trees
from fedjax_mr.data import FederatedData
from fedjax_mr.engine.clients import CLIENTS, ClientAxis
from fedjax_mr.engine.evaluation import Evaluation
from fedjax_mr.engine.program import PHASES, compile_seconds
from fedjax_mr.engine.round import begin
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.engine.simulator import normalised
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import build_model, simulator_of
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.models import platforms
from fedjax_mr.models.__main__ import multiply_adds
from fedjax_mr.models.windows import CONVOLUTIONS
from hlo import Module, collectives, launches

BATCH, TEST_SAMPLES = 50, 10_000
HOST_PLAN = "*thunk_sequence_after_thunk_passes.txt"  # what XLA writes for GPUs: what the host does, one line each
ONE_WIDTH = ("fedgh", "fedproto", "fedtgp")
WITH_PUBLIC_DATA = ("fccl", "fedkemf", "fedmd", "fedme", "pfedhr")
SHAPES = {"logistic": (28, 28, 1), "mlp": (28, 28, 1)}  # others: 32 x 32 x 3
COLUMNS = (
    "target", "model", "strategy", "program", "cohort", "lanes", "trace_seconds", "compile_seconds", "kernels_per_step",
    "multiply_adds_per_step", "bytes_per_step", "argument_bytes", "temp_bytes", "output_bytes", "collective_bytes",
    "collectives", "roofline_seconds", "compiler_seconds", "launches_per_step",
    "exchange_bytes",
)  # fmt: skip


class Kind(NamedTuple):
    """A kind of accelerator, from its maker's data sheet."""

    platform: str
    bytes_per_second: float
    multiply_adds_per_second: float  # with the inputs that XLA rounds float32 to by default: TF32, bfloat16
    launch_seconds: float  # per kernel; TPUs have the whole program on the chip
    memory: int
    hertz: float | None = None  # of a TPU: its rate of bfloat16 over its units of 128 x 128; None where that is unknown


KINDS = {
    "h100": Kind("cuda", 3.35e12, 247e12, 2.5e-6, 80 * 10**9),
    "h200": Kind("cuda", 4.8e12, 247e12, 2.5e-6, 141 * 10**9),
    "v4": Kind("tpu", 1.2e12, 137e12, 0.0, 32 * 2**30, 1.05e9),
    "v5e": Kind("tpu", 0.82e12, 98e12, 0.0, 16 * 2**30, 1.5e9),
    "v5p": Kind("tpu", 2.76e12, 229e12, 0.0, 95 * 2**30, 1.75e9),
    "v6e": Kind("tpu", 1.64e12, 459e12, 0.0, 32 * 2**30),
}

# What XLA's GPU compiler asks of a device: NVIDIA's Hopper tuning guide and data sheets; CUDA as in constraints.txt.
HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth:.0f} l2_cache_size: 52428800 device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 minor: 0 }}
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "NVIDIA {name}"
"""


def kind_of(target: str) -> Kind:
    """The kind of accelerator that a target names.

    Raises:
      UserError: there is no such kind.
    """
    name = target.partition(":")[0].partition("x")[0]
    gpu = name in KINDS and KINDS[name].platform == "cuda"
    if name not in KINDS or gpu == (":" in target):
        raise UserError(f"--target={target} is unknown: h100, h200, h200x8, v4:2x2x1, v5e:2x4, v5p:2x2x1, v6e:2x4")
    return KINDS[name]


def prepare(target: str) -> None:
    """Set the environment variables that the compilers read. Call it before JAX starts.

    Raises:
      UserError: the compilers are not installed.
    """
    kind = kind_of(target)
    needed = ("libtpu",) if kind.platform == "tpu" else ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")
    try:
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError:  # not even the package that would hold it
        missing = list(needed)
    if missing:
        raise UserError(f"--target={target} needs the compilers: pip install 'fedjax_mr[accelerators]'")
    jax.config.update("jax_platforms", "cpu")  # arrays of this process stay here
    if kind.platform == "tpu":
        # Without these two libtpu looks for a machine; the last only silences it.
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    else:
        spec = importlib.util.find_spec("nvidia.cuda_nvcc")
        assert spec is not None and spec.submodule_search_locations
        nvcc = next(iter(spec.submodule_search_locations))
        flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={nvcc} --xla_dump_to={dumps()}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


@functools.cache
def dumps() -> Path:
    """The folder into which XLA writes compiled GPU code. It is deleted when this process ends."""
    folder = tempfile.mkdtemp(prefix="accelerators-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def launches_per_step(module: Module) -> int | None:
    """Number of launches by the host for one local step of a round compiled for GPUs, or None if unknown."""
    names = {instruction.name for instruction in module.computations[module.local_step()]}
    return launches(map(Path.read_text, dumps().glob(HOST_PLAN)), names)


@functools.cache
def devices_of(target: str) -> tuple[Any, ...]:
    """The devices of a target. They are described, not present.

    Raises:
      UserError: the compiler does not know such a machine.
    """
    from jax.experimental import topologies  # loads the compilers, so after `prepare`

    kind = kind_of(target)
    try:
        if kind.platform == "tpu":
            described = topologies.get_topology_desc(platform="tpu", topology_name=target)
        else:
            name, _, count = target.partition("x")
            config = HOPPER.format(bandwidth=kind.bytes_per_second, memory=kind.memory, name=name.upper())
            described = topologies.get_topology_desc(
                platform="cuda", topology_name=name.upper(), target_config=config, topology=f"1x1x{count or 1}"
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--target={target}: the compiler describes no such machine ({error})") from None
    return tuple(described.devices)


def axis_of(target: str, *, cohort: int, lanes: int | None) -> ClientAxis:
    """The layout of K clients on a described machine. ``lanes=None`` puts all clients of a device side by side."""
    devices = devices_of(target)
    mesh = Mesh(np.array(devices), (CLIENTS,))
    per_device = -(-cohort // len(devices))
    return ClientAxis(mesh, min(lanes or per_device, per_device), fused=True, described=True)


TRACING, COMPILING = PHASES[:2], PHASES[2:]


class Built(NamedTuple):
    """A compiled program, with the seconds that it took."""

    compiled: Any
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0


class Compiled(NamedTuple):
    """The compiled programs of one strategy."""

    rounds: Rounds
    round: Built
    evaluation: Built | None  # None where no single model is tested
    model: Any


def federation(config: fmr.Config, count: int | None = None) -> FederatedData:
    """``count`` synthetic samples, a fifth of them test samples. Only their shapes matter."""
    rng = np.random.default_rng(0)
    shape = SHAPES.get(config.model.split(",")[0], (32, 32, 3))
    count = count or 20 * config.clients
    x = rng.integers(0, 256, (count, *shape), np.uint8)
    return federated_data(config, dataset=fmr.from_arrays(x, rng.integers(0, 10, count), num_classes=10))


def compile_round(
    target: str, config: fmr.Config, *, lanes: int | None = None, tested: bool = True, count: int | None = None
) -> Compiled:
    """Compile a strategy's round, and the test of its deployed model, for a target."""
    for written in dumps().glob(HOST_PLAN):  # of the program before
        written.unlink()
    axis = axis_of(target, cohort=config.cohort, lanes=lanes)
    federated = federation(config, count)
    model = build_model(config, federated.dataset)
    rounds = simulator_of(config, federated, model, layout=axis).rounds
    before = [compile_seconds(*phases) for phases in (TRACING, COMPILING)]
    programs = rounds.compile()
    seconds = [compile_seconds(*phases) - earlier for phases, earlier in zip((TRACING, COMPILING), before, strict=True)]
    evaluation = None
    if tested and rounds.strategy.global_model is not None:
        dataset = federated.dataset
        x, y = (np.resize(part, (TEST_SAMPLES, *part.shape[1:])) for part in (dataset.x, dataset.y))
        deployed = rounds.deployed(rounds.shapes())
        evaluation = Evaluation(model, normalised(dataset, x, y), axis).compile(deployed).compiled("test")
    return Compiled(rounds, Built(programs.compiled("rounds"), *seconds), evaluation and Built(evaluation), model)


def exchange_bytes(rounds: Rounds) -> int:
    """Bytes between devices of the payloads and uploads of K' clients, where K' is K, padded.

    A share (D - 1) / D of them changes its device.
    """
    axis = rounds.axis
    number = jax.ShapeDtypeStruct((), np.int32)
    cohort_rows = lambda constants, progress: begin(axis, constants, progress)[1]
    with platforms.tracing_for(axis.platform):
        rows = jax.eval_shape(cohort_rows, rounds.constants, rounds.shapes())
        returned = jax.eval_shape(rounds.trial.clients, (rounds.constants, number), rows)
    return trees.num_bytes((rows, returned)) * (axis.num_devices - 1) // axis.num_devices


def faults(done: Compiled) -> list[str]:
    """Operations that make devices wait for the host or for each other, in words. A compiled round must have none."""
    module = Module(done.round.compiled.as_text())
    transfers = collectives(module, devices=done.rounds.axis.num_devices)
    _, clients = module.round_and_clients()
    inside = module.reached(clients)
    operations = [f"{transfer.kind} while clients train" for transfer in transfers if transfer.computation in inside]
    if "select-and-scatter" in module.opcodes():
        operations.append("a serial scatter (select_and_scatter)")
    targets = {instruction.target for body in module.computations.values() for instruction in body}
    operations += [f"a call of the host ({target})" for target in sorted(targets) if "callback" in target]
    return operations


def table(target: str, config: fmr.Config, done: Compiled) -> list[dict[str, Any]]:
    """The rows of one strategy on one target. A figure is None if it is unknown or has no meaning."""
    kind, axis = kind_of(target), done.rounds.axis
    module = Module(done.round.compiled.as_text())
    transfers = list(collectives(module, devices=axis.num_devices))
    round_body, clients = module.round_and_clients()
    step = module.local_step()
    network = max(map(multiply_adds, done.model.networks))
    common = {"target": target, "model": config.model, "strategy": config.strategy, "cohort": config.cohort}

    def row(program: str, **figures: Any) -> dict[str, Any]:
        values = common | {"program": program, "lanes": axis.lanes} | figures
        return {name: values.get(name) for name in COLUMNS}

    def roofline(kernels: int, num_bytes: int, products: float) -> float:
        rates = (
            kind.launch_seconds * kernels,
            num_bytes / kind.bytes_per_second,
            products / kind.multiply_adds_per_second,
        )
        return max(rates)

    def work(body: str, products: float, *, without: str = "") -> dict[str, Any]:
        kernels, touched = module.kernels(body, without=without), module.bytes(body, without=without)
        return {
            "kernels_per_step": kernels,
            "bytes_per_step": touched,
            "multiply_adds_per_step": int(products),
            "roofline_seconds": roofline(kernels, touched, products),
        }

    rows = [
        row(
            "round",
            **compilation(done.round),
            collectives=len(transfers),
            collective_bytes=sum(transfer.bytes for transfer in transfers),
            exchange_bytes=exchange_bytes(done.rounds),
        ),
        row(
            "local_step",
            **work(step, 3 * network * config.batch_size * axis.lanes),
            collectives=sum(transfer.computation in module.reached(clients) for transfer in transfers),
            compiler_seconds=module.cycles(step) / kind.hertz if kind.hertz else None,
            launches_per_step=launches_per_step(module) if kind.platform == "cuda" else None,
        ),
        row("server", **work(round_body, 0, without=clients)),
    ]
    if done.evaluation is not None:
        rows.append(row("evaluation", **compilation(done.evaluation)))
    return rows


def compilation(program: Built) -> dict[str, Any]:
    """Compile time and memory per device of a program."""
    memory = program.compiled.memory_analysis()
    return {
        "trace_seconds": round(program.trace_seconds, 2),
        "compile_seconds": round(program.compile_seconds, 2),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }


def shown(value: Any) -> str:
    """The printed form of a figure."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--models", default="lenet5", help="with commas; of a zoo with + (lenet5+cnn_mcmahan)")
    parser.add_argument("--strategies", default="fedmr")
    parser.add_argument("--cohort", type=int, default=10, help="K")
    parser.add_argument("--lanes", type=int, help="clients side by side on a device; default: all of a device")
    parser.add_argument("--batch_size", type=int, default=BATCH)
    parser.add_argument("--convolution", choices=CONVOLUTIONS, default="auto", help="as that of a run (default auto)")
    parser.add_argument("--samples", type=int, help="of the federation; default: 20 per client")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    try:
        prepare(options.target)
        print(" | ".join(COLUMNS[1:]))
        for model in options.models.split(","):
            for strategy in options.strategies.split(","):
                config = configured(strategy, model, cohort=options.cohort, batch_size=options.batch_size)
                config = dataclasses.replace(config, convolution=options.convolution)
                done = compile_round(options.target, config, lanes=options.lanes, count=options.samples)
                wrong += [f"{strategy} with {model}: {fault}" for fault in faults(done)]
                for row in table(options.target, config, done):
                    rows.append(row)
                    print(" | ".join(shown(row[name]) for name in COLUMNS[1:]), flush=True)
                if options.json:
                    Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit("\n".join(wrong) or None)


def configured(strategy: str, model: str, *, cohort: int, batch_size: int = BATCH) -> fmr.Config:
    """The papers' setting: batch 50, SGD with momentum 0.5, five local epochs, N = max(2 K, 100).

    Public samples are a tenth of all samples. Some methods need representations of one width.
    """
    return fmr.Config(
        public_share=0.1 if strategy in WITH_PUBLIC_DATA else 0.0, projection=64 if strategy in ONE_WIDTH else 0,
        strategy=strategy, model=model.replace("+", ","), partition="iid", clients=max(2 * cohort, 100), cohort=cohort,
        local_epochs=5, batch_size=batch_size, lr=0.01, momentum=0.5,
    )  # fmt: skip


if __name__ == "__main__":
    main()
