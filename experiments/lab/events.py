"""Events per second of asynchronous clients: batched waves, a serial loop of the same engine, synchronous rounds.

    python experiments/lab/benchmark.py clock [--quick]

FedAvg, five device classes, N = 100 clients of 100 samples, batch 50. An event is the training of one client with its
arrival. All contestants have one device and one lane. The serial loop trains each job alone at its start, with the same
compiled client, and takes its uploads one version at a time, like a simulator without waves.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

import fedjax_mr as fmr
from fedjax_mr import trees
from fedjax_mr.clock import Events
from fedjax_mr.engine.round import INIT, client_key
from fedjax_mr.experiment.method import strategy_of

SETTINGS = {
    "sync K=10": {"cohort": 10, "fleet": None},
    "async M=20 K=10": {"cohort": 10, "mode": "async", "in_flight": 20},
    "async M=10 K=1": {"cohort": 1, "mode": "async", "in_flight": 10, "refill": "arrival"},
    "async M=50 K=1": {"cohort": 1, "mode": "async", "in_flight": 50, "refill": "arrival"},
}


def config_of(setting: str, model: str, *, quick: bool) -> fmr.Config:
    """The configuration of a contestant."""
    changes: dict[str, Any] = {"fleet": "classes"} | SETTINGS[setting]
    return fmr.Config(
        strategy="fedavg", model=model, partition="iid", clients=100, batch_size=50, rounds=400, momentum=0.5,
        local_epochs=1 if quick else 5, staleness="constant", **changes,
    )  # fmt: skip


def width(events: Events | None) -> float | None:
    """The mean number of jobs of a batched call that trains some."""
    if events is None or events.schedule is None:
        return None
    jobs = (events.schedule.train_slots < events.schedule.num_slots).sum(axis=1)
    return float(jobs[jobs > 0].mean())


class SerialLoop:
    """A plain event loop over the jobs of a schedule: every job trains alone, at its start."""

    def __init__(self, config: fmr.Config, engine: Any, events: Events, *, name: str, versions: int) -> None:
        """Compile the client and the update, and start the jobs in flight."""
        self.name, self.versions, self.timings = name, versions, []
        constants = engine.constants
        problem = constants.problem
        strategy = strategy_of(config)(problem)
        self._jobs, self._time, self._starts = events.jobs, 0, {}
        for number in range(len(self._jobs)):
            self._starts.setdefault(int(self._jobs["version"][number]), []).append(number)
        by_use: dict[int, list[int]] = {}
        for number, used in enumerate(self._jobs["used"]):
            by_use.setdefault(int(used), []).append(number)
        self._uses = by_use

        @jax.jit
        def train(constants: Any, model: Any, client: jax.Array, version: jax.Array) -> Any:
            key = client_key(constants.key, version, client, 0)
            return strategy.client_update({"model": model}, None, constants.client(client), version, key)[0]["model"]

        @jax.jit
        def update(model: Any, starts: list[Any], trained: list[Any]) -> Any:
            changes = [trees.subtract(b["params"], a["params"]) for a, b in zip(starts, trained, strict=True)]
            return model | {
                "params": trees.add(
                    model["params"], trees.mean(jax.tree.map(lambda *leaves: jnp.stack(leaves), *changes))
                )
            }

        self._train, self._update = functools.partial(train, constants), update
        self._model = strategy.init(jax.random.fold_in(constants.key, INIT)).model
        self._open: dict[int, tuple[Any, Any]] = {}
        self._start()
        self.race()
        self.timings.clear()

    def _start(self) -> int:
        started = self._starts.get(self._time, [])
        for number in started:
            client, version = jnp.int32(self._jobs["client"][number]), jnp.int32(self._time)
            self._open[number] = self._model, self._train(self._model, client, version)
        return len(started)

    def race(self) -> None:
        """Make some versions and note the trained jobs per second."""
        began, done = time.perf_counter(), 0
        for _ in range(self.versions):
            pairs = [self._open.pop(number) for number in self._uses[self._time + 1]]
            self._model = self._update(self._model, *map(list, zip(*pairs, strict=True)))
            self._time += 1
            done += self._start()
        jax.block_until_ready((self._model, self._open))
        self.timings.append(done / (time.perf_counter() - began))
