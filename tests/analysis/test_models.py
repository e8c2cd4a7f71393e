"""Commands that look into the K models: spread by layer, origins of the units, the authors' similarity."""

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
import similarity
from fedjax_mr.analysis import runs, spread
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.analysis.command import script
from fedjax_mr.strategies import fedmr
from record import origins
from record.command import main as record


def stacked(federation, network="thin"):
    """Return K random stacked models and their layers."""
    problem = federation(network).problem
    return jax.jit(jax.vmap(problem.model.init))(jax.random.split(jax.random.key(0), 3)), problem.layers


recombine = jax.jit(fedmr.recombine, static_argnums=1)


def test_spread_of_each_layer(federation):
    models, layers = stacked(federation)
    found = spread.by_layer(models, layers)
    assert list(found) == ["body/conv", "body/norm", "classifier/dense"]
    own = models["params"]["classifier"]["dense"]
    flat = np.concatenate([np.asarray(own[name]).reshape(3, -1) for name in ("kernel", "bias")], axis=1)
    expected = np.sqrt(np.mean([np.sum((row - flat.mean(0)) ** 2) for row in flat])) / np.linalg.norm(flat.mean(0))
    assert found["classifier/dense"] == pytest.approx(expected, rel=1e-5)
    assert found["body/norm"] == 0  # all models start with scale 1 and bias 0
    units = fedmr.recombination_units(fedmr.Hyper(), layers)
    again = spread.by_layer(recombine(models, units, jax.random.key(1)), layers)
    assert again["classifier/dense"] == pytest.approx(expected, rel=0.2)  # of the same tensors, bias and kernel apart
    whole = fedmr.recombination_units(fedmr.Hyper(unit="layer"), layers)
    assert spread.by_layer(recombine(models, whole, jax.random.key(1)), layers) == pytest.approx(found)


def test_authors_similarity_counts_the_last_run_again():
    rng = np.random.default_rng(0)
    layers = (fmr.models.base.Layer("all", tuple(range(12)), tuple("abcdefghijkl")),)

    def expected(tensors, parts):
        pairs = [(a, b) for a in range(3) for b in range(a)]
        total = 0.0
        for part in parts:
            flat = np.concatenate([tensors[i] for i in part], axis=1)
            total += sum(flat[a] @ flat[b] / np.linalg.norm(flat[a]) / np.linalg.norm(flat[b]) for a, b in pairs)
        return total / (len(pairs) * len(parts))

    for count, parts in ((12, [range(5), range(5, 10), range(10, 12)]), (10, [range(5), range(5, 10), range(5, 10)])):
        tensors = [rng.normal(size=(3, i + 1)) for i in range(count)]
        shorter = (layers[0].__class__("all", tuple(range(count)), layers[0].names[:count]),)
        assert similarity.authors_similarity(tensors, shorter) == pytest.approx(expected(tensors, parts))


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """A run of FedMR that starts from different models and whose learning rate changes no weight."""
    folder = tmp_path_factory.mktemp("runs") / "still"
    config = fmr.Config(
        run_dir=str(folder), clients=6, cohort=3, rounds=6, lr=1e-30, model="logistic", local_epochs=1, devices=1,
        progress=False, checkpoint_every=1, keep_checkpoints=10, hyper=fedmr.Hyper(start="independent"),
    )  # fmt: skip
    fmr.run(config)
    return folder


def test_replayed_origins_are_those_of_the_run(still):
    """Models that never change are permuted only: each unit is found again where the replay says."""
    (run,) = runs.read([str(still)])
    assert run.checkpoints() == list(range(7))
    found = origins.replay(run, last=6, back=4)
    after = jax.tree.leaves(runs.restore(run).models)
    units = [unit for (unit,) in fedmr.recombination_units(fedmr.Hyper(), runs.restore(run).model.layers())]
    for steps, rows in enumerate(found):
        before = jax.tree.leaves(runs.restore(run, round=6 - steps).models)
        for unit, origin in zip(units, rows, strict=True):
            np.testing.assert_array_equal(after[unit], np.asarray(before[unit])[origin])
    assert len(found) == 5 and len(origins.replay(run, last=2, back=100)) == 3


def test_shares():
    together = np.tile(np.arange(4), (6, 1))
    assert origins.shares(together) == (1.0, 1.0)
    rows = np.array([[0, 1], [1, 0], [0, 1], [0, 1]])  # each model: three units of one origin, one of the other
    assert origins.shares(rows) == (0.5, 0.75)


def test_the_commands(still, tmp_path, capsys):
    assert main(["spread", str(still), f"--out={tmp_path}"]) == 0
    assert "still, round 6" in capsys.readouterr().out and (tmp_path / "spread.png").exists()
    assert record(["origins", str(still), "--back=2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[1:]] == [["still", "0"], ["still", "1"], ["still", "2"]]
    assert lines[1][2:] == ["1.0000", "0.3333", "1.0000", "2"]
    assert script(similarity, [str(still), "--definition=authors", f"--out={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "6"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spread"], "keeps one model"),
        (["spread", "--round=77"], "no checkpoint of round 77"),
    ],
)
def test_bad_input(finished, capsys, arguments, message):
    assert main([arguments[0], str(finished("fedavg")), *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["origins"], "only fedmr's recombination on the server"),
        (["origins", "--back=0"], "--back=0 must be at least 1"),
    ],
)
def test_bad_input_of_the_record(finished, capsys, arguments, message):
    assert record([arguments[0], str(finished("fedavg")), *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


def test_the_authors_similarity_needs_k_models(finished, capsys):
    assert script(similarity, [str(finished("fedavg")), "--definition=authors"]) == 2
    assert "keeps one model" in capsys.readouterr().err
