"""A comparison ends when it is decided; its ledger replays; what cannot be compared is refused in one line."""

import inspect
import json
import random
from pathlib import Path

import pytest

import fedjax_mr as fmr
from fedjax_mr.analysis import ledger
from fedjax_mr.compare import replay
from fedjax_mr.compare.__main__ import main
from fedjax_mr.compare.train import values_of

ROOT = Path(__file__).parents[2]
TINY = ("--model=logistic", "--rounds=4", "--eval_every=2", "--local_epochs=1", "--noprogress", "--compare_dir=both")
BOTH = (*TINY, "--strategies=fedmr,fedavg")


def accuracy(gain):
    """A function of the configuration: the seeds differ much, the methods by ``gain`` and a little at random."""

    def of(config):
        noise = random.Random(f"{config.strategy} {config.seed}").gauss(0, 0.004)
        return 0.5 + 0.2 * random.Random(config.seed).random() + noise + gain * (config.strategy == "fedmr")

    return of


def read(folder="both"):
    return json.loads((Path(folder) / ledger.LEDGER).read_text())


def outcome(folder="both", pair=0):
    return read(folder)["pairs"][pair]["looks"][-1]["outcome"]


@pytest.mark.parametrize(
    ("gain", "expected", "words"),
    [
        (0.05, "better", "FedMR is better than FedAvg: +"),
        (-0.05, "worse", "FedAvg is better than FedMR: +"),
        (0.0, "equal", "FedMR and FedAvg are equal within 1.00 points: "),
    ],
)
def test_a_comparison_ends_when_it_is_decided(trained, capsys, gain, expected, words):
    asked = trained(accuracy(gain))
    assert main(BOTH) == 0
    out = capsys.readouterr().out
    assert out.startswith(words) and outcome() == expected
    seeds = len(read()["pairs"][0]["seeds"])
    assert seeds % 5 == 0 and seeds <= 15 and len(asked) == 2 * seeds  # in blocks, and not all thirty
    assert {seed for _, seed in asked} == set(range(seeds))
    assert "independent and normal" in out and "at most 0.05" in out and "At equal rounds" in out


def test_it_is_undecided_after_the_budget(trained, capsys):
    asked = trained(accuracy(0.003))
    assert main([*BOTH, "--margin=0.0001", "--most_seeds=7"]) == 0
    assert outcome() == "undecided" and len(asked) == 14  # blocks of five and two seeds
    assert capsys.readouterr().out.startswith("undecided: FedMR against FedAvg: ")


def test_all_seeds_of_a_budget_are_trained_if_asked(trained):
    asked = trained(accuracy(0.05))
    assert main([*BOTH, "--until=budget", "--most_seeds=10"]) == 0
    assert len(asked) == 20 and [look["count"] for look in read()["pairs"][0]["looks"]] == [5, 10]


def test_more_seeds_continue_an_undecided_comparison(trained):
    asked = trained(accuracy(0.003))
    main([*BOTH, "--margin=0.0001", "--most_seeds=5"])
    main([*BOTH, "--margin=0.0001", "--most_seeds=10"])
    assert sorted(seed for _, seed in asked) == sorted([*range(10)] * 2)


def test_the_same_command_writes_the_same_ledger_also_after_a_kill(trained):
    trained(accuracy(0.01))
    assert main(BOTH) == 0
    whole = (Path("both") / ledger.LEDGER).read_bytes()
    asked = trained(accuracy(0.01), after=7)
    assert main([*BOTH, "--compare_dir=again"]) == 130
    first = list(asked)
    asked = trained(accuracy(0.01))
    assert main([*BOTH, "--compare_dir=again"]) == 0
    assert not set(first) & set(asked)  # nothing is trained twice
    assert (Path("again") / ledger.LEDGER).read_bytes() == whole


def test_a_ledger_replays_and_a_changed_one_is_noticed(trained, capsys):
    trained(accuracy(0.05))
    main(BOTH)
    shown = capsys.readouterr().out.rsplit("\nresults:", 1)[0]
    assert main(["--replay=both"]) == 0
    assert capsys.readouterr().out.rstrip() == shown.rstrip()
    assert replay("both").decided
    for change in (lambda found: found["pairs"][0]["values"][0].reverse(), lambda found: found.update(margin=0.2)):
        found = read()
        change(found)
        Path("changed.json").write_text(json.dumps(found))
        assert main(["--replay=changed.json"]) == 2
        assert "or was changed" in (error := capsys.readouterr().err) and error.count("\n") == 1


@pytest.mark.parametrize("kept", sorted((ROOT / "experiments/compare").glob("*.json")), ids=lambda path: path.stem)
def test_the_page_prints_the_answer_of_each_kept_ledger(kept):
    answer = replay(kept).table().partition("\n")[0]
    assert answer in (ROOT / "docs/compare.md").read_text()


def test_three_methods_share_alpha_and_decided_pairs_train_no_further(trained):
    gains = {"fedavg": 0.0, "fedprox": 0.001, "fedmr": 0.2}
    asked = trained(lambda config: accuracy(0)(config) + gains[config.strategy])
    assert main([*TINY, "--strategies=fedavg,fedprox,fedmr", "--margin=0.0001", "--most_seeds=10"]) == 0
    found = read()
    assert found["pairs_that_share_the_error"] == 3
    assert [pair["looks"][-1]["outcome"] for pair in found["pairs"]] == ["undecided", "worse", "worse"]
    assert [len(pair["seeds"]) for pair in found["pairs"]] == [10, 5, 5]
    assert sum(strategy == "fedmr" for strategy, _ in asked) == 5


def test_identical_strategies_are_equal_and_never_differ(trained, capsys):
    fmr.STRATEGIES["twin"] = fmr.STRATEGIES["fedavg"]
    try:
        trained(lambda config: 0.5 + config.seed / 100)
        assert main([*TINY, "--strategies=fedavg,twin", "--margin=0"]) == 0
        assert outcome() == "equal"
        assert "are equal: +0.00 points [+0.00, +0.00], 5 seeds" in capsys.readouterr().out
    finally:
        del fmr.STRATEGIES["twin"]


def test_lower_losses_are_better_and_a_metric_is_named(trained, capsys):
    trained(accuracy(0.05))
    assert main([*BOTH, "--metric=loss", "--margin=0.001"]) == 0
    assert outcome() == "better" and not read()["higher_is_better"]
    assert main([*BOTH, "--metric=speed", "--compare_dir=other"]) == 2
    assert "unknown metric 'speed'" in capsys.readouterr().err and not Path("other").exists()  # nothing was trained


def test_what_differs_is_named(trained, capsys):
    trained(accuracy(0.05))
    assert main([*TINY, "--strategy=fedavg", "--grid=lr=0.1,0.2"]) == 0
    assert read()["different"] == {"lr": [0.1, 0.2]}
    assert "Different settings, in the order of the methods: lr 0.1, 0.2." in capsys.readouterr().out


def test_equal_bytes():
    """Values double with the rounds; the first method sends twice as much per round, so half of its rounds count."""
    rows = lambda per_round: [
        {"round": at, "accuracy": at / 40, "bytes_down": per_round * at, "bytes_up": 0, "images": at}
        for at in (10, 20, 30, 40)
    ]
    mean = lambda *rounds: sum(rounds) / len(rounds) / 40
    assert values_of([rows(2), rows(1)], "accuracy", "bytes") == pytest.approx([mean(10, 20), mean(10, 20, 30, 40)])
    assert values_of([rows(2), rows(1)], "accuracy", "rounds") == pytest.approx([mean(10, 20, 30, 40)] * 2)
    assert values_of([rows(2), rows(1)], "accuracy", "images") == pytest.approx([mean(10, 20, 30, 40)] * 2)
    with pytest.raises(fmr.UserError, match="no evaluation is within the bytes"):
        values_of([rows(100), rows(1)[:1]], "accuracy", "bytes")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--strategy=fedavg"], "at least two methods"),
        (["--strategies=fedavg,fedmrr"], "fedmrr"),
        (["--strategies=fedavg,fedmr", "--margin=-1"], "margin"),
        (["--strategies=fedavg,fedmr", "--run_dir=x"], "remove --run_dir"),
        (["--strategy=fedavg", "--grid=clients=10,20"], "clients is 10 for fedavg and 20"),
        (["--strategy=fedavg", "--grid=rounds=10,20"], "rounds is 10 for fedavg and 20"),
        (["--strategies=fedavg,fedmr", "--stop_at_accuracy=0.5"], "stopping by test results"),
        (["--strategies=fedavg,fedmr", "--tuned=nothing"], "--tuned=nothing is not a tuning"),
        (["--strategies=fedavg,fedmr", "--equal=clock"], "no column clock: train with --fleet"),
        (["--replay=nothing"], "cannot be read"),
    ],
)
def test_refusals_are_one_line(trained, capsys, flags, words):
    trained(accuracy(0.0))
    assert main([*TINY, *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and error.startswith("fedjax-mr: ")


def test_a_run_that_diverges_ends_the_comparison(trained, capsys):
    trained(lambda config: None if config.strategy == "fedmr" and config.seed == 2 else 0.5)
    assert main(BOTH) == 3
    assert "FedMR diverged with seed 2" in capsys.readouterr().err


def test_a_folder_of_another_comparison_is_refused(trained, capsys):
    trained(accuracy(0.05))
    assert main(BOTH) == 0
    assert main([*BOTH, "--lr=0.2"]) == 2
    assert "both holds another comparison (its methods differ)" in capsys.readouterr().err
    assert main([*BOTH, "--margin=0.2"]) == 0  # the intervals hold for any margin
    assert outcome() == "equal"


def test_tuned_settings_are_compared_on_other_seeds(trained):
    from fedjax_mr.tune import report, rungs, scores
    from fedjax_mr.tune.plan import plan

    tuning = plan([*TINY[:-1], "--strategies=fedavg,fedmr", "--budget=4", "--eta=1", "--tuning_seeds=0,3"])
    standing = rungs.Standing()
    for name in tuning.strategies:
        for trial in tuning.drawn(name):
            standing[trial] = 4, scores.Score(trial.number / 10, 1.0)
            for run in trial.runs:
                run.folder.mkdir(parents=True)
                fmr.config.config.save(run.config, run.folder)
    report.write(tuning, standing)
    asked = trained(accuracy(0.05))
    assert main([*BOTH, f"--tuned={tuning.folder}"]) == 0
    assert min(seed for _, seed in asked) == 4
    found = read()
    assert found["tuning"]["trials"] == {"fedmr": 4, "fedavg": 4}
    assert found["tuning"]["rounds"] == {"fedmr": 32, "fedavg": 32} and found["tuning"]["seeds"] == [0, 3]
    best = standing.best("fedavg")
    assert best is not None and found["methods"][1]["settings"]["lr"] == float(best.choice["lr"])


CONFIG = fmr.Config(
    clients=4, cohort=2, rounds=2, eval_every=1, local_epochs=1, model="logistic", devices=1, progress=False
)


def test_python_trains_in_this_process_and_continues(monkeypatch):
    """Two methods on the digits, really trained; a second call in another folder, stopped once, has the same values."""
    from fedjax_mr.compare import train

    options = {"config": CONFIG, "most_seeds": 2, "block": 2}
    one = fmr.compare("fedavg", "fedmr", **options, folder="one")
    assert repr(one).startswith("Comparison(") and one.names == ["FedAvg", "FedMR"]
    whole, calls = train.run_together, []

    def stop(configs, **objects):
        calls.append(len(configs))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(configs, **objects)

    monkeypatch.setattr(train, "run_together", stop)
    monkeypatch.setattr(train, "pays", lambda config: True)
    with pytest.raises(KeyboardInterrupt):
        fmr.compare("fedavg", "fedmr", **options, folder="two")
    two = fmr.compare("fedavg", "fedmr", **options, folder="two")
    assert calls[0] == 2 and two.ledger["pairs"][0]["seeds"] == [0, 1]
    for ours, theirs in zip(one.ledger["pairs"][0]["values"], two.ledger["pairs"][0]["values"], strict=True):
        assert ours == pytest.approx(theirs, abs=0.01)  # in one program or one by one: rounding alone differs
    assert "most_seeds" in inspect.signature(fmr.compare).parameters and fmr.compare.replay("two").names == two.names
    with pytest.raises(fmr.UserError, match="until"):
        fmr.compare("fedavg", "fedmr", until="soon")
