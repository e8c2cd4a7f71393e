"""Faults of a strategy's functions are one line that names the function and the fault."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import fedjax_mr as fmr
from fedjax_mr import trees
from fedjax_mr.engine import checks
from fedjax_mr.experiment.folder import COLUMNS
from fedjax_mr.strategies import fedavg
from fedjax_mr.testing.federations import federated


class State(NamedTuple):
    model: Any
    extra: Any


def strategy(**faults):
    """FedAvg, in which each of some functions returns what a fault makes of its result."""

    def build(hyper, problem):
        average = fedavg.build(fedavg.Hyper(), problem)

        def members():
            yield "init", lambda key: State(average.init(key).model, jnp.zeros(2))
            yield "init_memory", lambda key, client: {"count": jnp.zeros((), jnp.int32)}
            yield "dispatch", lambda state, *_: {"model": trees.broadcast(state.model, problem.cohort_size)}
            yield "client_update", lambda payload, memory, *rest: (
                (result := average.client_update(payload, None, *rest))[0], memory, result[2]
            )  # fmt: skip
            yield (
                "server_update",
                lambda state, uploads, *_: (state._replace(model=trees.mean(uploads["model"])), {}),
            )
            yield "global_model", lambda state: state.model

        def faulty(name, function):
            return lambda *args: faults[name](function(*args)) if name in faults else function(*args)

        own = {name: faulty(name, function) for name, function in members()}
        select = {"select": lambda state, round, key: faults["select"](problem)} if "select" in faults else {}
        return average._replace(**own, **select, models=None)

    return build


nothing = lambda result: None
WRONG = [
    ("dispatch", nothing, "dispatch must return a dictionary of payloads, but it returns nothing (None)"),
    ("dispatch", lambda sent: sent | {"c": 3.0}, "one row for each of 3 clients, but c is float32[]: use trees.broad"),
    ("dispatch", lambda sent: sent | {"c": jnp.zeros(9)}, "one row for each of 3 clients, but c is float32[9]"),
    ("client_update", nothing, "client_update must return (upload, memory, metrics), but it returns nothing (None)"),
    ("client_update", lambda done: (*done[:2], {}), "must return the Metrics of local.train, but it returns a dict"),
    ("client_update", lambda done: (done[0], None, done[2]), "a memory without count, which init_memory has"),
    (
        "client_update",
        lambda done: (done[0], {"count": 0.5}, done[2]),
        "count is float32[], but that of init_memory is",
    ),
    ("client_update", lambda done: (done[0]["model"]["params"], *done[1:2]), "but it returns a tuple of 2"),
    ("server_update", nothing, "server_update must return (state, info), but it returns nothing (None)"),
    ("server_update", lambda done: done[0], "must return (state, info), but it returns a State"),
    ("server_update", lambda done: (done[0]._replace(extra=jnp.zeros(3)), {}), "extra is float32[3], but that of init"),
    ("server_update", lambda done: (done[0]._asdict(), {}), "another structure (a dict) than that of init (a State)"),
    ("server_update", lambda done: (done[0], {"accuracy": 7.0}), "named 'accuracy', which is a column of the metrics"),
    ("server_update", lambda done: (done[0], {"note": "text"}), "returns 'note' as information, which is a str"),
    ("global_model", nothing, "global_model must return the variables of the network, but it returns nothing (None)"),
    ("global_model", lambda model: trees.broadcast(model, 2), "float32[2, 3], but that of the network is float32[3]"),
    ("select", lambda problem: jnp.arange(3), "select must return a Cohort(ids, sizes), but it returns a int32[3]"),
    ("select", lambda problem: fmr.strategies.Cohort(jnp.arange(2), jnp.ones(2)), "ids and sizes of 3 clients, but th"),
]


@pytest.mark.parametrize(("member", "fault", "message"), WRONG, ids=[f"{each[0]}: {each[2][-30:]}" for each in WRONG])
def test_a_fault_is_one_line(member, fault, message):
    one = fmr.Simulator(strategy(**{member: fault}), "logistic", federated(), cohort=3, layout=fmr.Layout(devices=1))
    with pytest.raises(fmr.UserError) as error:
        jax.eval_shape(one.rounds.deployed, one.init()) if member == "global_model" else one.run(one.init())
    line = str(error.value)
    assert message in line and line.startswith("the strategy's ") and "\n" not in line


def test_without_a_fault_it_trains():
    one = fmr.Simulator(strategy(), "logistic", federated(), cohort=3, layout=fmr.Layout(devices=1))
    state, _ = one.run(one.init(), 2)
    assert float(one.test(state).loss) < float(one.test(one.init()).loss)


def test_the_columns_of_the_metrics_are_taken():
    assert set(COLUMNS) <= set(checks.COLUMNS)
