"""Runs of one process share compiled programs where all that a program closes over is the same, and only there."""

import ctypes
import dataclasses
import functools
import gc
import os
import subprocess
import sys
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_mr as fmr
from fedjax_mr.engine import program
from fedjax_mr.engine.clients import ClientAxis, client_axis
from fedjax_mr.experiment import experiment
from fedjax_mr.experiment import run as running

TINY = dict(
    model="logistic", strategy="fedavg", clients=4, cohort=2, local_epochs=1, rounds=2, eval_every=2, devices=1,
    progress=False,
)  # fmt: skip
LOWERED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: LOWERED.append(event) if "jaxpr_to_mlir" in event else None
)
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: COMPILED.append(event) if "backend_compile" in event else None
)


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    """Go into an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def forget():
    """The function that drops what was compiled before."""
    return program.forget


@pytest.fixture
def made(monkeypatch):
    """Collect the rounds of every run."""
    found, ordinary = [], running.simulator_of

    def simulator_of(*arguments, **options):
        simulator = ordinary(*arguments, **options)
        found.append(simulator.rounds)
        return simulator

    monkeypatch.setattr(running, "simulator_of", simulator_of)
    return found


def run(**changes):
    objects = {name: changes.pop(name) for name in ("dataset", "model_object") if name in changes}
    model = objects.pop("model_object", None)
    return fmr.run(fmr.Config(**TINY | changes), record=False, **objects, **({"model": model} if model else {}))


def test_a_run_like_one_before_compiles_nothing_and_has_the_same_bits(made, forget, equal):
    forget()
    first = run(eval_clients=True)
    del LOWERED[:]
    second = run(eval_clients=True)
    assert not LOWERED
    assert made[1].programs["rounds"] is made[0].programs["rounds"] and made[1].programs["rounds"].traces == 1
    equal(second.variables, first.variables)
    without_time = lambda result: [row | {"seconds": 0} for row in result.rows]
    assert without_time(second) == without_time(first)
    assert first.summary["compile_seconds"] > 0 == second.summary["compile_seconds"]  # its own, not the first one's


@pytest.mark.parametrize(
    "shared", [pytest.param(dict(seed=1, partition_seed=0), marks=pytest.mark.slow), dict(dataset="changed")]
)
def test_what_programs_take_as_arguments_is_never_baked_in(made, forget, equal, shared):
    """Another seed, or changed samples in equal shapes: the same programs, and the results of a run alone."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 6)).astype(np.float32), rng.integers(0, 3, 200).astype(np.int32)
    data = lambda x: fmr.from_arrays(x, y)
    base = dict(partition="iid", partition_seed=0, dataset=data(x), seed=0)
    changed = base | shared | ({"dataset": data(x + 1)} if "dataset" in shared else {})
    run(**base)
    second = run(**changed)
    assert made[1].programs["rounds"] is made[0].programs["rounds"]
    forget()
    alone = run(**changed)
    assert made[2].programs["rounds"] is not made[0].programs["rounds"]
    equal(second.variables, alone.variables)
    assert second.rows[-1]["accuracy"] == alone.rows[-1]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("other", [dict(local_epochs=2), dict(clients=5), dict(lanes=2)], ids=str)
def test_other_settings_shapes_or_layouts_have_programs_of_their_own(made, forget, equal, other):
    run()
    second = run(**other)
    assert made[1].programs["rounds"] is not made[0].programs["rounds"]
    forget()
    equal(second.variables, run(**other).variables)


@pytest.mark.slow  # quick in the contract
@pytest.mark.parametrize(
    "other",
    [
        dict(seed=1),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (dict(alpha=0.7), dict(partition="shards"))),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "strategy",
    ["fedmr", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scaffold", "fedrep", "centralized"))],
)
def test_seeds_and_partitions_share_programs(made, forget, equal, strategy, other):
    """The size of the largest client is rounded up, so its small changes are no other shape."""
    base = dict(strategy=strategy, local_epochs=2, partition="dirichlet", clients=4, cohort=2)
    run(**base)
    first = made[0].constants.problem
    second = run(**base | other)
    assert not np.array_equal(first.sizes, made[1].constants.problem.sizes)
    assert made[1].programs["rounds"] is made[0].programs["rounds"] and made[1].programs["rounds"].traces == 1
    forget()
    equal(second.variables, run(**base | other).variables)


@pytest.mark.slow  # quick in the contract
@pytest.mark.parametrize(
    "server", [pytest.param({}, marks=pytest.mark.slow), dict(server_optimizer="adam", server_lr=0.1)], ids=str
)
def test_numbers_share_programs(made, forget, equal, server):
    base = dict(strategy="fedprox", weight_decay=1e-4, clip_norm=2.0, partition_seed=0) | server
    other = dict(lr=0.07, momentum=0.4, weight_decay=1e-3, clip_norm=1.0) | ({"server_lr": 0.02} if server else {})
    first = run(**base)
    hyper = fmr.strategies.fedprox.Hyper(mu=0.5)
    second = run(**base | other, hyper=hyper)
    assert made[1].programs["rounds"] is made[0].programs["rounds"] and made[1].programs["rounds"].traces == 1
    assert second.rows[-1]["train_loss"] != first.rows[-1]["train_loss"]
    forget()
    equal(second.variables, run(**base | other, hyper=hyper).variables)


@pytest.mark.slow
def test_settings_of_jax_are_traced_anew(made):
    run()
    before = made[0].programs["rounds"].traces
    with jax.default_matmul_precision("highest"):
        run()
    assert made[1].programs["rounds"] is made[0].programs["rounds"] and made[1].programs["rounds"].traces == before + 1


STEP = 1.0


def test_code_of_ones_own_is_traced_anew(made, monkeypatch):
    """A strategy redefined under its name, one that reads a number from elsewhere, one's own network."""

    def build(hyper, problem):
        plain = fmr.strategies.fedavg.build(fmr.strategies.fedavg.Hyper(), problem)

        def server_update(state, uploads, cohort, round, key):
            new, info = plain.server_update(state, uploads, cohort, round, key)
            return jax.tree.map(lambda leaf: leaf * STEP, new), info

        return plain._replace(server_update=server_update)

    norm = lambda result: float(optax.tree.norm(result.variables["params"]))
    monkeypatch.setitem(fmr.STRATEGIES, "mine", fmr.Row(build, None, "a notebook"))
    first = norm(run(strategy="mine"))
    monkeypatch.setitem(globals(), "STEP", 0.0)  # another cell of the notebook
    assert norm(run(strategy="mine")) == 0.0 < first
    monkeypatch.setitem(fmr.STRATEGIES, "mine", fmr.Row(fmr.strategies.indep.build, None, "the next try"))
    assert norm(run(strategy="mine")) > 0
    monkeypatch.setitem(fmr.STRATEGIES, "fedavg", fmr.Row(build, fmr.strategies.fedavg.Hyper, "in the place of ours"))
    assert norm(run()) == 0.0
    assert len({id(rounds.programs["rounds"]) for rounds in made}) == 4


@pytest.mark.slow
def test_networks_of_ones_own_are_traced_anew(made):
    class Mine(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(x.reshape(x.shape[0], -1)) * STEP

    for _ in range(2):
        run(model_object=Mine())
    assert made[1].programs["rounds"] is not made[0].programs["rounds"]


def test_a_second_simulator_traces_and_compiles_nothing(forget):
    """In a notebook, too: other seeds, partitions, learning rates and numbers of the strategy."""
    forget()
    data = fmr.data.load("digits")

    def accuracy(*, seed, alpha, lr, mu):
        federated = fmr.data.federate(data, num_clients=4, partition="dirichlet", alpha=alpha, seed=seed)
        hyper = fmr.strategies.fedprox.Hyper(mu=mu)
        setting = fmr.local.setting(lr=lr, epochs=1)
        simulator = fmr.Simulator("fedprox", "logistic", federated, cohort=2, local=setting, hyper=hyper, seed=seed)
        state, _ = simulator.run(simulator.init(), 2)
        return simulator.test(state).accuracy

    first = accuracy(seed=0, alpha=0.5, lr=0.05, mu=0.1)
    before = program.compile_seconds()
    assert before > 0
    assert accuracy(seed=1, alpha=1.0, lr=0.02, mu=0.5) != first
    assert program.compile_seconds() == before


def test_the_oldest_programs_go_and_their_code_with_them(monkeypatch):
    """A session of many methods does not grow without bound."""
    few, traced = (functools.lru_cache(maxsize=2)(each.__wrapped__) for each in (program._program, program._traced))
    monkeypatch.setattr(program, "_program", few)
    monkeypatch.setattr(program, "_traced", traced)
    axis = client_axis(devices=1, lanes=1, cohort_size=1)
    code = [weakref.ref(_call(axis, length)) for length in (1, 2, 3)]
    gc.collect()
    assert few.cache_info().currsize == 2 and code[0]() is None and code[2]() is not None


def _call(axis, length):
    programs = program.Programs(Doubling(axis))
    np.testing.assert_array_equal(programs.call("double", jnp.ones(length)), np.full(length, 2))
    return programs["double"]


@dataclasses.dataclass(frozen=True)
class Doubling:
    """An owner of programs."""

    axis: ClientAxis

    def double(self, x):
        return 2 * x


def test_pictures_come_at_the_end_or_not_at_all(monkeypatch):
    drawn = []
    for name in ("partition", "curves", "personal"):
        monkeypatch.setattr(experiment.plots, name, lambda *_, name=name, **__: drawn.append(name))
    fmr.run(fmr.Config(**TINY), on_row=lambda row: drawn.append(row["round"]))
    assert drawn == [2, "partition", "curves"]
    del drawn[:]
    run(eval_clients=True)
    assert drawn == []


GROWTH = """
import ctypes
import fedjax_mr as fmr
from pathlib import Path

def resident():
    line = next(line for line in Path("/proc/self/status").open() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

for number in range(3):
    config = fmr.Config(model="cnn_digits", rounds=1, local_epochs=1, lr=0.01 * (number + 1), devices=1, progress=False)
    fmr.run(config, record=False)
before = resident()
ctypes.CDLL(None).malloc_trim(0)
print(before - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_a_run_gives_the_memory_of_its_compilations_back():
    """Otherwise some 200 MB that are free stay with the process, and more after each run."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    ended = subprocess.run([sys.executable, "-c", GROWTH], env=environment, capture_output=True, text=True, check=True)
    assert float(ended.stdout) < 50


def test_cpu_programs_have_options_that_the_user_can_replace(monkeypatch):
    monkeypatch.setattr(program, "machine", lambda: "x86_64")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_thunk_runtime=true")
    options = program.compiler_options()
    assert set(options) == {program.LEVEL, program.LIBRARY}
    for name in options:
        monkeypatch.setenv("XLA_FLAGS", f"--{name}=0")
        assert set(program.compiler_options()) == set(options) - {name}
    monkeypatch.setenv("XLA_FLAGS", "")
    with program.platforms.tracing_for("gpu"):
        assert program.compiler_options() == {}
    monkeypatch.setattr(program, "machine", lambda: "arm64")
    assert set(program.compiler_options()) == {program.LEVEL}


def test_sums_of_products_with_constant_columns_are_right():
    # jaxlib 0.10.2 alone gives NaN or any number on x86, see `adds_up_products`.
    weights, values = np.ones((4, 4), np.float32), np.arange(4, dtype=np.float32)

    def total(weights, values):
        return jnp.sum(weights @ jnp.broadcast_to(values[:, None], (4, 1024)), axis=1)

    made = program.Program(total)
    np.testing.assert_array_equal(made(weights, values), np.full(4, 6 * 1024))
    assert made.traces == 1


def test_a_program_is_compiled_once():
    made = program.Program(lambda weights: jnp.sum(weights @ weights + 1))
    weights = np.ones((4, 4), np.float32)
    COMPILED.clear()
    made(weights)
    made(weights)
    assert len(COMPILED) == 1


def test_convolutions_are_xlas_own_on_x86_and_products_are_not(monkeypatch):
    monkeypatch.setattr(program, "machine", lambda: "x86_64")
    images, kernel = np.ones((8, 16, 16, 32), np.float32), np.ones((3, 3, 32, 32), np.float32)

    def both(images, kernel):
        y = jax.lax.conv_general_dilated(images, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y, images.reshape(-1, 32) @ kernel[0, 0]

    of_library = lambda: program.Program(both).compile(images, kernel).as_text().count("ynn_fusion = ")
    assert of_library() == 1
    monkeypatch.setattr(program, "LIBRARY", "xla_cpu_of_another_version")  # unknown to this XLA, so it is left out
    assert of_library() >= 1
