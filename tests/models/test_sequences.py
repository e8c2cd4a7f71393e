"""Networks for sequences of numbers: the unit beside PyTorch's, lengths, and what is refused."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fedjax_mr import models, tasks
from fedjax_mr.errors import UserError
from fedjax_mr.models import sequences
from fedjax_mr.testing.federations import numbers_like

CELLS = ["gru", "lstm"]


def network(cell, steps=5, **options):
    return models.Model(sequences.RecurrentNetwork(4, cell=cell, hidden=3, **options), (steps, 2))


def series(count, steps=5):
    return np.random.default_rng(0).standard_normal((count, steps, 2)).astype(np.float32)


@pytest.mark.parametrize("cell", CELLS)
def test_the_cell_is_that_of_pytorch(cell):
    torch = pytest.importorskip("torch")
    theirs = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[cell](2, 3, batch_first=True)
    params = {
        "kernel": theirs.weight_ih_l0.detach().numpy().T, "recurrent_kernel": theirs.weight_hh_l0.detach().numpy().T,
        "bias": theirs.bias_ih_l0.detach().numpy(), "recurrent_bias": theirs.bias_hh_l0.detach().numpy(),
    }  # fmt: skip
    found = jax.jit(sequences.CELLS[cell](3).apply)({"params": params}, series(4))
    assert_allclose(found, theirs(torch.tensor(series(4)))[0].detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("cell", "depth"),
    [("gru", 1), ("lstm", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("gru", 2), ("lstm", 1)))],
)
def test_padding_changes_nothing(cell, depth):
    """Neither the output nor the gradient."""
    variables = numbers_like(network(cell, depth=depth).shapes())
    padded = np.pad(series(3), ((0, 0), (0, 4), (0, 0)))
    results = []
    for steps, x in ((5, series(3)), (9, padded)):
        model = network(cell, steps, depth=depth)
        results.append(
            jax.jit(jax.value_and_grad(lambda v, x, model=model: (model.apply(v, x) ** 2).sum()))(variables, x)
        )
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-6), *results)
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(results[0][1]))


def test_the_length_ends_with_the_last_value_that_is_not_zero():
    x = np.zeros((4, 5, 2), np.float32)
    x[0, 2, 1], x[1, 4, 0], x[2, 0] = -1, 1, 1  # the fourth sequence is empty
    valid = jax.jit(sequences.Lengths().apply)({}, x).valid
    assert_array_equal(valid.sum(1), [3, 5, 1, 0])
    assert_array_equal(valid[0], [1, 1, 1, 0, 0])


def test_zeros_within_a_sequence_are_measurements():
    model = network("gru")
    variables, apply = numbers_like(model.shapes()), jax.jit(model.apply)
    x = series(3)
    x[1] = x[0]
    x[0, 2] = 0  # a zero step in the middle is read; it is not skipped
    x[1, 2:4], x[1, 4] = x[0, 3:], 0
    x[2] = 0
    zero_step, without, empty = np.asarray(apply(variables, x))
    assert np.abs(zero_step - without).max() > 1e-3
    assert_allclose(empty, variables["params"]["classifier"]["dense"]["bias"], rtol=1e-6)


@pytest.mark.parametrize("init", ["torch", "flax"])
def test_initialisation(init):
    model = models.build("gru", input_shape=(50, 6), num_classes=7, init=init)
    assert [layer.name for layer in model.layers()] == ["gru1/cell", "classifier/dense"]
    params = jax.jit(model.init)(jax.random.key(0))["params"]["gru1"]["cell"]
    if init == "torch":
        assert all(0.9 < np.abs(leaf).max() * 64**0.5 <= 1 for leaf in params.values())
    else:
        assert_allclose(params["recurrent_kernel"] @ params["recurrent_kernel"].T, np.eye(64), atol=1e-5)
        assert not params["bias"].any()


@pytest.mark.parametrize("name", ["gru", "lstm_numbers"])
def test_a_task_gives_the_width(name):
    task = tasks.Regression(width=2)
    model = models.build(name, input_shape=(50, 6), task=task)
    assert model.output_shape() == (2,) and model.task == task


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((6,), np.float32, r"gru needs sequences of numbers \[T, F\], but the samples are 6 of float32"),
        ((8, 8, 1), np.float32, r"gru needs sequences of numbers \[T, F\], but the samples are 8x8x1"),
        ((50,), np.int32, "gru needs sequences, but the samples are token sequences"),
    ],
)
def test_other_samples_are_refused(shape, dtype, message):
    with pytest.raises(UserError, match=message):
        models.build("gru", input_shape=shape, num_classes=3, input_dtype=dtype)
