"""Partitions and links of a user: a file with rows, whose settings are flags, recorded, resumed and compared."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_mr as fmr
from fedjax_mr import main
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.method import strategy_of

MINE = """
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_mr as fmr


@dataclasses.dataclass(frozen=True)
class Sorted:
    mixed: float = fmr.field(0.0, "share of the samples that are dealt at random", low=0, high=1)


def by_label(labels, num_clients, *, rng, mixed):
    order = np.argsort(labels, kind="stable")
    moved = rng.choice(len(order), round(mixed * len(order)), replace=False)
    order[moved] = rng.permutation(order[moved])
    return np.array_split(order, num_clients)


fmr.PARTITIONS["by_label"] = fmr.Partitioner(by_label, Sorted)


@dataclasses.dataclass(frozen=True)
class Shrink:
    factor: float = fmr.field(0.5, "factor of the change of an upload", low=0, high=1)


def shrink(settings, problem):
    def client(values, reference, memory, context):
        shorter = lambda value, start: start + settings.factor * (value - start)
        return fmr.Sent(jax.tree.map(shorter, values, reference))

    return fmr.Link("shrink", client=client)


fmr.LINKS["shrink"] = fmr.LinkRow(shrink, Shrink)


@dataclasses.dataclass(frozen=True)
class Few:
    every: int = fmr.field(2, "the digits of which one is kept, of so many", low=1)


def few(request):
    digits = fmr.data.load("digits")
    every = request.settings.every
    return dataclasses.replace(digits, name=request.name, x=digits.x[::every], y=digits.y[::every])


fmr.SOURCES["few"] = fmr.Source(few, Few)
fmr.SOURCES["all_of_them"] = lambda request: fmr.data.load("digits")


@dataclasses.dataclass(frozen=True)
class Slow:
    seconds: float = fmr.field(2.0, "seconds of a step of the slow half", low=0)


def half_slow(num_clients, *, batch_size, rng, seconds):
    times = np.where(rng.permutation(num_clients) % 2, seconds, 1).astype(np.float32)
    return fmr.Fleet(*np.zeros((5, num_clients), np.float32), *np.full((2, num_clients), np.inf))._replace(
        seconds_per_step=times
    )


fmr.FLEETS["half_slow"] = fmr.FleetRow(half_slow, Slow)


@dataclasses.dataclass(frozen=True)
class Factor:
    of_late: float = fmr.field(0.5, "weight of every stale upload", low=0)


fmr.STALENESS["flat"] = fmr.StalenessRow(
    lambda settings: lambda tau: jnp.where(tau > 0, settings.of_late, 1.0), Factor
)
fmr.SERVER_OPTIMIZERS["steps"] = lambda settings, several: optax.sgd(settings.server_lr)
"""
SMALL = [
    *("--strategy=fedavg", "--model=logistic", "--clients=5", "--cohort=5", "--rounds=1", "--local_epochs=1"),
    *("--devices=1", "--noprogress", "--eval_every=1"),
]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The flag that imports the rows; afterwards they are gone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setattr(imports, "_IMPORTED", {})
    before = {registry.kind: dict(registry) for registry in imports.REGISTRIES}

    def forget():
        for registry in imports.REGISTRIES:
            registry.clear()
            registry.update(before[registry.kind])
        imports._IMPORTED.clear()
        for name in [name for name, module in sys.modules.items() if _file(module) == str(tmp_path / "mine.py")]:
            del sys.modules[name]

    yield Mine("--import=mine.py", forget)
    forget()


class Mine(str):
    """The flag, and a function that makes this process forget the file."""

    def __new__(cls, flag, forget):
        self = super().__new__(cls, flag)
        self.forget = forget
        return self


def _file(module):
    return getattr(module, "__file__", None)


def change(*flags):
    """The change of the deployed model's numbers by one round."""
    return numbers(configuration.parse([*SMALL, *flags])) - start()


@functools.cache
def start():
    """The numbers of the model that all runs here start from: a round with steps of almost no length leaves it."""
    return numbers(configuration.parse([*SMALL, "--lr=1e-30"]))


def numbers(config):
    leaves = jax.tree.leaves(fmr.run(config, record=False).variables["params"])
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def test_the_settings_of_a_users_rows_are_flags(mine):
    config = configuration.parse([mine, "--partition=by_label", "--by_label_mixed=0.25", "--links=shrink"])
    assert [vars(each) for each in config.rows] == [{"mixed": 0.25}, {"factor": 0.5}]
    assert configuration.to_json(config)["by_label_mixed"] == 0.25
    assert [name for name, _, _ in configuration.links(config)] == ["shrink"]
    assert configuration.parse([*configuration.to_flags(config)]) == config


def test_a_users_source_has_settings(mine):
    config = configuration.parse([mine, *SMALL, "--dataset=few", "--few_every=3"])
    assert configuration.to_json(config)["few_every"] == 3
    assert len(federated_data(config).dataset.y) == 479
    assert len(fmr.data.load("few", every=4).y) == 360 and len(fmr.data.load("all_of_them").y) == 1437
    with pytest.raises(fmr.UserError, match=r"few has no setting evry=: it has every; did you mean 'every'\?"):
        fmr.data.load("few", evry=3)
    with pytest.raises(fmr.UserError, match="every=0 is out of range"):
        fmr.data.load("few", every=0)


@pytest.mark.slow
def test_a_users_fleet_and_weight_of_staleness_have_settings(mine):
    clocks = []
    for seconds in (5, 10):
        config = configuration.parse([mine, *SMALL, "--fleet=half_slow", f"--half_slow_seconds={seconds}"])
        clocks.append(fmr.run(config, record=False).rows[-1]["clock"])
    assert clocks[1] == 2 * clocks[0]
    late = [mine, "--fleet=half_slow", "--mode=async", "--cohort=1", "--in_flight=3", "--rounds=4"]
    ours = change(*late, "--staleness=constant")
    np.testing.assert_allclose(change(*late, "--staleness=flat", "--flat_of_late=1"), ours, atol=1e-6)
    assert np.abs(change(*late, "--staleness=flat", "--flat_of_late=0.1") - ours).max() > 1e-3


def test_a_users_rows_have_pages_of_help(mine, capsys):
    assert main.main(["--help=by_label", mine]) == 0 == main.main(["--help=shrink", mine])
    printed = capsys.readouterr().out
    assert "--by_label_mixed" in printed and "--shrink_factor" in printed


def test_a_users_link_changes_what_arrives(mine):
    plain, half, none = (
        change(mine),
        change(mine, "--links=shrink"),
        change(mine, "--links=shrink", "--shrink_factor=0"),
    )
    np.testing.assert_allclose(half, plain / 2, atol=1e-6)
    np.testing.assert_allclose(none, 0, atol=1e-7)


@pytest.mark.slow
def test_a_users_server_optimizer_moves_the_model(mine):
    plain, double = change(mine), change("--server_optimizer=steps", "--server_lr=2")
    np.testing.assert_allclose(double, 2 * plain, atol=1e-5)


def test_another_number_of_a_users_link_is_an_argument(mine):
    """Programs are the same; code of users is traced anew in each run all the same."""
    config = configuration.parse([*SMALL, mine, "--links=shrink"])
    one, other = (
        jax.tree.structure(
            strategy_of(dataclasses.replace(config, rows=(dataclasses.replace(config.rows[0], factor=f),)))
        )
        for f in (0.25, 0.75)
    )
    assert one == other


def test_a_users_partition_divides(mine):
    config = configuration.parse([mine, *SMALL, "--partition=by_label"])
    simulated = fmr.data.federate(fmr.data.load("digits"), num_clients=5, partition="by_label", mixed=0.0)
    classes = (simulated.label_counts() > 0).sum(axis=1)
    assert classes.max() <= 4
    with pytest.raises(fmr.UserError, match="partition 'by_label' has no setting alpha=: it has mixed"):
        fmr.data.federate(fmr.data.load("digits"), num_clients=5, partition="by_label", alpha=0.5)
    with pytest.raises(fmr.UserError, match=r"mixed=2 is out of range \(allowed: >= 0 and <= 1\)"):
        fmr.data.federate(fmr.data.load("digits"), num_clients=5, partition="by_label", mixed=2)
    assert config.partition == "by_label"


def test_a_run_with_users_rows_is_recorded_and_resumed(mine, capsys):
    flags = [*SMALL, mine, "--partition=by_label", "--by_label_mixed=0.5", "--links=shrink", "--run_dir=run"]
    assert main.main(flags) == 0
    recorded = json.loads(Path("run/config.json").read_text())
    assert recorded["by_label_mixed"] == 0.5 and recorded["shrink_factor"] == 0.5 and recorded["links"] == "shrink"
    assert main.main([*flags, "--resume", "--rounds=2"]) == 0
    assert main.main([*flags, "--resume", "--rounds=3", "--shrink_factor=0.4"]) == 2
    assert "shrink_factor: 0.4 (saved 0.5)" in capsys.readouterr().err


def test_a_recorded_run_is_read_without_the_users_file(mine):
    flags = [*SMALL, mine, "--partition=by_label", "--by_label_mixed=0.5", "--links=shrink", "--run_dir=run"]
    assert main.main(flags) == 0
    mine.forget()
    config = configuration.load("run")
    assert configuration.to_json(config)["by_label_mixed"] == 0.5 == configuration.to_json(config)["shrink_factor"]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--links=shrnk", "--links=shrnk is not one of your links"),
        ("--links=compression", "links of this package have flags of their own"),
    ],
)
def test_other_links_are_refused_in_one_line(flag, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main([*SMALL, flag]) == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1


def test_rows_of_the_wrong_kind_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text("import fedjax_mr as fmr\nfmr.LINKS['wrong'] = print\n")
    assert main.main([*SMALL, "--import=wrong.py"]) == 2
    assert "fmr.LINKS['wrong'] takes fmr.LinkRow(build, settings)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind", ["link", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("server optimizer", "staleness"))]
)
def test_rows_that_change_under_their_name_are_traced_anew(kind, monkeypatch):
    """A notebook's cell that runs again, or a variable that the row reads, must not meet an earlier program."""
    factor = 1.0

    def link(settings, problem):
        def client(values, reference, memory, context):
            return fmr.Sent(jax.tree.map(lambda value, start: start + factor * (value - start), values, reference))

        return fmr.Link("own", client=client)

    monkeypatch.setitem(fmr.LINKS, "own", fmr.LinkRow(link))
    monkeypatch.setitem(fmr.SERVER_OPTIMIZERS, "own", lambda settings, several: optax.sgd(factor))
    monkeypatch.setitem(
        fmr.STALENESS, "own", fmr.StalenessRow(lambda settings: lambda tau: jnp.full(tau.shape, factor))
    )
    flags = {
        "link": ["--links=own"],
        "server optimizer": ["--server_optimizer=own"],
        "staleness": ["--mode=async", "--staleness=own", "--cohort=1", "--in_flight=3", "--rounds=4"],
    }[kind]
    whole = change(*flags)
    factor = 0.5
    if kind == "staleness":  # which only changes late uploads
        assert np.abs(change(*flags) - whole).max() > 1e-3
    else:
        np.testing.assert_allclose(change(*flags), whole / 2, atol=1e-6)
