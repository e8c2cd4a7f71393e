"""Landscapes: filter normalisation, losses and the largest eigenvalue against direct computations."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import landscape
from fedjax_mr.analysis import runs
from fedjax_mr.analysis.command import script
from fedjax_mr.client.samples import Samples
from fedjax_mr.config import config as configuration
from fedjax_mr.experiment.folder import read_rows


def around(federation, *, count=10, batch=4):
    """Return the landscape around a linear classifier, its parameters and its samples."""
    constants = federation("linear")
    model = constants.problem.model
    variables = jax.jit(model.init)(jax.random.key(3))
    everything = constants.federation.samples
    part = everything._replace(x=everything.x[:count], y=everything.y[:count])
    return landscape.Around(model, variables, part, batch=batch), variables["params"], part


@jax.jit
def direct(params, part):
    """Return the mean cross-entropy of a linear classifier, written down once more."""
    dense = params["classifier"]["dense"]
    logits = jnp.asarray(part.x.reshape(len(part.x), -1)) @ dense["kernel"] + dense["bias"][None, :]
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(part.y)).mean()


def test_every_filter_of_a_direction_has_the_norm_of_the_models_own(federation):
    params = jax.device_get(jax.jit(federation("thin").problem.model.init)(jax.random.key(0))["params"])
    filter_normalised = jax.jit(landscape.filter_normalised)
    way = filter_normalised(jax.random.key(1), params)
    for leaf, moved in zip(jax.tree.leaves(params), jax.tree.leaves(way), strict=True):
        if leaf.ndim < 2:
            assert not np.any(moved)
            continue
        filters, ways = (np.asarray(tensor).reshape(-1, tensor.shape[-1]) for tensor in (leaf, moved))
        np.testing.assert_allclose(np.linalg.norm(ways, axis=0), np.linalg.norm(filters, axis=0), rtol=1e-5)
        assert not np.allclose(ways, filters)
    double = filter_normalised(jax.random.key(1), jax.tree.map(lambda leaf: 2 * leaf, params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * np.asarray(b), rtol=1e-5), double, way)


@pytest.mark.parametrize("batch", [4, 100])
def test_losses_are_those_of_the_moved_model(federation, batch):
    """Ten samples in batches of four: the last batch is filled up, which must not count."""
    there, params, part = around(federation, batch=batch)
    np.testing.assert_allclose(there.loss(), direct(params, part), rtol=1e-5)
    ways = [jax.device_get(there.direction(jax.random.key(number))) for number in (1, 2)]
    start = jax.device_get(params)
    points = np.array([[0, 0], [0.5, 0], [0, -2], [1, 1], [0.25, 0.75]], np.float32)
    seen = []
    losses = there.losses(ways, points, report=seen.append)
    assert sum(seen) == len(points)
    for (a, b), found in zip(points, losses, strict=True):
        moved = jax.tree.map(lambda leaf, first, second, a=a, b=b: leaf + a * first + b * second, start, *ways)
        np.testing.assert_allclose(found, direct(moved, part), rtol=1e-5)


def test_the_largest_eigenvalue_is_that_of_the_dense_hessian(federation):
    there, params, part = around(federation)
    leaves, structure = jax.tree.flatten(params)
    flat, cuts = jnp.concatenate([leaf.ravel() for leaf in leaves]), np.cumsum([leaf.size for leaf in leaves])[:-1]

    def loss(vector):
        parts = [piece.reshape(leaf.shape) for piece, leaf in zip(jnp.split(vector, cuts), leaves, strict=True)]
        return direct(jax.tree.unflatten(structure, parts), part)

    values = np.linalg.eigvalsh(np.asarray(jax.jit(jax.hessian(loss))(flat)))
    found, residual = there.largest_eigenvalue(jax.random.key(0), tolerance=1e-5)
    np.testing.assert_allclose(found, values[np.argmax(np.abs(values))], rtol=1e-2)
    assert residual < 0.1 * found


def test_sharpness_sees_a_sharper_minimum(federation):
    """A convex loss rises in every pair of opposite directions, and more so farther away."""
    there, _, _ = around(federation)
    near, far = (there.sharpness(jax.random.key(0), radius=radius, count=4) for radius in (0.5, 1.0))
    assert 0 < near.rise < far.rise and near.rise_error > 0
    assert near.eigenvalue == far.eigenvalue


@pytest.mark.parametrize(
    "dimensions, names", [(1, ["fedmr"]), pytest.param(2, ["fedmr", "fedavg"], marks=pytest.mark.slow)]
)
def test_the_command(finished, tmp_path, capsys, dimensions, names):
    folders = [finished(name) for name in names]
    options = [f"--dimensions={dimensions}", "--points=3", "--samples=0", "--sharpness_directions=2"]
    assert script(landscape, [*map(str, folders), *options, f"--out={tmp_path}"]) == 0
    out = capsys.readouterr().out
    kept = np.load(tmp_path / f"landscape{dimensions}d.npz")
    assert list(kept["names"]) == names and kept["losses"].shape == (len(names), *[3] * dimensions)
    np.testing.assert_array_equal(kept["steps"], [-1, 0, 1])
    sharp = json.loads((tmp_path / landscape.SHARPNESS).read_text())
    assert (sharp["of"], sharp["samples"], sharp["sharpness_directions"], sharp["seed"]) == ("test", 0, 2, 0)
    for surface, folder, line in zip(kept["losses"], folders, out.splitlines()[1:], strict=False):
        tested = read_rows(folder)[-1]["loss"]  # the landscape's centre is the model that the run tested
        np.testing.assert_allclose(surface[(1,) * dimensions], tested, rtol=1e-4)
        assert line.split()[:3] == [folder.name, "4", f"{tested:.4f}"]
        assert surface.max() > surface[(1,) * dimensions]
        numbers = sharp["runs"][configuration.portable_name(runs.read([str(folder)])[0].config)]
        assert line.split()[3] == f"{numbers['rise']:.4g}" and numbers["round"] == 4
    assert (tmp_path / f"landscape{dimensions}d.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "option",
    ["--points=4", "--points=1", "--radius=0", "--radius=nan", "--samples=-1", "--sharpness_directions=1",
     "--sharpness_radius=inf", "--dimensions=3", "--of=tset", "--seed=-1", "--round=3000"],
)  # fmt: skip
def test_bad_options_are_one_line(finished, capsys, option):
    assert script(landscape, [str(finished("fedmr")), option]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("fedjax-mr: ") and shown.count("\n") == 1
    assert option.strip("-").partition("=")[0] in shown


def test_a_part_of_the_samples_is_drawn_by_seed(finished):
    (run,) = runs.read([str(finished("fedmr"))])
    trained = runs.restore(run)
    few = landscape.draw(trained, of="test", count=20, seed=1)
    assert isinstance(few, Samples) and len(few.y) == 20
    np.testing.assert_array_equal(few.x, landscape.draw(trained, of="test", count=20, seed=1).x)
    assert not np.array_equal(few.x, landscape.draw(trained, of="test", count=20, seed=2).x)
    dataset = trained.federated.dataset
    assert len(landscape.draw(trained, of="test", count=10**9, seed=1).y) == len(dataset.test_y)
    assert len(landscape.draw(trained, of="train", count=0, seed=1).y) == len(dataset.y)
