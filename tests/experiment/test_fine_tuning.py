"""Runs that train a part of a network or adapters, on variables that a user passes."""

import json

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.config.config import parse
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import fine_tuned
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.models import adapters
from fedjax_mr.testing.adapted import WHOLE, Attention
from fedjax_mr.testing.federations import federated, tree_close


def base(seed=0):
    return jax.device_get(WHOLE.init(jax.random.key(seed)))


def config(folder, **options):
    settings = {"clients": 4, "cohort": 2, "rounds": 2, "local_epochs": 1, "eval_every": 1, "devices": 1}
    settings |= {"partition": "iid", "progress": False, "run_dir": str(folder), "strategy": "fedavg"}
    return fmr.Config(**(settings | options))


def samples():
    data = federated().dataset
    return fmr.from_arrays(data.x, data.y, x_test=data.test_x, y_test=data.test_y)


@pytest.mark.slow
def test_adapters_of_a_run_are_exported_into_plain_flax(tmp_path):
    adapted = config(tmp_path / "run", strategy="fedmr", adapter="lora", lora_rank=2, lora_head=True)
    given = {"dataset": samples(), "model": Attention(3), "variables": base()}
    result = fmr.run(adapted, **given, record=False)
    trained = 2 * (4 * 2 + 2 * 4) + 16 * 3 + 3
    assert result.summary["parameters"] == trained
    assert result.rows[-1]["bytes_up"] == 2 * 2 * 4 * trained
    saved = fmr.load(tmp_path / "run", model=Attention(3), variables=base(), dataset=samples())
    with pytest.raises(UserError, match="has adapters, which plain Flax does not know: add --merged"):
        saved.export(tmp_path / "out")
    saved.export(tmp_path / "out", merged=True)
    import orbax.checkpoint

    variables = orbax.checkpoint.StandardCheckpointer().restore(tmp_path / "out" / "variables")
    x = federated().dataset.x[:5]
    tree_close(jax.nn.softmax(Attention(3).apply(variables, x)), saved.predict(x))
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["variables"]
    assert recorded.startswith("given:base:")
    with pytest.raises(UserError, match=f"variables= is base:.*, but the configuration is of {recorded[6:]}"):
        saved.resume(variables=base(1))
    with pytest.raises(UserError, match="these variables were passed as a Python object"):
        fmr.run(adapted.__class__(**{**vars(adapted), "variables": recorded, "resume": True}), dataset=samples())
    sizes = sum(np.size(leaf) for leaf in jax.tree.leaves(result.state))
    assert sizes == 2 * trained  # a checkpoint has K adapters and nothing of the base


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--lora_rank=4"], "lora_rank=4 needs adapter=lora"),
        (["--lora_dropout=0.1"], "lora_dropout=0.1 needs adapter=lora"),
        (["--lora_rslora"], "lora_rslora=True needs adapter=lora"),
        (["--adapter=lora", "--lora_dropout=1"], "lora_dropout=1.0 is out of range"),
        (["--variables=pretrained"], "variables=pretrained cannot be set"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, line):
    with pytest.raises(UserError, match=line):
        resolve(parse(flags))


def test_flags_set_the_dropout_and_the_scale_of_adapters():
    flags = ["--adapter=lora", "--lora_rank=4", "--lora_alpha=6", "--lora_dropout=0.1", "--lora_rslora"]
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), WHOLE.shapes())
    model = fine_tuned(parse(flags), WHOLE, variables=zeros)
    assert model.adapter == adapters.Lora(dropout=0.1, exponent=0.5)
    assert adapters.scale_of(model, ("attend", "query")) == 3.0  # 6 / sqrt(4)
    assert fine_tuned(parse(flags[:2]), WHOLE, variables=zeros).adapter == adapters.Lora()


def test_a_network_of_flags_trains_a_part():
    from fedjax_mr.experiment.build import build_model

    model = build_model(parse(["--model=mlp", "--trainable=classifier/*", "--seed=3"]), fmr.data.load("digits"))
    assert list(model.shapes()["params"]) == ["classifier"]
    other = build_model(parse(["--model=mlp", "--trainable=classifier/*", "--seed=4"]), fmr.data.load("digits"))
    kernel = lambda model: model.frozen["params"]["hidden1"]["dense"]["kernel"]
    assert np.any(kernel(model) != kernel(other))
    with pytest.raises(UserError, match="need a single network"):
        build_model(parse(["--model=cnn_digits,mlp", "--trainable=*", "--strategy=fedme"]), fmr.data.load("digits"))
