"""Models that circulate among clients and are never combined, and what all methods with such models share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import STRATEGIES, gitfl, indep, parts
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import Models
from fedjax_mr.testing.federations import default_hyper

MODELS = {"params": {"a": jnp.array([1.0, 2.0, 6.0]), "b": jnp.array([5.0, 7.0, 0.0])}}
NEW = {"params": {"a": jnp.array([3.0, 3.0, 0.0]), "b": jnp.array([1.0, 1.0, 4.0])}}
COHORT = Cohort(jnp.array([4, 0, 2]), jnp.array([1, 9, 5]))


def test_every_model_is_stored_as_it_was_uploaded_and_only_their_uniform_mean_is_deployed(federation):
    strategy = indep.build(None, federation("linear").problem)
    state, _ = strategy.server_update(Models(MODELS), {"model": NEW}, COHORT, 0, None)
    for name in "ab":
        assert state.models["params"][name].tolist() == NEW["params"][name].tolist()
    deployed = strategy.global_model(state)["params"]
    assert (float(deployed["a"]), float(deployed["b"])) == (2, 2)


def test_all_models_are_tested_one_by_one(federation):
    assert indep.build(None, federation("linear").problem).individual_models(Models(MODELS)) is MODELS


@pytest.mark.parametrize("name", ["fedmr", "indep", "fedcross"])
def test_the_jth_client_of_the_cohort_receives_the_jth_model(federation, name):
    """Or, if clients are asynchronous, the model of its branch."""
    state = Models(MODELS)
    for cohort, sent in ((COHORT, [1, 2, 6]), (COHORT._replace(branches=jnp.array([2, 0, 1])), [6, 1, 2])):
        problem = federation("linear").problem
        payload = STRATEGIES[name].build(default_hyper(name), problem).dispatch(state, cohort, jax.random.key(0))
        assert payload["model"]["params"]["a"].tolist() == sent


@pytest.mark.parametrize("name", ["fedmr", "indep", "fedcross", "gitfl", "fedmut"])
def test_a_client_trains_the_received_model_on_its_data_and_uploads_the_result(federation, monkeypatch, name):
    monkeypatch.setattr(parts.local, "train", lambda model, setting, *received: (received, "metrics"))
    strategy = STRATEGIES[name].build(default_hyper(name), federation("linear").problem)
    upload = strategy.client_update({"model": "received"}, "memory", "data", 0, "key")
    assert upload == ({"model": ("received", "data", "key")}, "memory", "metrics")


@pytest.mark.parametrize("name", ["fedmr", "indep", "fedcross"])
def test_the_setting_start_chooses_the_first_models(federation, monkeypatch, name):
    for start in ("copies", "independent"):
        monkeypatch.setitem(parts.STARTS, start, lambda problem, key, start=start: {"params": (start, key)})
        hyper = dataclasses.replace(default_hyper(name), start=start)
        models = STRATEGIES[name].build(hyper, federation("linear").problem).init("key").models
        assert models == {"params": (start, "key")}


def test_models_start_as_copies_and_on_request_as_independent_initialisations(federation):
    """As many as there are clients in a round, or clients in flight."""
    problem = federation("linear").problem
    starts = lambda problem, key: (parts.copies_of_one(problem, key), parts.independent_starts(problem, key))
    for shape in jax.tree.leaves(jax.eval_shape(lambda key: starts(problem, key), jax.random.key(0))):
        assert shape.shape[0] == 3
    in_flight = dataclasses.replace(problem, in_flight=5)
    both = jax.jit(lambda key: starts(in_flight, key))(jax.random.key(0))
    copies, different = (np.asarray(models["params"]["classifier"]["dense"]["kernel"]) for models in both)
    assert len(copies) == len(different) == 5
    assert len(np.unique(copies, axis=0)) == 1 and len(np.unique(different, axis=0)) == 5


@pytest.mark.parametrize("name", ["fedmr", "indep", "fedcross", "gitfl"])
def test_the_models_start_from_the_key_of_the_initialisation(federation, monkeypatch, name):
    row, keys = STRATEGIES[name], []
    start = lambda problem, key: keys.append(key) or MODELS
    monkeypatch.setitem(parts.STARTS, "copies", start)
    for module in (parts, gitfl):
        monkeypatch.setattr(module, "copies_of_one", start)
    strategy = row.build(default_hyper(name), federation("linear").problem)
    key = jax.random.key(3)
    strategy.init(key)
    assert len(keys) == 1 and keys[0] is key


def test_only_a_server_with_several_models_has_some_to_test_one_by_one(engine):
    """``eval_each``; FedAvg has a view of its model, too, for a server optimizer."""
    kept = {name: engine(name).keeps_models for name in ("fedavg", "fedmr", "fedcross", "indep", "hypcluster")}
    assert kept == {"fedavg": False, "fedmr": True, "fedcross": True, "indep": True, "hypcluster": True}
