"""Bytes that a round moves between devices, and time and memory with many clients.

    python experiments/lab/pods.py --devices=1,2,4,8 --models=lenet5 --strategies=fedavg,fedmr,fedcross,scaffold
    python experiments/lab/pods.py --clients=1000,10000,100000 --models=logistic,lenet5 --strategies=fedmr --cohort=100

The first command reads the transfers of a round from the program, which is compiled for D devices of the CPU. It needs
fewer cores than devices, because nothing is executed. --time also measures the seconds per round (median of three) with
200 samples per client, if each device has a core. hlo.py defines how the bytes of a collective are counted.

The second command runs rounds on one device with N clients of 20 samples each, drawn from a pool of 25,000 synthetic
samples, with the samples on the device and on the host (--placements). It prints the seconds per round (median of
three), and the memory of the process after the first rounds and at the end. Each point has its own process.
"""

import argparse
import dataclasses
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedjax_mr as fmr
from fedjax_mr import data, trees
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.devices import set_up_jax, usable_cores
from fedjax_mr.engine.round import begin
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.experiment.build import build_model, simulator_of
from fedjax_mr.experiment.federation import federated_data
from hlo import Module, collectives

SHAPES = {"lenet5": (32, 32, 3), "resnet20": (32, 32, 3), "vgg16": (32, 32, 3), "logistic": (8, 8, 1)}


def synthetic(shape: tuple[int, ...], *, samples: int, classes: int = 10) -> fmr.Dataset:
    """Noise with random labels. Only the shapes matter."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (samples, *shape), np.uint8)
    return fmr.from_arrays(x, rng.integers(0, classes, samples), num_classes=classes)


def leaf_type(leaf: Any) -> tuple[Any, Any]:
    """Shape and dtype."""
    return leaf.shape, leaf.dtype


def compiled_clients(engine: Rounds) -> str:
    """The HLO text of the program that trains the clients."""
    rows_of = lambda constants, progress: begin(engine.axis, constants, progress)[1]
    rows = jax.eval_shape(rows_of, engine.constants, engine.shapes())
    sharded = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(*leaf_type(leaf), sharding=engine.axis.sharded), rows)
    number = jax.ShapeDtypeStruct((), np.int32, sharding=engine.axis.replicated)
    return jax.jit(engine.trial.clients).lower((engine.constants, number), sharded).compile().as_text() or ""


def measure(strategy: str, model: str, *, devices: int, cohort: int, timed: bool = False) -> dict[str, Any]:
    """The collectives of one round and of the clients' program, and on request the time of a round."""
    config = fmr.Config(
        strategy=strategy,
        model=model,
        cohort=cohort,
        clients=2 * cohort,
        partition="iid",
        local_epochs=1,
        devices=devices,
        lanes=1,
    )
    federated = federated_data(config, dataset=synthetic(SHAPES[model], samples=25 * cohort))
    axis = client_axis(devices=devices, lanes=1, cohort_size=cohort)
    network = build_model(config, federated.dataset)
    # One program for whole rounds, as on accelerators; it is only compiled.
    described = dataclasses.replace(axis, fused=True, described=True)
    engine = simulator_of(config, federated, network, layout=described).rounds
    module = Module(engine.compile().compiled("rounds").as_text())
    transfers = [transfer for transfer in collectives(module, devices=devices) if transfer.computation != module.entry]
    exchanges = [transfer.bytes for transfer in transfers if transfer.kind == "all-to-all"]
    row = {
        "model": model,
        "strategy": strategy,
        "devices": devices,
        "clients_per_device": axis.padded(cohort) // devices,
        "collectives_of_clients": len(list(collectives(Module(compiled_clients(engine)), devices=devices))),
        "all_to_alls": len(exchanges),
        "all_to_all_bytes": sum(exchanges),
        "others": len(transfers) - len(exchanges),
        "other_bytes": sum(transfer.bytes for transfer in transfers) - sum(exchanges),
        "state_bytes": trees.num_bytes(engine.constants.problem.model.shapes()),
    }
    if timed:
        federated = federated_data(config, dataset=synthetic(SHAPES[model], samples=400 * cohort))
        row["seconds_per_round"] = seconds_per_round(simulator_of(config, federated, network).rounds)
    return row


def seconds_per_round(engine: Rounds) -> float | None:
    """Median seconds of three rounds after the first, or None if there are fewer cores than devices."""
    if engine.axis.num_devices > usable_cores():
        return None
    progress, _ = engine.run(engine.init(), 1)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        progress, report = engine.run(progress, 1)
        jax.block_until_ready((progress, report))
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds), 4)


def grow(strategy: str, model: str, *, clients: int, cohort: int, placement: str) -> dict[str, Any]:
    """Time and memory of rounds with N clients."""
    config = fmr.Config(
        strategy=strategy,
        model=model,
        cohort=cohort,
        clients=clients,
        local_epochs=1,
        data_placement=placement,
        devices=1,
        lanes=1,
    )
    pool = synthetic(SHAPES[model], samples=25_000)
    index = np.random.default_rng(0).integers(0, len(pool.y), 20 * clients).astype(np.int32)
    federated = data.FederatedData(pool, data.Split(index, np.arange(0, len(index) + 1, 20, dtype=np.int32)))
    engine = simulator_of(config, federated, build_model(config, federated.dataset)).rounds
    progress, _ = engine.run(engine.init(), 2)
    before, seconds, count = resident_bytes(), [], 100 if model == "logistic" else 5
    for _ in range(3):
        started = time.perf_counter()
        progress, report = engine.run(progress, count)
        jax.block_until_ready(report)
        seconds.append((time.perf_counter() - started) / count)
    return {
        "model": model, "strategy": strategy, "clients": clients, "cohort": cohort, "samples_on": placement,
        "seconds_per_round": round(statistics.median(seconds), 4), "rounds": 3 * count,
        "memory_MB_before": before // 10**6, "memory_MB_after": resident_bytes() // 10**6,
    }  # fmt: skip


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Print the table, or its rows as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,2,4,8")
    parser.add_argument("--models", default="lenet5")
    parser.add_argument("--clients", help="N, for the second table")
    parser.add_argument("--strategies", default="fedavg,fedmr,fedcross,scaffold")
    parser.add_argument("--cohort", type=int, default=16)
    parser.add_argument("--time", action="store_true", help="also run rounds on as many devices as there are cores")
    parser.add_argument("--placements", default="device,host", help="of the samples, for the second table")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts = [int(word) for word in ("1" if options.clients else options.devices).split(",")]
    show = lambda row: print(json.dumps(row) if options.json else " | ".join(map(str, row.values())), flush=True)
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("NPROC", str(4 * max(counts)))  # whole rounds as one program sum across the devices
    set_up_jax(devices=max(counts), cohort_size=options.cohort)
    for model in options.models.split(","):
        for strategy in options.strategies.split(","):
            if options.clients:
                for clients in map(int, options.clients.split(",")):
                    for placement in options.placements.split(","):
                        show(grow(strategy, model, clients=clients, cohort=options.cohort, placement=placement))
                continue
            for devices in counts:
                row = measure(strategy, model, devices=devices, cohort=options.cohort, timed=options.time)
                bound = 2 * (devices - 1) / devices * options.cohort * row["state_bytes"]
                row["times_the_bound"] = row["all_to_all_bytes"] / bound if bound else 0.0
                show(row)


if __name__ == "__main__":
    main()
