"""The command ``python -m fedjax_mr.analysis``: what it reads, and one line for everything that is wrong."""

import argparse
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import audit
import campaign
import landscape
import leakage
import reassembly
import roles
import similarity
import theorem1
import unlearning
import worth
from fedjax_mr.analysis import runs
from fedjax_mr.analysis.__main__ import COMMANDS, main
from fedjax_mr.analysis.command import script
from fedjax_mr.errors import UserError

ROOT = Path(__file__).parents[2]
STUDIES = (audit, campaign, landscape, leakage, reassembly, roles, similarity, theorem1, unlearning, worth)


def fake_run(folder, similarities):
    """Write a run folder by hand."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"strategy": "fedmr"}))
    rows = [{"round": 5 * i, "similarity": value} for i, value in enumerate(similarities, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_similarity_from_the_evaluations(tmp_path, capsys):
    first = fake_run(tmp_path / "fedmr", [0.9, 0.5, None, 0.75])
    second = fake_run(tmp_path / "fedavg", [1.0, 0.99])
    assert script(similarity, [str(first), str(second)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["fedmr", "0.9000", "0.5000", "10", "0.7500", "20"]
    assert lines[2] == ["fedavg", "1.0000", "0.9900", "10", "0.9900", "10"]
    assert (tmp_path / "analysis" / "similarity.png").stat().st_size > 10_000  # beside both runs
    assert not (first / "analysis").exists()


def test_results_go_where_they_are_asked_for(tmp_path, capsys):
    first = fake_run(tmp_path / "fedmr", [0.9])
    assert script(similarity, [str(first), f"--out={tmp_path / 'new' / 'place'}"]) == 0
    assert (tmp_path / "new" / "place" / "similarity.png").exists()
    assert not (first / "analysis").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clints"], "unknown command 'clints'; did you mean 'clients'?"),
        (["clients"], "required: RUN"),
        (["clients", "here", "--uot=x"], "unrecognized arguments: --uot=x"),
        (["clients", "here"], "here is not a run folder: it has no config.json"),
        (["clients", "run", "run"], "is named twice"),
        (["curves", "empty"], "has no evaluation yet"),
        (["curves", "run", "--column=similarity", "--out=run/config.json"], "cannot write into run/config.json"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    fake_run(tmp_path / "run", [0.9])
    fake_run(tmp_path / "empty", [])
    assert main(arguments) == 2
    out, shown = capsys.readouterr()
    assert out == "" and shown.startswith("fedjax-mr: ") and shown.count("\n") == 1 and message in shown


def test_a_study_is_a_script_with_help():
    """Run as printed in its page, from the folder of the clone. They share a process, since each imports JAX."""
    folder = Path("experiments") / "studies"
    as_scripts = f"""
import contextlib, runpy, sys
for path in sys.argv[1:]:
    sys.argv, sys.path[0] = [path, "--help"], {str(folder)!r}
    with contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
"""
    paths = [str(folder / f"{study.__name__}.py") for study in STUDIES]
    command = [sys.executable, "-c", as_scripts, *paths]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    for study, path in zip(STUDIES, paths, strict=True):
        assert f"usage: python {path}" in done.stdout and study.__doc__.splitlines()[0] in done.stdout


def test_the_commands_of_studies_on_the_pages_are_valid():
    pages = [*(ROOT / "experiments").rglob("*.md"), *(ROOT / "docs").rglob("*.md")]
    texts = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    found = re.findall(r"python experiments/studies/([a-z0-9_]+)\.py([^`\n]*)", texts)
    assert {name for name, _ in found} == {study.__name__ for study in STUDIES}
    for name, arguments in found:
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(name).add_arguments(parser)
        parser.parse_args(shlex.split(arguments, comments=True))


def test_bad_input_of_a_study_is_one_line(capsys):
    assert script(similarity, ["--uot=x", "here"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_the_real_command_lists_all_commands():
    done = subprocess.run([sys.executable, "-m", "fedjax_mr.analysis", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"fedjax_mr.analysis {name}" in capsys.readouterr().out


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    folders = [fake_run(tmp_path / name / "fedmr", [0.9]) for name in ("a", "b")]
    both = runs.read([*map(str, folders), str(fake_run(tmp_path / "fedavg", [0.9]))])
    assert [run.name for run in both] == [*map(str, folders), "fedavg"]


def test_models_are_restored(finished):
    (run,) = runs.read([str(finished("fedmr"))])
    assert run.checkpoints() == [3, 4]
    trained = runs.restore(run)
    assert trained.round == 4
    before = runs.restore(run, round=3)
    for mean, models, old in zip(*map(_leaves, (trained.deployed, trained.models, before.deployed)), strict=True):
        np.testing.assert_allclose(mean, models.mean(axis=0), rtol=1e-5, atol=1e-7)
        assert models.shape == (3, *mean.shape) and not np.array_equal(mean, old)
    with pytest.raises(UserError, match="no checkpoint of round 2"):
        runs.restore(run, round=2)


def _leaves(tree):
    return list(map(np.asarray, jax.tree.leaves(tree)))


def test_a_strategy_with_one_model_has_no_k_models(finished):
    (run,) = runs.read([str(finished("fedavg"))])
    assert runs.restore(run).models is None


def test_other_data_are_noticed(finished, tmp_path):
    copy = shutil.copytree(finished("fedmr"), tmp_path / "copy")
    values = json.loads((copy / "config.json").read_text())
    (copy / "manifest.json").unlink()  # as if the change were intended
    (copy / "config.json").write_text(json.dumps(values | {"partition_seed": 5}))
    (run,) = runs.read([str(copy)])
    with pytest.raises(UserError, match="trained on other data"):
        runs.restore(run)
