"""Optuna's samplers: the budget, the storage that processes share, and trials whose process died."""

from pathlib import Path

import pytest

from fedjax_mr.errors import UserError
from fedjax_mr.sweep import trainer
from fedjax_mr.tune import studies
from fedjax_mr.tune.__main__ import main
from fedjax_mr.tune.plan import plan

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")
TINY = ("--model=logistic", "--rounds=18", "--eval_every=2", "--local_epochs=1", "--noprogress", "--tune_dir=tune")
TPE = (*TINY, "--strategies=fedavg,fedprox", "--sampler=tpe", "--budget=12", "--space=a.flags", "--seeds=5")


@pytest.fixture(autouse=True)
def space():
    Path("a.flags").write_text("--lr=log:0.001:1\n--fedprox_mu=0.01,0.1\n--batch_size=lin:5:20\n")


def settings(asked, strategy="fedavg"):
    return [entry[1] for entry in asked if entry[0] == strategy and entry[3] == 0 and entry[2] == 0]


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_a_sampler_has_the_same_budget_and_learns(sampler, trained):
    for package in studies.NEEDS[sampler]:
        pytest.importorskip(package)
    asked = trained()
    assert main([*TPE, f"--sampler={sampler}"]) == 0
    for strategy in ("fedavg", "fedprox"):
        mine = [entry[3:] for entry in asked if entry[0] == strategy and entry[2] == 0]
        assert mine.count((0, 6)) == 12 and mine.count((6, 18)) == 4
    assert {each.name for each in Path("tune").iterdir()} >= {studies.STORAGE, "fedavg.flags", "fedprox.flags"}
    assert "--fedprox_mu=" in Path("tune/fedprox.flags").read_text()
    asked.clear()
    assert main([*TPE, f"--sampler={sampler}"]) == 0
    assert asked == []


@pytest.mark.parametrize("moment", [5, 25])
def test_interrupted_it_proposes_the_same_trials(trained, moment):
    whole = trained()
    assert main([*TPE, "--tune_dir=whole"]) == 0
    asked = trained(after=[moment])
    assert main(TPE) == 130
    rest = trained()
    assert main(TPE) == 0
    assert sorted(asked + rest) == sorted(whole)


def test_without_its_file_the_scores_come_from_the_run_folders(trained):
    asked = trained()
    assert main(TPE) == 0
    Path("tune", studies.STORAGE).unlink()
    asked.clear()
    assert main(TPE) == 0
    assert asked == []


def test_a_damaged_file_is_one_line(trained, capsys):
    trained()
    assert main(TPE) == 0
    with Path("tune", studies.STORAGE).open("a") as file:
        file.write("{half a line\n{}\n")
    capsys.readouterr()
    assert main(TPE) == 2
    shown = capsys.readouterr().err
    assert "optuna.log is damaged" in shown and "remove it" in shown and shown.count("\n") == 1


def test_a_trial_whose_process_died_is_trained_by_the_next(trained):
    """Optuna has proposed the trial, but received no score, and no process has claimed its run."""
    tuning = plan(TPE)
    lost = studies._Study(tuning, "fedavg").next()
    asked = trained()
    assert main(TPE) == 0
    assert settings(asked)[0] == lost.runs[0].config.lr
    assert len(settings(asked)) == 12


def test_a_trial_that_another_process_trains_is_left_to_it(trained, monkeypatch):
    """While it trains, the others ask for new trials; at the end they wait for its score."""
    tuning = plan([*TPE, "--strategies=fedavg"])
    theirs = studies._Study(tuning, "fedavg").next()
    asked, folder = trained(), theirs.runs[0].folder
    monkeypatch.setattr(
        studies, "is_claimed", lambda run: run.folder == folder and not (folder / "summary.json").exists()
    )

    def sleep(seconds):
        assert len(asked) == 11  # all others
        trainer.run_all(theirs.until(6))

    monkeypatch.setattr(studies.time, "sleep", sleep)
    assert main([*TPE, "--strategies=fedavg"]) == 0
    assert len(settings(asked)) == 12


def test_processes_that_ask_at_once_do_not_exceed_the_budget(monkeypatch):
    """Both see one of two trials and ask; the second answer is over the budget and does not count."""
    tuning = plan([*TPE, "--strategies=fedavg", "--budget=2"])
    one, two = (studies._Study(tuning, "fedavg") for _ in range(2))
    assert one.next() is not None
    monkeypatch.setattr(studies, "is_claimed", lambda run: True)
    before = two._records()
    assert one.next() is not None
    monkeypatch.setattr(two, "_records", lambda: before)
    assert two.next() is None
    assert [record.number for record in one._records()] == [0, 1] and len(one.study.get_trials()) == 3


def test_another_setting_is_another_study():
    name = lambda *more: studies._name(plan([*TPE, *more]), "fedavg")
    assert name() == name("--budget=11") == name("--seeds=9")
    assert (
        len({name(), name("--alpha=0.1"), name("--sampler=gp"), name("--tuning_seeds=0,1"), name("--rounds=60")}) == 5
    )
    other = lambda *more: studies._name(plan([*TPE, "--space=b.flags", *more]), "fedprox")
    Path("b.flags").write_text("--lr=log:0.001:1\n")
    assert other() == other("--fedavg_weights=uniform", "--strategies=fedprox") != other("--fedprox_mu=7")


def test_a_record_of_a_process_that_was_killed_while_it_asked(trained):
    """It has no parameters, and another one takes its place."""
    trained()
    storage = studies._Study(plan(TPE), "fedavg").study
    storage._storage.create_new_trial(storage._study_id)
    assert main(TPE) == 0
    assert len(studies._Study(plan(TPE), "fedavg").trials()) == 12


def test_a_trial_that_diverged_is_told_as_the_worst(trained):
    trained(diverges=lambda config: config.lr > 0.1)
    assert main([*TPE, "--strategies=fedavg"]) == 0
    study = studies._Study(plan([*TPE, "--strategies=fedavg"]), "fedavg").study
    told = {trial.params["lr"] > 0.1005: trial.value for trial in study.trials}
    assert told[True] == studies.WORST < told[False]


def test_without_optuna_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(studies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--sampler=tpe needs optuna: pip install 'fedjax_mr\[optuna\]'"):
        studies.check("tpe")
