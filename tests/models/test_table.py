"""The dense network for rows of a table: vectors of categories, and what is refused."""

import jax
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import fedjax_mr as fmr
from fedjax_mr import models, tasks
from fedjax_mr.engine.simulator import network_of
from fedjax_mr.errors import UserError
from fedjax_mr.models import precision, table
from fedjax_mr.testing.federations import numbers_like

CATEGORIES = (0, 3, 0, 40)
X = np.array([[0.5, 2, -1.5, 39], [0.5, -1, -1.5, 39], [0.5, 0, -1.5, 0]], np.float32)


@pytest.fixture(scope="module")
def model():
    return models.build("mlp_table", input_shape=(4,), num_classes=2, categories=CATEGORIES)


def test_a_column_of_categories_has_a_vector_each():
    columns = table.Columns(CATEGORIES)
    variables = numbers_like(jax.eval_shape(columns.init, jax.random.key(0), X))
    three, forty = (variables["params"][f"column{number}"]["embedding"] for number in (1, 3))
    assert (three.shape, forty.shape) == ((3, 2), (40, 16))
    joined = jax.jit(columns.apply)(variables, X)
    unknown = np.zeros(2, np.float32)
    vectors = [np.concatenate([a, b]) for a, b in ((three[2], forty[39]), (unknown, forty[39]), (three[0], forty[0]))]
    assert_array_equal(joined[:, :2], X[:, [0, 2]])
    assert_allclose(joined[:, 2:], vectors, rtol=1e-6)


def test_only_categories_that_occur_learn_and_unknown_ones_never(model):
    variables = numbers_like(model.shapes())
    gradient = jax.jit(jax.grad(lambda v: (model.apply(v, X) ** 2).sum()))(variables)["params"]["columns"]
    assert_array_equal(np.any(gradient["column1"]["embedding"], axis=1), [True, False, True])
    assert_array_equal(np.flatnonzero(np.any(gradient["column3"]["embedding"], axis=1)), [0, 39])


def test_layers_and_parameters(model):
    names = ["columns/column1", "columns/column3", "hidden1/dense", "hidden2/dense", "classifier/dense"]
    assert [layer.name for layer in model.layers()] == names
    assert model.num_parameters() == 3 * 2 + 40 * 16 + (2 + 2 + 16 + 1) * 64 + 65 * 64 + 65 * 2
    assert [table.width_of(count) for count in (1, 2, 3, 31, 32, 1000)] == [1, 1, 2, 16, 16, 16]
    plain = models.build("mlp_table", input_shape=(4,), num_classes=2)  # all columns are numbers
    assert [layer.name for layer in plain.layers()] == names[2:]


def test_the_network_of_a_dataset_knows_its_categories():
    y = np.array([0, 1, 0], np.int32)
    given = network_of("mlp_table", fmr.Dataset("table", X, y, X, y, 2, categories=CATEGORIES))
    assert given.module.categories == CATEGORIES
    assert network_of("mlp_table", fmr.Dataset("table", X, y, X, y, 2)).module.categories == ()


def test_a_constructor_of_a_user_gets_the_categories(monkeypatch):
    seen = []

    def build(num_classes, rngs, categories):
        seen.append(categories)
        return nnx.Linear(4, num_classes, rngs=rngs)

    monkeypatch.setitem(models.MODELS, "mine", models.ModelRow(build))
    models.build("mine", input_shape=(4,), task=tasks.Regression(width=2), categories=list(CATEGORIES))
    assert set(seen) == {CATEGORIES}


def test_what_does_not_fit_is_one_line(model):
    build = lambda shape, **options: models.build("mlp_table", input_shape=shape, num_classes=2, **options)
    for call, message in (
        (lambda: build((3,), categories=CATEGORIES), "categories has 4 entries, but a row has 3 columns"),
        (lambda: build((2, 3)), r"mlp_table needs rows of a table [F], but the samples are 2x3 of float32; mlp takes"),
        (
            lambda: precision.with_precision(build((1,), categories=(258,)), "bfloat16"),
            "bfloat16 rounds codes above 256, but a column has 258 categories",
        ),
    ):
        with pytest.raises(UserError) as error:
            call()
        assert message in str(error.value)
    assert precision.with_precision(build((1,), categories=(257,)), "bfloat16").precision == "bfloat16"
    codes = np.arange(257, dtype=np.float32)
    assert_array_equal(precision.cast(codes.astype(jax.numpy.bfloat16), np.float32), codes)
