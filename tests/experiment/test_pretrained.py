"""``pretrained``: networks that start from the weights in a folder."""

import functools

import jax
import numpy as np
import pytest

from fedjax_mr import data, models
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import build_model
from fedjax_mr.experiment.config import Config
from fedjax_mr.models.transformer import CausalTransformer

SIZES = {"vocabulary": data.tokens.WORDS, "width": 4, "depth": 1, "heads": 2, "hidden": 4, "positions": 8}


@functools.cache
def texts():
    return data.from_texts([f"word {i}" for i in range(20)], np.arange(20) % 2, length=4)


def variables_of(folder):
    """What the folder holds: everything but the classifier, all ones."""
    model = models.Model(CausalTransformer(2, **SIZES), (4,), np.int32)
    known = {name: tree for name, tree in model.shapes()["params"].items() if name != "classifier"}
    width = {"narrow": 3}.get(folder)
    shape = lambda leaf: leaf.shape if width is None else (*leaf.shape[:-1], width)
    return {"params": jax.tree.map(lambda leaf: np.ones(shape(leaf), np.float32), known)}


@pytest.fixture(autouse=True)
def _row(monkeypatch):
    row = models.ModelRow(functools.partial(CausalTransformer, **SIZES), pretrained=variables_of)
    monkeypatch.setitem(models.MODELS, "started", row)


def test_the_network_starts_from_the_folder():
    config = Config(model="started", pretrained="folder", adapter="lora", lora_rank=1, lora_head=True)
    full, adapted = (build_model(each, texts()) for each in (Config(model="started", pretrained="folder"), config))
    start, adapters = (jax.jit(each.init)(jax.random.key(0))["params"] for each in (full, adapted))
    body = {name: tree for name, tree in start.items() if name != "classifier"}
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(body))
    assert not (start["classifier"]["dense"]["kernel"] == 1).any()
    assert (adapted.frozen["params"]["embedding"]["word"]["embedding"] == 1).all()
    np.testing.assert_array_equal(adapters["classifier"]["dense"]["kernel"], start["classifier"]["dense"]["kernel"])
    assert set(adapters["layer1"]["attention"]["query"]) == {"lora_a", "lora_b"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "transformer_tiny"}, "transformer_tiny has no pretrained weights, only minilm, started"),
        ({"model": "started,transformer_tiny"}, "pretrained=folder needs a single network"),
        ({"pretrained": "narrow"}, "narrow has embedding/position of shape (8, 3), but started needs (8, 4) here"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(UserError) as caught:
        build_model(Config(**({"model": "started", "pretrained": "folder"} | changes)), texts())
    assert message in str(caught.value)


def test_variables_and_pretrained_exclude_each_other():
    with pytest.raises(UserError, match="exclude each other"):
        build_model(Config(model="started", pretrained="folder"), texts(), variables={"params": {}})
