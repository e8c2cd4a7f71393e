"""Pictures and papers' tables show names that a reader knows."""

import dataclasses

import pytest

from fedjax_mr import plots
from fedjax_mr.config import titles
from fedjax_mr.config.config import Config
from fedjax_mr.models import MODELS
from fedjax_mr.plots.looks import METHODS
from fedjax_mr.strategies import STRATEGIES, Row, fedmr


def test_every_method_has_a_name_of_its_own_and_a_look_of_its_own(monkeypatch):
    names = [row.title for row in STRATEGIES.values()]
    assert all(names) and len(set(names)) == len(names)
    assert len(set(METHODS)) == len(METHODS) <= 73
    looks = plots.looks(names, dict(zip(names, STRATEGIES, strict=True)))
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(names)
    monkeypatch.setitem(STRATEGIES, "mine", Row(fedmr.build, fedmr.Hyper, "nobody"))
    assert titles.method(titles.facts(Config(strategy="mine"))) == "mine"


def test_every_network_has_a_name():
    assert set(titles.NETWORKS) <= set(MODELS)
    assert len(set(titles.NETWORKS.values())) == len(titles.NETWORKS)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"alpha": 1.0}, "FedMR: digits, Dirichlet(1.0), CNN, seed 0"),  # as in tables
        ({}, "FedMR: digits, Dirichlet(0.5), CNN, seed 0"),
        ({"dataset": "cifar10", "model": "lenet5", "partition": "iid"}, "FedMR: CIFAR-10, IID, LeNet-5, seed 0"),
        ({"strategy": "fedavg", "server_optimizer": "adam"}, "FedAdam: digits, Dirichlet(0.5), CNN, seed 0"),
        (
            {"dataset": "my/faces.npz", "model": "pfedhr_m1,mlp", "partition": "classes", "server_optimizer": "yogi"},
            "FedMR + server yogi: faces, 2 classes per client, M1 + MLP, seed 0",
        ),
        (
            {"dataset": "emnist/letters", "seed": 3, "alpha": 10.0},
            "FedMR: EMNIST letters, Dirichlet(10.0), CNN, seed 3",
        ),
    ],
)
def test_a_run(changes, name):
    assert titles.run(Config(**changes)) == name


def test_runs_are_told_apart():
    one = Config(hyper=fedmr.Hyper(unit="layer", server_recombines=False))
    others = [dataclasses.replace(one, seed=1), Config(strategy="fedavg", lr=0.1), Config(strategy="fedavg", lr=0.1)]
    assert titles.runs([one, *others]) == [
        "FedMR, learning rate 0.05, seed 0",
        "FedMR, learning rate 0.05, seed 1",
        "FedAvg, learning rate 0.1, seed 0",
        "FedAvg, learning rate 0.1, seed 0 (2)",
    ]
    settings = titles.facts(dataclasses.replace(one, augment="crop_flip", public_labels=False, clip_norm=None))
    zero = titles.facts(Config())
    assert titles.words(["validation_share", "fedmr_stage1_rounds"], zero) == [
        "validation share = 0.0",
        "stage1 rounds = 0",
    ]
    assert titles.words(["validation_share", "fedmr_stage1_rounds"], zero, brief=True) == []
    flags = ["fedmr_unit", "augment", "public_labels", "clip_norm", "cohort", "fedavg_mu", "fedmr_server_recombines"]
    assert titles.words(flags, settings) == [
        "unit = layer", "augment = crop flip", "no public labels", "clip norm = none", "K = 5", "no server recombines",
    ]  # fmt: skip


def test_looks():
    blue, orange = plots.looks(["a", "b"], {"a": "fedmr", "b": "fedavg"}).values()
    assert (blue, orange) == (plots.Look("#0072B2", "-", "o"), plots.Look("#D55E00", "-", "s"))
    several = plots.looks(["a", "b", "c", "d"], {"a": "fedavg", "b": "fedmr", "c": "fedmr"})
    assert several["a"] == orange and several["b"] == blue
    assert several["c"] == plots.Look("#80B8D8", "--", "o") and several["d"] == ("#7F7F7F", "-", "")
    alone = plots.looks("abcdef", dict.fromkeys("abcdef", "fedmr"))
    assert alone["a"] == blue and len({look.colour for look in alone.values()}) == len(set(alone.values())) == 6
    parts = [[int(look.colour[place : place + 2], 16) for place in (1, 3, 5)] for look in alone.values()]
    assert sorted(parts) == parts and all(part[0] < part[1] < part[2] for part in parts)  # lighter and lighter blues
    outside = plots.looks(map(str, range(20)), {str(number): f"mine {number}" for number in range(20)})
    assert len(set(outside.values())) == 20 and not set(outside.values()) & {blue, orange}
