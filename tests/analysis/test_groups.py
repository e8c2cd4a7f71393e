"""Runs are found in folders, grouped by their settings, and named by the settings that differ."""

import dataclasses
import json
from pathlib import Path

import pytest

from fedjax_mr.analysis import groups, tables
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedcross, fedmr


def test_a_run_that_was_made_twice_is_one_seed(keep):
    """Under another name, by a version without some option, or with another value of what means nothing to it."""
    config = Config(strategy="fedmr", partition="iid")
    first = keep(config, [0.5, 0.5])
    keep(dataclasses.replace(config, seed=1), [0.7, 0.7])
    values = json.loads((first / "config.json").read_text())
    again = first.rename("runs/fedmr-of-an-earlier-version")
    del values["fedmr_unit"], values["public_max"]
    (again / "config.json").write_text(json.dumps(values))
    other = dataclasses.replace(config, alpha=0.1)  # alpha means nothing to iid
    keep(other, [0.2], end=None).rename("runs/fedmr-not-finished")
    keep(config, [0.5, 0.5])
    (only,) = tables.accuracy_lines(groups.find(["runs"]))
    assert (only.finished, only.unfinished, only.of("last").mean) == (2, 0, 0.6)


def test_settings_are_named_by_what_differs(keep):
    for unit in ("leaf", "layer"):
        for alpha in (0.1, 0.5):
            keep(Config(strategy="fedmr", alpha=alpha, hyper=fedmr.Hyper(unit=unit)), [0.5])
    keep(Config(strategy="fedcross", alpha=0.5, hyper=fedcross.Hyper()), [0.5])
    names = [groups.name(line.setting) for line in tables.accuracy_lines(groups.find(["runs"]))]
    assert sorted(names) == [
        "fedcross alpha=0.5",
        "fedmr alpha=0.1 unit=layer",
        "fedmr alpha=0.1 unit=leaf",
        "fedmr alpha=0.5 unit=layer",
        "fedmr alpha=0.5 unit=leaf",
    ]


def test_runs_of_a_folder_come_in_the_order_of_their_settings(keep):
    cohorts = [keep(Config(strategy="fedmr", cohort=cohort), [0.5]) for cohort in (100, 5, 20)]
    iid = keep(Config(strategy="fedavg", partition="iid"), [0.5])
    skewed = keep(Config(strategy="fedavg"), [0.5])
    in_order = [skewed, iid, cohorts[1], cohorts[2], cohorts[0]]
    assert [run.path for run in groups.find(["runs"])] == in_order
    assert [run.path for run in groups.find([iid, "runs"])] == [iid, skewed, *in_order[2:]]  # what is named comes first


def test_kept_runs_name_files_without_folders(keep):
    """They are seeds of the same setting, unless there are two such files."""
    for seed, file in enumerate(("mine.npz", "a/mine.npz", "a/mine.npz")):
        keep(Config(strategy="fedavg", dataset=file, seed=seed), [0.5])
    (line,) = tables.accuracy_lines(groups.find(["runs"]))
    assert line.finished == 3
    keep(Config(strategy="fedavg", dataset="b/mine.npz"), [0.5])
    lines = tables.accuracy_lines(groups.find(["runs"]))
    assert {(line.setting["dataset"], line.finished) for line in lines} == {
        ("mine.npz", 1), ("a/mine.npz", 2), ("b/mine.npz", 1),
    }  # fmt: skip
    settings = groups.by_setting(groups.find(["runs"]))
    names = ["FedAvg, mine, dataset=a/mine.npz", "FedAvg, mine, dataset=b/mine.npz", "FedAvg, mine, dataset=mine.npz"]
    assert sorted(groups.titles_of(settings)) == names


def test_seeds_of_versions_that_round_differently_are_one_setting(keep):
    """Unless the same seed has both, which is then what is compared."""
    for seed, convolution in enumerate(("direct", "direct", "auto")):
        keep(Config(strategy="fedavg", convolution=convolution, seed=seed), [0.5])
    (line,) = tables.accuracy_lines(groups.find(["runs"]))
    assert line.finished == 3
    keep(Config(strategy="fedavg", convolution="auto", seed=0), [0.5])
    lines = tables.accuracy_lines(groups.find(["runs"]))
    assert {(line.setting["convolution"], line.finished) for line in lines} == {("direct", 2), ("auto", 2)}


def test_a_folder_without_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(UserError, match="empty is not a run folder and holds none"):
        groups.find(["empty"])
