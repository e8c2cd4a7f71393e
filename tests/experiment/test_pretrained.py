"""``pretrained``: networks that start from the weights in a folder."""

import functools
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import data, models
from fedjax_mr.analysis import runs
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import pretrained as exported
from fedjax_mr.experiment.build import build_model
from fedjax_mr.experiment.checkpoint import read_arrays, save_arrays
from fedjax_mr.experiment.pretrained import tokenizer_of
from fedjax_mr.experiment.run import run
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
        (
            {"model": "transformer_tiny", "pretrained": "."},
            "pretrained=. was not written by python -m fedjax_mr.export; of the folders from elsewhere, only those for "
            "minilm, llama_tiny, smollm2_135m, started are known, not for transformer_tiny",
        ),
        ({"model": "transformer_tiny", "pretrained": "nowhere"}, "pretrained=nowhere: there is no such folder"),
        ({"model": "started,transformer_tiny"}, "pretrained=folder needs a single network"),
        ({"pretrained": "narrow"}, "narrow has embedding/position of shape (8, 3), but started needs (8, 4) here"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(UserError) as caught:
        build_model(Config(**({"model": "started", "pretrained": "folder"} | changes)), texts())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"num_classes": 1e999}', '{"num_classes": "x"}', "[" * 100_000], ids=len
)
def test_a_damaged_description_of_an_exported_network_is_one_line(content, tmp_path):
    (tmp_path / "network.json").write_text(content)
    with pytest.raises(UserError, match=r"network.json is damaged \(.*\): export the network again"):
        exported._exported(str(tmp_path), {})


def test_variables_and_pretrained_exclude_each_other():
    with pytest.raises(UserError, match="exclude each other"):
        build_model(Config(model="started", pretrained="folder"), texts(), variables={"params": {}})


@functools.cache
def images(classes):
    x, y = np.random.default_rng(0).uniform(size=(40, 4, 4, 1)).astype(np.float32), np.arange(40) % classes
    return data.from_arrays(x, y, num_classes=classes)


def _each_changed_byte_is_noticed(base):
    for path in filter(Path.is_file, (base / "variables").rglob("*")):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match=rf"{path} is damaged \(it was changed\): export the network again"):
            build_model(Config(model="mlp", pretrained=str(base)), images(4))
        path.write_bytes(content)


def _every_reader_refuses_another_base(run_folder, base, monkeypatch):
    """The weights of the frozen network change in place, as if they were downloaded again."""
    weights = read_arrays(base / "variables")
    (base / "manifest.json").unlink()
    shutil.rmtree(base / "variables")
    save_arrays(base / "variables", jax.tree.map(lambda leaf: leaf * 2, weights))
    saved = fmr.load(run_folder, dataset=images(3))
    rebuilt = runs.Rebuilt(saved.config, saved._template, saved.model, saved._rounds)
    monkeypatch.setattr(runs, "rebuild", lambda run, **options: rebuilt)  # the command has no user-supplied samples
    readers = {
        "predict": lambda: saved.predict(images(3).x[:2]),
        "export": lambda: saved.export(base / "new", merged=True),
        "landscape": lambda: runs.restore(runs.RunRecord(run_folder, "next", saved.config)),
        "resume": saved.resume,
    }
    for reader in readers.values():
        with pytest.raises(UserError, match="next was trained with other frozen variables of mlp: put back the weig"):
            reader()


def test_a_run_starts_from_an_exported_network(tmp_path, equal, monkeypatch):
    """With the same classes everything is equal, with other ones everything but the classifier."""
    short = {"model": "mlp", "rounds": 1, "clients": 4, "cohort": 2, "devices": 1, "progress": False}
    config = Config(**short, strategy="fedavg", run_dir=str(tmp_path / "base"))
    base = run(config, dataset=images(4), record=False).variables
    with pytest.raises(UserError, match=r"base is a run folder: run python -m fedjax_mr.export \S+ NEW and pass NEW"):
        build_model(Config(model="mlp", pretrained=str(tmp_path / "base")), images(4))
    folder = fmr.load(tmp_path / "base", dataset=images(4)).export(tmp_path / "exported")
    start = {
        classes: build_model(Config(model="mlp", pretrained=str(folder)), images(classes)).init(jax.random.key(1))
        for classes in (4, 3)
    }
    equal(start[4], base)
    of = lambda path, tokenizer=None: tokenizer_of(Config(pretrained=path, tokenizer=tokenizer))
    assert of(None) is None and of("elsewhere") == "elsewhere" and of(str(folder)) is None
    assert of(None, "bytes") == of("elsewhere", "bytes") == "bytes"
    (folder / "tokenizer.json").touch()
    assert of(str(folder)) == str(folder)
    new = start[3]["params"].pop("classifier")
    equal(start[3]["params"], {name: base["params"][name] for name in start[3]["params"]})
    assert new["dense"]["kernel"].shape[-1] == 3
    with pytest.raises(UserError, match=r"has \S+ of shape \S+ \d+\), but cnn_digits needs .* here$"):
        build_model(Config(model="cnn_digits", pretrained=str(folder)), images(4))
    adapted = Config(**short, strategy="fedmr", adapter="lora", pretrained=str(folder), run_dir=str(tmp_path / "next"))
    assert run(adapted, dataset=images(3), record=False).summary["rounds"] == 1
    _each_changed_byte_is_noticed(folder)
    _every_reader_refuses_another_base(tmp_path / "next", folder, monkeypatch)
    (folder / "variables").rename(folder / "others")
    with pytest.raises(UserError, match="exported/variables cannot be read"):
        build_model(Config(model="mlp", pretrained=str(folder)), images(4))
