"""Speed of the engine, compared with plain Flax layers and with PyTorch in the same run.

    python experiments/lab/benchmark.py                           # every network: ours, plain layers, PyTorch
    python experiments/lab/benchmark.py --quick --models=lenet5   # less than a minute
    python experiments/lab/benchmark.py rounds                    # seconds of the parts of a round
    python experiments/lab/benchmark.py strategies                # seconds of a round of each strategy
    python experiments/lab/benchmark.py fedme                     # seconds of FedMe's clients and server
    python experiments/lab/benchmark.py growth                    # time and memory against K and N
    python experiments/lab/benchmark.py race                      # the benchmark CIFAR10-IID of pfl-research
    python experiments/lab/benchmark.py start                     # seconds of the parts of a short run: start.py
    python experiments/lab/benchmark.py products                  # rates of a network's products in XLA and PyTorch
    python experiments/lab/benchmark.py clock                     # events per second of asynchronous clients: events.py
    python experiments/lab/benchmark.py peers                     # other simulators: peers.py and its flags

The contestants take turns of two laps, the second of which counts, so that a drift of the machine affects all of them.
Medians are printed. Compare figures of one run only. All data are synthetic.

``models``: K = 10 clients of 500 samples, batch 50, SGD with momentum 0.5, five local epochs. On CPU the networks of
`HEAVY` have one local epoch, and with ``--quick`` 100 samples per client. The contestants:

* ``ours``: the engine as users run it.
* ``direct``: the same with ``--convolution=direct``, for networks that minimal filtering makes other programs of.
* ``plain``: the same network with ``nn.Conv`` and ``nn.max_pool``, all clients side by side (``vmap``), two steps per
  client.
* ``torch_loop``: one client after the other through a DataLoader, as in the papers' code.
* ``torch_best``: without a DataLoader, the fastest of one process with all threads, a process per core, and the latter
  with huge pages for what malloc takes from Linux. Our commands gain nothing by them.

``share_of_limit``: six operations per multiply-add (two forward, four backward) over the rate of a large matrix product
in the same run.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import events
import fedjax_mr as fmr
import peers
import products
import start
from fedjax_mr.client.samples import Samples
from fedjax_mr.config import config as configuration
from fedjax_mr.engine.clients import assign
from fedjax_mr.engine.devices import set_up_jax, usable_cores
from fedjax_mr.engine.evaluation import Evaluation
from fedjax_mr.engine.program import compile_seconds
from fedjax_mr.engine.simulator import normalised
from fedjax_mr.experiment.build import build_model, simulator_of
from fedjax_mr.experiment.experiment import peak_memory_bytes
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.simulated_time import events_of
from fedjax_mr.models import MODELS, windows
from fedjax_mr.models.__main__ import multiply_adds
from fedjax_mr.strategies import fedme

CLIENTS, SAMPLES, BATCH, LR, MOMENTUM = 10, 500, 50, 0.01, 0.5
HEAVY = ("cnn_mcmahan", "resnet20", "lstm1", "vit_tiny_patch8", "transformer_tiny", "vgg16")  # one local epoch on CPU
ON_GPU_ONLY = ("vgg16",)
FILTERED = ("cnn_mcmahan", "cnn_femnist", "resnet20", "vgg16")  # some of whose layers `--convolution=auto` filters
QUICK_SECONDS = 12  # one turn of ResNet-20 takes ten on two cores
PAUSE_SECONDS = 0.5
COMPARED = ("lenet5", "cnn_mcmahan", "cnn_femnist", "resnet20", "lstm1", "vit_tiny_patch8", "transformer_tiny", "vgg16")

Rows = list[dict[str, Any]]


def synthetic(shape: Sequence[int], classes: int, count: int, *, tokens: bool = False) -> fmr.Dataset:
    """``count`` synthetic training samples, and one evaluation batch of test samples."""
    rng = np.random.default_rng(0)
    high = classes if tokens else 256
    x = rng.integers(0, high, (count + 200, *shape)).astype(np.int32 if tokens else np.uint8)
    y = rng.integers(0, classes, count + 200).astype(np.int32)
    channels = 1 if tokens else shape[-1]
    return fmr.Dataset(
        "synthetic", x[:-200], y[:-200], x[-200:], y[-200:], classes, mean=(0.5,) * channels, std=(0.5,) * channels
    )


# ---- Our engine


def plain_conv(x, kernel, *, strides=1, padding="SAME", **_):
    """The result of ``nn.Conv``: one convolution whose gradients XLA derives."""
    strides = (strides, strides) if isinstance(strides, int) else strides
    padding = ((padding, padding), (padding, padding)) if isinstance(padding, int) else padding
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def plain_max_pool(x, window, *, strides=None, padding=0):
    """The result of ``nn.max_pool``: a ``reduce_window`` with its serial gradient."""
    window = (window, window) if isinstance(window, int) else tuple(window)
    if padding:
        raise ValueError("no network of this benchmark pads its pooling")
    return nn.max_pool(x, window, strides or window)


def plain_layers() -> Any:
    """A context in which networks are built of plain layers."""
    return mock.patch.multiple(windows, conv=plain_conv, max_pool=plain_max_pool)


class Contestant:
    """One engine with its compiled rounds and its timings."""

    def __init__(
        self,
        name: str,
        config: fmr.Config,
        *,
        dataset: fmr.Dataset | None = None,
        plain: bool = False,
        rounds: int = 1,
        warm_up: int = 2,  # some methods do more from the second round on, and all programs must be compiled
        **layout: int | None,
    ) -> None:
        """Compile and run ``warm_up`` rounds, with the plain layers in place of ours if asked for."""
        self.name = name
        self.rounds = rounds
        self.timings: list[tuple[int, float]] = []  # images and seconds of each timing
        self.config = config = dataclasses.replace(config, **layout)
        self.federated = federated_data(config, dataset=dataset)
        self.model = build_model(config, self.federated.dataset)
        compiled = compile_seconds()
        with plain_layers() if plain else mock.MagicMock():
            self.engine = simulator_of(config, self.federated, self.model).rounds
            self.progress = self.engine.run(self.engine.init(), warm_up)[0]
        self.compile_seconds = compile_seconds() - compiled
        self.peak_memory_bytes = peak_memory_bytes()

    def normalised(self, dataset: fmr.Dataset) -> Samples:
        """The samples of a dataset with the normalisation of the contestant's own."""
        return normalised(self.federated.dataset, dataset.x, dataset.y)

    def race(self) -> None:
        """Train some rounds and note their images and seconds."""
        started = time.perf_counter()
        self.progress, report = self.engine.run(self.progress, self.rounds)
        images = int(report.images)
        self.timings.append((images, time.perf_counter() - started))

    def speed(self) -> float:
        """Median of the images trained per second."""
        return statistics.median(images / seconds for images, seconds in self.timings)

    def seconds_per_round(self) -> float:
        """Median seconds of a round. Methods may train on different numbers of images."""
        return statistics.median(seconds for _, seconds in self.timings) / self.rounds

    def seconds(self, *, anew: bool = False) -> dict[str, float]:
        """Median seconds of one round (``round``) and of its programs. A round that is one program has no others.

        Args:
          anew: time first rounds only, each with the draws of another round.
        """
        times: dict[str, list[float]] = {}

        def timed(name: str, call: Callable) -> Callable:
            def run(*args: Any) -> Any:
                started = time.perf_counter()
                result = jax.block_until_ready(call(*args))
                times.setdefault(name, []).append(time.perf_counter() - started)
                return result

            return run

        def one_round() -> None:
            self.progress, _ = jax.block_until_ready(self.engine.run(self.progress, 1))

        programs = self.engine.programs
        with mock.patch.dict(programs, {name: timed(name, program) for name, program in programs.items()}):
            for number in range(5):
                if anew:
                    self.progress = self.engine.place(self.engine.init()._replace(round=np.int32(number)))
                timed("round", one_round)()
        return {name: statistics.median(values) for name, values in times.items()}


def take_turns(contestants: Sequence[Any], repeats: int, *, seconds: float = math.inf) -> None:
    """Let all contestants run in turn, ``repeats`` times; after ``seconds`` no other turn begins.

    Before each turn is a pause, because threads of OpenMP that have nothing left to do go on spinning for a while. The
    first lap of a turn isn't counted: virtual machines give memory that is free to others, and take it back slowly.
    """
    started = time.perf_counter()
    for turn in range(repeats):
        if turn > 0 and time.perf_counter() - started > seconds:
            return
        for contestant in contestants:
            time.sleep(PAUSE_SECONDS)
            contestant.race()
            contestant.timings.pop()
            contestant.race()


# ---- PyTorch


def torch_clients(
    name: str, threads: int, device: str, epochs: int, *, loader: bool, dataset: fmr.Dataset, num_clients: int = CLIENTS
) -> Callable[[Sequence[int]], None]:
    """A function that takes numbers of clients and trains these clients one after the other."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import torch_networks

    torch.set_num_threads(threads)
    if device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32, as XLA's default and PyTorch's for convolutions
    tokens = dataset.x.ndim == 2
    size = len(dataset.y) // num_clients
    x = torch.as_tensor(dataset.x)
    x = x.long() if tokens else x.permute(0, 3, 1, 2).contiguous()
    y = torch.as_tensor(dataset.y).long()
    normalise = (lambda x: x) if tokens else (lambda x: x.float().mul_(1 / 255).sub_(0.5).div_(0.5))
    if not loader:
        x, y = x.to(device), y.to(device)
    network = torch_networks.build(name).to(device)
    start = {key: value.clone() for key, value in network.state_dict().items()}

    def batches(rows: slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if loader:
            for x_batch, y_batch in DataLoader(TensorDataset(x[rows], y[rows]), batch_size=BATCH, shuffle=True):
                yield normalise(x_batch.to(device)), y_batch.to(device)
        else:
            own_x, own_y = x[rows], y[rows]
            for batch in torch.randperm(size, device=device).split(BATCH):
                yield normalise(own_x[batch]), own_y[batch]

    def train_one(client: int) -> None:
        network.load_state_dict(start)
        network.train()
        optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM)
        for _ in range(epochs):
            for x_batch, y_batch in batches(slice(client * size, (client + 1) * size)):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(network(x_batch), y_batch).backward()
                optimizer.step()

    def train(clients: Sequence[int]) -> None:
        for client in clients:
            train_one(client)
        if device != "cpu":
            torch.cuda.synchronize()

    return train


def torch_worker(pipe: Any, make: Callable, clients: Sequence[int], arguments: tuple, options: dict[str, Any]) -> None:
    """Train the clients whenever asked to, until told to stop. An error is sent in place of an answer."""
    try:
        train = make(*arguments, **options)
        train(clients[:1])
        pipe.send("ready")
        while pipe.recv() == "go":
            train(clients)
            pipe.send("done")
    except Exception as error:  # broad: any error of PyTorch becomes a row of the table
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))  # others may not survive the pipe


class TorchContestant:
    """PyTorch in one arrangement, in processes of its own: the clients are shared among ``processes``."""

    def __init__(
        self,
        name: str,
        arguments: tuple,
        *,
        processes: int,
        threads: int,
        epochs: int,
        make: Callable = torch_clients,
        num_clients: int = CLIENTS,
        huge_pages: bool = False,
        **options: Any,
    ) -> None:
        """Start the processes, each of which trains a client before the races."""
        self.name = name
        self.images = len(options["dataset"].y) * epochs
        pages = ", huge pages" if huge_pages else ""
        self.arrangement = f"{processes} process(es) x {threads} thread(s){pages}"
        self.timings: list[float] = []
        context = multiprocessing.get_context("spawn")
        self.pipes, self.workers = [], []
        for index in range(processes):
            ours, theirs = context.Pipe()
            model, device = arguments
            clients = range(index, num_clients, processes)
            settings = {"num_clients": num_clients, **options}
            work = (theirs, make, clients, (model, threads, device, epochs), settings)
            worker = context.Process(target=torch_worker, args=work)
            with mock.patch.dict(os.environ, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {}):
                worker.start()
            self.pipes.append(ours)
            self.workers.append(worker)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all processes have answered.

        Raises:
          RuntimeError: the error of one of them, or no answer in so many seconds.
        """
        for pipe in self.pipes:
            if not pipe.poll(seconds):
                raise RuntimeError("no answer in time")
            if isinstance(answer := pipe.recv(), RuntimeError):
                raise answer

    def race(self) -> None:
        """Train all clients once and note the images trained per second."""
        started = time.perf_counter()
        for pipe in self.pipes:
            pipe.send("go")
        self.wait()
        self.timings.append(self.images / (time.perf_counter() - started))

    def speed(self) -> float:
        """Median of the images trained per second."""
        return statistics.median(self.timings)

    def stop(self) -> None:
        """End the processes."""
        for pipe, worker in zip(self.pipes, self.workers, strict=True):
            pipe.send("stop")
            worker.join()

    def kill(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self.workers:
            worker.kill()
            worker.join()


def torch_contestants(name: str, dataset: fmr.Dataset, epochs: int) -> list[TorchContestant]:
    """The PyTorch contestants. Empty if PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    cores = usable_cores()
    start_torch = functools.partial(
        TorchContestant, arguments=(name, "cuda" if gpu else "cpu"), epochs=epochs, dataset=dataset
    )
    contestants = [
        start_torch("torch_loop", processes=1, threads=cores, loader=True),
        start_torch("torch_best", processes=1, threads=cores, loader=False),
    ]
    if not gpu and cores > 1:
        contestants.append(start_torch("torch_best", processes=cores, threads=1, loader=False))
        contestants.append(start_torch("torch_best", processes=cores, threads=1, loader=False, huge_pages=True))
    for contestant in contestants:
        contestant.wait()
    return contestants


# ---- The arithmetic limit


class Product:
    """A large matrix product on all devices together: what the arithmetic could do at best."""

    name = "product"

    def __init__(
        self, devices: int, size: int = 1024, times: int = 10, *, dtype: Any = jnp.float32, precision: str = "default"
    ) -> None:
        """Compile."""
        mesh = jax.make_mesh((devices,), ("devices",))
        spec = jax.sharding.PartitionSpec("devices")

        def chain(a: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, times, lambda _, b: jnp.matmul(b, a, precision=precision), a)

        body = lambda a: jax.lax.map(chain, a)
        self.call = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
        # Not constant: GPUs multiply constant matrices with a higher clock. Not larger, so that powers stay finite.
        matrix = np.random.default_rng(0).normal(0, size**-0.5, (size, size)).astype(dtype)
        matrices = np.broadcast_to(matrix, (devices, size, size))
        self.matrices = jax.device_put(matrices, jax.sharding.NamedSharding(mesh, spec))
        self.operations = 2 * devices * times * size**3
        self.timings: list[float] = []
        self.call(self.matrices).block_until_ready()

    def race(self) -> None:
        """Note the operations per second."""
        started = time.perf_counter()
        self.call(self.matrices).block_until_ready()
        self.timings.append(self.operations / (time.perf_counter() - started))

    def rate(self) -> float:
        """Median of the operations per second."""
        return statistics.median(self.timings)


# ---- The subjects


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    models: tuple[str, ...]
    strategies: tuple[str, ...]
    repeats: int
    seconds: float  # after which no other turn begins
    quick: bool


def in_its_own_process(function: Callable, *args: Any) -> Any:
    """The result of the function, computed in a new process that takes its compiled programs and memory with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def compare_models(options: Options) -> Rows:
    """A row per contestant of each network. Each network has its own process."""
    rows: Rows = []
    for name in options.models:
        result = in_its_own_process(compare_engines, name, options)
        show(result)
        rows += result
    return rows


def compare_engines(name: str, options: Options) -> Rows:
    """The rows of one network."""
    set_up_jax(devices=None, cohort_size=CLIENTS)
    heavy = jax.default_backend() == "cpu" and name in HEAVY
    epochs = 1 if heavy or options.quick else 5
    entry = MODELS[name]
    tokens = entry.input_dtype == np.int32
    make = functools.partial(synthetic, entry.input_shape, entry.num_classes, tokens=tokens)
    dataset = make(CLIENTS * (2 * BATCH if heavy and options.quick else SAMPLES))
    settings: dict[str, Any] = {
        "strategy": "fedavg", "model": name, "partition": "iid", "clients": CLIENTS, "cohort": CLIENTS,
        "local_epochs": epochs, "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM,
    }  # fmt: skip
    config = fmr.Config(**settings)
    ours = Contestant("ours", config, dataset=dataset, warm_up=1)
    contestants: list[Any] = [ours]
    if name in FILTERED and jax.default_backend() == "cpu":
        direct = dataclasses.replace(config, convolution="direct")
        contestants.append(Contestant("direct", direct, dataset=dataset, warm_up=1))
    product = Product(ours.engine.axis.num_devices)
    opponents = torch_contestants(name, dataset, epochs)
    take_turns([product, *contestants, *opponents], options.repeats, seconds=options.seconds)
    for opponent in opponents:
        opponent.stop()
    if not options.quick:
        two_steps = dataclasses.replace(config, local_epochs=1)
        plain = Contestant(
            "plain", two_steps, dataset=make(CLIENTS * 2 * BATCH), plain=True, warm_up=1, devices=1, lanes=CLIENTS
        )
        plain.race()
        contestants.append(plain)
    by_arrangement = {opponent.arrangement: opponent.speed() for opponent in opponents if opponent.name == "torch_best"}
    best: dict[str, Any] = {}
    for opponent in sorted(opponents, key=TorchContestant.speed):
        best[opponent.name] = opponent
    contestants += [best[key] for key in ("torch_loop", "torch_best") if key in best]
    if not opponents:
        print("PyTorch is not installed (extra parity): its columns stay empty")
    operations = 6 * multiply_adds(ours.model)
    rows = []
    for contestant in contestants:
        rows.append(
            {
                "model": name,
                "engine": contestant.name,
                "images_per_second": contestant.speed(),
                "ratio_loop": contestant.speed() / best["torch_loop"].speed() if best else None,
                "ratio_best": contestant.speed() / best["torch_best"].speed() if best else None,
                "share_of_limit": contestant.speed() * operations / product.rate(),
                "compile_seconds": getattr(contestant, "compile_seconds", None),
                "peak_memory_bytes": getattr(contestant, "peak_memory_bytes", None),
                "arrangements": by_arrangement if contestant.name == "torch_best" else None,
            }
        )
    return rows


def compare_products(options: Options) -> Rows:
    """The rates of XLA and PyTorch for the products of each network. Each network has its own process."""
    return [row for name in options.models for row in in_its_own_process(products.compare_products, name)]


def compare_strategies(options: Options) -> Rows:
    """A row per strategy: its speed, and the time of a round relative to FedAvg.

    LeNet-5, 10 of 20 clients with 500 images each, two local epochs (FedRep needs them), 1,000 public images for those
    that use some.
    """
    dataset = synthetic((32, 32, 3), 10, 22 * SAMPLES)
    settings: dict[str, Any] = {
        "model": "lenet5", "partition": "iid", "clients": 20, "cohort": CLIENTS, "local_epochs": 2,
        "batch_size": BATCH, "lr": 0.001, "public_share": 1 / 11,
    }  # fmt: skip
    set_up_jax(devices=None, cohort_size=CLIENTS)
    names = ["fedavg", *(name for name in options.strategies if name != "fedavg")]
    contestants = [Contestant(name, fmr.Config(strategy=name, **settings), dataset=dataset, rounds=2) for name in names]
    take_turns(contestants, options.repeats)
    rows = []
    for contestant in contestants:
        seconds = contestant.seconds()
        rows.append(
            {
                "strategy": contestant.name,
                "images_per_second": contestant.speed(),
                "cost_of_a_round": contestant.seconds_per_round() / contestants[0].seconds_per_round(),
                "outside_clients": 1 - seconds["clients"] / seconds["round"] if "clients" in seconds else None,
                "compile_seconds": contestant.compile_seconds,
            }
        )
    return rows


def compare_fedme(options: Options) -> Rows:
    """Seconds per round of FedMe's clients and of its server, compared with one network per client.

    Eight clients of 250 images, all in every round, two local epochs, a fifth for validation, 250 public images, two
    clusters. Either all have LeNet-5 (beside FedAvg), or two each one of four networks: FedAvg cannot mix these, so it
    is Local-only whose clients do the same work. FedMe's clients change networks, so only first rounds are timed.
    """
    dataset = synthetic((32, 32, 3), 10, 9 * 250)
    settings: dict[str, Any] = {
        "partition": "iid", "clients": 8, "cohort": 8, "local_epochs": 2, "batch_size": BATCH, "lr": 0.001,
        "validation_share": 0.2, "public_share": 1 / 9, "public_labels": False, "architectures": "cyclic",
    }  # fmt: skip
    set_up_jax(devices=None, cohort_size=8)
    exchanging = fedme.Hyper(cluster_rounds=(1,))
    rows = []
    for alone, model in (("fedavg", "lenet5"), ("local", "lenet5_small,lenet5,lenet5_large,lenet5_deep")):
        if options.quick and rows:
            break
        configs = (
            fmr.Config(strategy=alone, model=model, **settings),
            fmr.Config(strategy="fedme", hyper=exchanging, model=model, **settings),
        )
        pair = [Contestant(config.strategy, config, dataset=dataset) for config in configs]
        turns = [[contestant.seconds(anew=True) for contestant in pair] for _ in range(options.repeats)]
        if "clients" not in turns[0][0]:
            raise SystemExit("on a single device clients and server are one program: this needs two CPU cores")
        for position, contestant in enumerate(pair):
            clients = statistics.median(turn[position]["clients"] for turn in turns)
            rows.append(
                {
                    "strategy": contestant.name,
                    "networks": len(model.split(",")),
                    "clients_seconds": clients,
                    "ratio": statistics.median(turn[position]["clients"] / turn[0]["clients"] for turn in turns),
                    "server_seconds": statistics.median(turn[position]["round"] for turn in turns) - clients,
                    "compile_seconds": contestant.compile_seconds,
                }
            )
    return rows


def dissect_rounds(options: Options) -> Rows:
    """Seconds of the parts of a round: LeNet-5, 100 clients with 500 images on average, K = 10, Dirichlet."""
    dataset = synthetic((32, 32, 3), 10, 100 * SAMPLES)
    test = synthetic((32, 32, 3), 10, 10_000)
    set_up_jax(devices=None, cohort_size=CLIENTS)
    rows = []
    for alpha in (0.1, 0.5):
        for strategy in ("fedavg", "fedmr"):
            config = fmr.Config(
                strategy=strategy, model="lenet5", partition="dirichlet", alpha=alpha, clients=100, cohort=CLIENTS,
                local_epochs=1 if options.quick else 5, batch_size=BATCH, lr=LR,
            )  # fmt: skip
            contestant = Contestant(strategy, config, dataset=dataset)
            engine, seconds = contestant.engine, contestant.seconds()
            evaluation = Evaluation(
                contestant.model, normalised(contestant.federated.dataset, test.x, test.y), engine.axis
            )
            deployed = engine.deployed(contestant.progress)
            evaluation.one(deployed)
            started = time.perf_counter()
            evaluation.one(deployed)
            tested = time.perf_counter() - started
            round_seconds = seconds["round"]
            shares: dict[str, float | None] = dict.fromkeys(("clients", "server", "host_and_copies"))
            if "clients" in seconds:  # else a round is one program
                shares["clients"] = clients = seconds["clients"] / round_seconds
                shares["server"] = server = (seconds["begin"] + seconds["finish"]) / round_seconds
                shares["host_and_copies"] = 1 - clients - server
            rows.append(
                {
                    "strategy": strategy,
                    "alpha": alpha,
                    "seconds_per_round": round_seconds,
                    **shares,
                    "evaluation_per_5_rounds": tested / (5 * round_seconds),
                    **padding_waste(contestant),
                }
            )
    return rows


def padding_waste(contestant: Contestant, rounds: int = 50) -> dict[str, float]:
    """Ratio of computed steps to needed steps, averaged over random cohorts: in lanes, and with devices that wait."""
    axis, batch = contestant.engine.axis, contestant.config.batch_size
    steps = -(-contestant.federated.sizes // batch)
    rng = np.random.default_rng(0)
    lay_out = jax.jit(functools.partial(assign, axis))
    needed = in_lanes = with_waiting = 0
    for _ in range(rounds):
        cohort = rng.choice(len(steps), contestant.config.cohort, replace=False)
        work = np.append(steps[cohort], 0)
        slots = np.asarray(lay_out(jnp.asarray(contestant.federated.sizes[cohort], jnp.int32)))
        groups = work[slots].reshape(axis.num_devices, -1, axis.lanes).max(axis=2)
        needed += work.sum()
        in_lanes += groups.sum() * axis.lanes
        with_waiting += groups.sum(axis=1).max() * axis.lanes * axis.num_devices
    return {"padding_waste": in_lanes / needed, "with_waiting_devices": with_waiting / needed}


def grow(options: Options) -> Rows:
    """Time and memory of a round against K and against N. Each point has its own process.

    Against K, at N = 100: FedMR, the FEMNIST CNN. Against N, at K = 100: FedAvg, FedMR and SCAFFOLD with its memory on
    the host, LeNet-5. Clients of 20 images, drawn from 50,000 with replacement; batch 10, one epoch.
    """
    cohorts = (5, 100) if options.quick else (5, 10, 20, 50, 100)
    numbers = (1_000, 1_000_000) if options.quick else (1_000, 10_000, 100_000, 1_000_000)
    points = [("fedmr", "cnn_femnist", k, 100) for k in cohorts]
    points += [(name, "lenet5", 100, n) for name in ("fedavg", "fedmr", "scaffold") for n in numbers]
    return [in_its_own_process(measure_growth, *point) for point in points]


def measure_growth(strategy: str, model: str, cohort: int, clients: int) -> dict[str, Any]:
    """One row of `grow`."""
    set_up_jax(devices=None, cohort_size=cohort)
    dataset = synthetic((28, 28, 1), 62, 50_000)
    config = fmr.Config(
        strategy=strategy, model=model, partition="bootstrap", samples_per_client=20, clients=clients, cohort=cohort,
        local_epochs=1, batch_size=10, lr=LR, memory="host",
    )  # fmt: skip
    started = time.perf_counter()
    contestant = Contestant(strategy, config, dataset=dataset)
    ready = time.perf_counter() - started - contestant.compile_seconds
    seconds = contestant.seconds()["round"]
    memory = contestant.progress.memory
    return {
        "strategy": strategy,
        "model": model,
        "cohort": cohort,
        "clients": clients,
        "seconds_per_round": seconds,
        "seconds_per_client": seconds / cohort,
        "peak_memory_mb": peak_memory_bytes() / 1e6,
        "clients_with_memory": 0 if memory is None else len(memory),
        "seconds_before": ready,  # division of the samples, their transfer and two rounds, without compilation
        "compile_seconds": contestant.compile_seconds,
    }


def run_race(options: Options, *, part: int = 1) -> Rows:
    """Seconds of the benchmark run of pfl-research (``exp/pfl_race.flags``) on synthetic images.

    Args:
      options: whether it is quick.
      part: a divisor of the numbers of images, of clients and of clients per round, to try the function.
    """
    config = configuration.parse(["--strategy=fedavg", "--flagfile=exp/pfl_race.flags"])
    config = dataclasses.replace(config, clients=config.clients // part, cohort=config.cohort // part)
    set_up_jax(devices=None, cohort_size=config.cohort)
    dataset = synthetic((32, 32, 3), 10, 50_000 // part)
    gpu = jax.default_backend() == "gpu"
    contestant = Contestant("fedavg", config, dataset=dataset)
    test = synthetic((32, 32, 3), 10, 10_000 // part)
    evaluation = Evaluation(
        contestant.model, normalised(contestant.federated.dataset, test.x, test.y), contestant.engine.axis
    )
    evaluation.one(contestant.engine.deployed(contestant.progress))
    rounds = (100 if options.quick else config.rounds) if gpu else 2 if options.quick else 10
    started = time.perf_counter()
    for _ in range(0, rounds, config.eval_every):
        contestant.progress, _ = contestant.engine.run(contestant.progress, min(rounds, config.eval_every))
        evaluation.one(contestant.engine.deployed(contestant.progress))
    seconds = time.perf_counter() - started
    return [
        {
            "rounds_measured": rounds,
            "seconds": seconds,
            "seconds_for_100_rounds": seconds * 100 / rounds,
            "seconds_for_1500_rounds": seconds * 1500 / rounds,
            "compile_seconds": contestant.compile_seconds,
        }
    ]


def compare_events(options: Options) -> Rows:
    """Trained clients per second of synchronous rounds, asynchronous waves and serial loops (events.py)."""
    set_up_jax(devices=1, cohort_size=1)
    rows = []
    for model in ("lenet5", "cnn_digits"):
        shape, classes = ((8, 8, 1), 10) if model == "cnn_digits" else ((32, 32, 3), 10)
        dataset = synthetic(shape, classes, 10_000)
        contestants: dict[str, Any] = {}
        widths: dict[str, float | None] = {}
        for setting in events.SETTINGS:
            config = events.config_of(setting, model, quick=options.quick)
            versions = max(1, 20 // config.cohort)
            contestant = Contestant(setting, config, dataset=dataset, rounds=versions, devices=1, lanes=1)
            contestants[setting] = contestant
            if config.mode == "async":
                schedule = events_of(config, contestant.federated, contestant.model)
                assert schedule is not None
                widths[setting] = events.width(schedule)
                name = f"{setting}, serial"
                contestants[name] = events.SerialLoop(config, contestant.engine, schedule, name=name, versions=versions)
        take_turns(list(contestants.values()), options.repeats, seconds=options.seconds)
        images = 100 * contestants["sync K=10"].config.local_epochs  # of one client
        rates = {
            name: contestant.speed() / images
            if isinstance(contestant, Contestant)
            else statistics.median(contestant.timings)
            for name, contestant in contestants.items()
        }
        for name, rate in rates.items():
            serial = rates.get(f"{name}, serial")
            rows.append(
                {
                    "model": model,
                    "contestant": name,
                    "events_per_second": rate,
                    "beside_sync": rate / rates["sync K=10"],
                    "beside_serial": None if serial is None else rate / serial,
                    "jobs_per_wave": widths.get(name),
                }
            )
    return rows


SUBJECTS: dict[str, Callable[[Options], Rows]] = {
    "models": compare_models,
    "rounds": dissect_rounds,
    "strategies": compare_strategies,
    "fedme": compare_fedme,
    "growth": grow,
    "race": run_race,
    "start": lambda options: start.measure(rounds=10 if options.quick else 100),
    "products": compare_products,
    "clock": compare_events,
}


# ---- The command


def show(rows: Rows) -> None:
    """Print a table."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"
        if isinstance(value, dict):
            return "; ".join(f"{name}: {text(inner)}" for name, inner in value.items())
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    cells = [list(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def main() -> None:
    """Run the benchmark and print its table."""
    if "peers" in sys.argv[1:]:
        sys.exit(peers.main([word for word in sys.argv[1:] if word != "peers"]))
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("subject", choices=[*SUBJECTS, "peers"], nargs="?", default="models")
    parser.add_argument("--models", default="", help=f"of {', '.join(COMPARED)} (default: all that the device is for)")
    parser.add_argument(
        "--strategies",
        default=",".join(fmr.strategies.on_any_network()),
        help="names, separated by commas",
    )
    help = f"timings per contestant (default 5; with --quick 3, or as many as begin within {QUICK_SECONDS} seconds)"
    parser.add_argument("--repeats", type=int, default=0, help=help)
    parser.add_argument("--quick", action="store_true", help="one local epoch, fewer points, without plain layers")
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    models = tuple(filter(None, arguments.models.split(",")))
    for kind, names, registered in (
        ("model", models, COMPARED),
        ("strategy", arguments.strategies.split(","), fmr.STRATEGIES),
    ):
        if unknown := set(names) - set(registered):
            parser.error(f"unknown {kind} {', '.join(sorted(unknown))}; known: {', '.join(registered)}")
    if not models and arguments.subject == "products":
        models = ("lenet5", "cnn_mcmahan")
    if not models:
        gpu = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
        models = tuple(name for name in COMPARED if gpu or name not in ON_GPU_ONLY)
    repeats = arguments.repeats or (3 if arguments.quick else 5)
    seconds = QUICK_SECONDS if arguments.quick and not arguments.repeats else math.inf
    options = Options(models, tuple(arguments.strategies.split(",")), repeats, seconds, arguments.quick)
    try:
        rows = SUBJECTS[arguments.subject](options)
    except fmr.UserError as error:
        parser.error(str(error))
    if arguments.subject != "models":
        show(rows)
    print(f"jax {jax.__version__}, {usable_cores()} CPU cores, {jax.default_backend()}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
