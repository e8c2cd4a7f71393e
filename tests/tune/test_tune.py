"""A tuning: the same budget for every method, chosen on validation alone, tested on other seeds."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest

from fedjax_mr.config.config import Config
from fedjax_mr.data import partition_file
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.sweep import trainer
from fedjax_mr.tune.__main__ import main
from fedjax_mr.tune.plan import Rung, plan, rungs_of

TINY = ("--model=logistic", "--rounds=18", "--eval_every=2", "--local_epochs=1", "--noprogress", "--tune_dir=tune")
BOTH = (*TINY, "--strategies=fedavg,fedmr", "--budget=8", "--seeds=5,6")


def rates(asked, strategy="fedavg", start=0, seeds=(0,)):
    """The learning rates that were trained from a round on."""
    return [lr for name, lr, seed, begin, _ in asked if (name, begin) == (strategy, start) and seed in seeds]


def distance(lr):
    """The distance from the best rate of `conftest.quality`."""
    return abs(math.log10(lr / 0.1))


def test_every_method_has_the_same_trials_and_rounds(trained, capsys):
    asked = trained()
    assert main(BOTH) == 0
    for strategy in ("fedavg", "fedmr"):
        mine = [entry for entry in asked if entry[0] == strategy]
        trials, tests = [e for e in mine if e[2] == 0], [e for e in mine if e[2] != 0]
        assert [entry[3:] for entry in trials] == [(0, 6)] * 8 + [(6, 18)] * 2
        assert [entry[2:] for entry in tests] == [(5, 0, 18), (6, 0, 18)]
        assert len({entry[1] for entry in tests}) == 1  # one setting
    assert rates(asked, "fedavg") == rates(asked, "fedmr")
    out = capsys.readouterr().out
    assert "Best of 8 trials each, chosen on validation (20 % of each client's training samples, seed 0)" in out
    assert "seeds 5, 6, which chose nothing" in out
    asked.clear()
    assert main(BOTH) == 0  # nothing is trained twice
    assert asked == [] and capsys.readouterr().out == out


def test_the_best_on_validation_is_chosen_although_it_is_the_worst_on_test(trained):
    asked = trained()
    assert main(BOTH) == 0
    tried, chosen = rates(asked), rates(asked, seeds=(5,))
    nearest = sorted(tried, key=distance)
    assert rates(asked, start=6) == nearest[:2] and chosen == nearest[:1]
    assert Path("tune/fedavg.flags").read_text().splitlines()[-1] == f"--lr={chosen[0]}"


def test_no_test_result_changes_a_choice(trained):
    """The same tuning with every test column of the trials' metrics replaced, at all rungs."""
    asked = trained()
    assert main(BOTH) == 0
    first = list(asked)
    asked.clear()
    again = trained(test=lambda config: 0.5)
    assert main([*BOTH, "--tune_dir=other"]) == 0
    assert again == first


def test_trials_that_diverge_are_last_and_counted(trained, capsys):
    asked = trained(diverges=lambda config: config.lr > 0.05)
    assert main(BOTH) == 0
    assert all(lr <= 0.05 for lr in rates(asked, start=6))
    out = capsys.readouterr().out
    count = sum(lr > 0.05 for lr in rates(asked))
    assert f"8, {count} diverged" in out
    with open("tune/trials.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["strategy"] == "fedavg"]
    assert sum(row["state"] == "diverged" for row in rows) == count
    assert [row["state"] for row in rows].count("chosen") == 1


def test_a_trial_that_diverges_later_gives_way_to_the_best_of_the_rung_before(trained):
    asked = trained(diverges=lambda config: config.rounds == 18 and config.seed == 0)
    assert main(BOTH) == 0
    stopped = set(rates(asked)) - set(rates(asked, start=6))
    assert rates(asked, seeds=(5,)) == [min(stopped, key=distance)]


def test_if_all_trials_diverge_there_is_no_choice(trained, capsys):
    trained(diverges=lambda config: config.strategy == "fedmr")
    assert main(BOTH) == 3
    out = capsys.readouterr().out
    assert out.splitlines()[-1].split()[:4] == ["fedmr", "none", "8,", "8"]


def test_a_best_value_at_the_end_is_marked(trained, capsys):
    trained(validation=lambda config: min(config.lr, 1.0))
    assert main(BOTH) == 0
    out = capsys.readouterr().out
    assert out.count("(largest)") == 3 and "a wider space may hold a better value" in out


def test_ties_go_to_the_lower_loss_then_to_the_first(trained):
    asked = trained(validation=lambda config: 0.5)
    assert main(BOTH) == 0
    assert rates(asked, start=6) == rates(asked)[:2] and rates(asked, seeds=(5,)) == rates(asked)[:1]


def test_of_equal_accuracies_the_lower_loss_wins(trained):
    asked = trained(validation=lambda config: 0.5, loss=lambda config: abs(math.log10(config.lr / 0.03)))
    assert main(BOTH) == 0
    nearest = sorted(rates(asked)[:8], key=lambda rate: abs(math.log10(rate / 0.03)))
    assert rates(asked, start=6)[:2] == nearest[:2] and rates(asked, seeds=(5,)) == nearest[:1]


def test_a_run_that_patience_has_ended_has_the_score_of_its_end(trained, capsys):
    trained(ended_at=lambda config: 6 if config.lr < 0.1 else None)
    flags = [*TINY, "--strategy=fedavg", "--budget=4", "--eta=1", "--validation_share=0.2", "--patience=2"]
    assert main(flags) == 0
    out = capsys.readouterr().out
    trials = [row.split(",") for row in Path("tune/trials.csv").read_text().splitlines()[1:]]
    rounds = [6 if float(row[2].partition("=")[2]) < 0.1 else 18 for row in trials]
    assert {6, 18} == set(rounds) and f" {sum(rounds)} " in out


def test_a_larger_budget_or_more_rounds_continue_the_same_runs(trained):
    asked = trained()
    assert main([*TINY, "--strategy=fedavg", "--budget=4", "--eta=1"]) == 0
    assert [entry[3:] for entry in asked if entry[2] == 0] == [(0, 18)] * 4
    asked.clear()
    assert main([*TINY, "--strategy=fedavg", "--budget=8", "--eta=1"]) == 0
    assert [entry[3:] for entry in asked if entry[2] == 0] == [(0, 18)] * 4
    asked.clear()
    assert main([*TINY, "--strategy=fedavg", "--budget=8", "--eta=1", "--rounds=36"]) == 0
    assert [entry[3:] for entry in asked if entry[2] == 0] == [(18, 36)] * 8


def test_fewer_rounds_at_which_nothing_was_evaluated_are_refused(trained, capsys):
    trained()
    assert main([*TINY, "--strategy=fedavg", "--budget=4", "--eta=1"]) == 0
    assert main([*TINY, "--strategy=fedavg", "--budget=4", "--eta=1", "--rounds=7"]) == 2
    assert "was trained to round 18 and not evaluated at round 7" in capsys.readouterr().err


@pytest.mark.parametrize("moment", [3, 16, 19])
def test_interrupted_anywhere_it_continues_with_the_same_choices(trained, moment):
    whole = trained()
    assert main([*BOTH, "--tune_dir=whole"]) == 0
    asked = trained(after=[moment])
    assert main(BOTH) == 130
    assert len(asked) == moment
    rest = trained()
    assert main(BOTH) == 0
    assert asked + rest == whole


def test_several_seeds_are_averaged(trained):
    """Seed 0 prefers small rates and seed 1 large ones; the mean of both decides."""
    best = {0: 0.01, 1: 0.3}
    accuracy = lambda lr, seed: 1 - (lr - best[seed]) ** 2
    asked = trained(validation=lambda config: accuracy(config.lr, config.seed))
    assert main([*TINY, "--strategy=fedavg", "--tuning_seeds=0,1", "--eta=1"]) == 0
    tried = rates(asked)
    assert rates(asked, seeds=(1,)) == tried
    mean = lambda lr: accuracy(lr, 0) + accuracy(lr, 1)
    assert rates(asked, seeds=(2,)) == [max(tried, key=mean)]
    assert max(tried, key=mean) not in (max(tried, key=lambda lr: accuracy(lr, seed)) for seed in (0, 1))


def test_the_tests_are_the_runs_of_a_sweep_with_the_chosen_flags(trained):
    """Without the flag, trials keep validation samples and the tests train on all samples; with it, all runs do."""
    trained()
    assert main([*TINY, "--strategy=fedavg"]) == 0
    share = lambda kind: {
        json.loads(path.read_text())["validation_share"] for path in Path("tune", kind).glob("*/config.json")
    }
    assert share("trials") == {0.2} and share("tests") == {0.0}
    assert main([*TINY, "--strategy=fedavg", "--validation_share=0.3", "--tune_dir=tune2"]) == 0
    assert {json.loads(p.read_text())["validation_share"] for p in Path("tune2").glob("*/*/config.json")} == {0.3}


def test_a_method_without_searched_flags_has_one_trial(trained, capsys):
    Path("mu.flags").write_text("--fedprox_mu=0.1,1\n")
    asked = trained()
    assert main([*TINY, "--strategies=fedavg,fedprox", "--space=mu.flags"]) == 0
    assert len(rates(asked, "fedavg")) == 1 and len(rates(asked, "fedprox")) == 2
    assert "no flag searched" in capsys.readouterr().out


def test_the_rungs():
    assert rungs_of(8, 3, 300, 5) == (Rung(8, 100), Rung(2, 300))
    assert rungs_of(27, 3, 300, 5) == (Rung(27, 35), Rung(9, 100), Rung(3, 300))
    assert rungs_of(16, 4, 160, 5) == (Rung(16, 40), Rung(4, 160))
    assert rungs_of(5, 3, 300, 5) == (Rung(5, 300),)
    assert rungs_of(8, 1, 300, 5) == (Rung(8, 300),)
    assert rungs_of(27, 3, 6, 2) == (Rung(27, 2), Rung(3, 6))  # two rungs would end at round 2
    assert rungs_of(8, 3, 3, 5) == (Rung(8, 3),)


def test_the_plan_is_printed_and_nothing_is_trained(trained, capsys):
    asked = trained()
    assert main([*BOTH, "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "fedmr: 8 trials to round 6, 2 trials to round 18; 72 rounds, and 2 tests" in out
    assert "216 rounds in total" in out
    assert asked == [] and not list(Path().iterdir())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--budget=0"], ["--budget=0 is out of range"]),
        (["--sampler=bayes"], ["--sampler='bayes' is not one of halton, tpe, gp"]),
        (["--strategies=fedav"], ["did you mean 'fedavg'?"]),
        (["--space=absent.flags"], ["cannot read --space=absent.flags"]),
        (["--seeds=0:3"], ["seed 0 is in --seeds and in the trials' seeds"]),
        (["--tuning_seeds=a"], ["--tuning_seeds=a: 'a' is not a seed"]),
        (["--run_dir=x"], ["remove --run_dir"]),
        (["--stop_at_accuracy=0.9"], ["reads the test accuracy"]),
        (["--patience=3"], ["also set --validation_share"]),
        (["--dp_clip=1", "--dp_target_epsilon=5"], ["add --eta=1"]),
        (["--bugdet=3"], ["did you mean --budget?"]),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(arguments, parts, trained, capsys):
    asked = trained()
    assert main([*TINY, *arguments]) == 2
    out, shown = capsys.readouterr()
    assert out == "" and shown.startswith("fedjax-mr: ") and shown.count("\n") == 1
    assert all(part in shown for part in parts), shown
    assert not asked and not list(Path().iterdir())


def test_bad_values_of_the_space_are_found_before_anything_starts(trained, capsys):
    Path("bad.flags").write_text("--lr=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,-1\n")
    asked = trained()
    assert main([*TINY, "--space=bad.flags", "--budget=2"]) == 2
    assert "--lr=-1.0 is out of range" in capsys.readouterr().err and not asked


def test_a_partition_file_must_have_validation_samples(trained, capsys):
    for name, share in (("with", 0.2), ("without", 0.0)):
        federated = federated_data(resolve(Config(validation_share=share)).config)
        partition_file.save(federated.plan, f"{name}.npz")
    asked = trained()
    assert main([*TINY, "--strategy=fedavg", "--partition_file=without.npz"]) == 2
    assert "without.npz has no validation samples" in capsys.readouterr().err and not asked
    assert main([*TINY, "--strategy=fedavg", "--partition_file=with.npz"]) == 0
    assert "(the validation samples in with.npz, seed 0)" in capsys.readouterr().out


def test_runs_whose_checkpoints_were_removed_keep_their_scores(trained):
    asked = trained()
    assert main(BOTH) == 0
    for folder in Path("tune").glob("*/*/checkpoints"):
        shutil.rmtree(folder)
    asked.clear()
    assert main(BOTH) == 0 and asked == []


def test_a_run_that_fails_stops_the_tuning_with_its_log(monkeypatch, capsys):
    monkeypatch.setattr(trainer, "run_all", lambda runs, **how: 1)
    assert main(BOTH) == 1
    shown = capsys.readouterr().err
    assert "did not finish; see tune/trials/fedavg-lr=" in shown and "run the same command again" in shown


def test_a_run_that_another_process_leaves_is_taken_over(trained, monkeypatch):
    """The other one had claimed it when ours tried, so ours ended with code 2."""
    trained()
    whole, calls = trainer.run_all, []

    def run_all(runs, **how):
        calls.append(len(runs))
        return 2 if len(calls) == 1 else whole(runs, **how)

    monkeypatch.setattr(trainer, "run_all", run_all)
    assert main([*TINY, "--strategy=fedavg", "--budget=4", "--eta=1"]) == 0
    assert calls[:2] == [4, 4]


def test_a_folder_that_cannot_be_written_is_one_line(capsys):
    Path("file").touch()
    assert main([*TINY, "--tune_dir=file/tune"]) == 2
    assert "cannot write into file/tune/trials" in capsys.readouterr().err


def test_help_lists_the_flags(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("--budget", "--space", "--sampler", "--eta", "--tuning_seeds"))


def test_a_run_without_validation_accuracy_is_named(trained, capsys):
    trained(validation=lambda config: None if config.lr > 0.1 else 0.5)
    assert main([*BOTH]) == 2
    assert "has no validation accuracy at round" in capsys.readouterr().err


def test_the_seeds_of_the_tests_follow_those_of_the_trials():
    assert plan([*TINY, "--seed=7"]).seeds == (8, 9, 10)
    assert plan([*TINY, "--tuning_seeds=0:2"]).seeds == (2, 3, 4)
