"""The search space: what a file may hold, and which trials come from it."""

import math
from pathlib import Path

import numpy as np
import pytest

from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.results import kept
from fedjax_mr.tune import space as spaces

FILE = """# the rates
--lr=log:0.001:0.1
--fedprox_mu=0.001,0.01   # only FedProx
--momentum=lin:0:0.9
--batch_size=log:4:64
"""


@pytest.fixture
def space():
    Path("a.flags").write_text(FILE)
    return spaces.read("a.flags")


def test_a_file_and_its_lines(space):
    assert [each.line() for each in space] == [
        "--lr=log:0.001:0.1", "--fedprox_mu=0.001,0.01", "--momentum=lin:0:0.9", "--batch_size=log:4:64",
    ]  # fmt: skip
    assert [each.flag for each in spaces.of_method(space, "fedavg").values()] == ["lr", "momentum", "batch_size"]
    assert len(spaces.of_method(space, "fedprox")) == 4


def test_the_default_is_the_learning_rate_around_the_given_one():
    (lr,) = spaces.default(Config(lr=0.02))
    assert lr.line() == "--lr=log:0.002:0.2"


def test_methods_share_their_draws_and_more_trials_begin_with_the_same_ones(space):
    """Trial i has the same learning rate for all methods, so that no method is luckier than another."""
    of = lambda strategy, count: spaces.draw(space, strategy, count, seed=3)
    fedavg, fedprox = of("fedavg", 8), of("fedprox", 8)
    assert [each["lr"] for each in fedavg] == [each["lr"] for each in fedprox]
    assert [each["momentum"] for each in fedavg] == [each["momentum"] for each in fedprox]
    assert "fedprox_mu" not in fedavg[0] and len({each["fedprox_mu"] for each in fedprox}) == 2
    assert of("fedavg", 20)[:8] == fedavg
    assert spaces.draw(space, "fedavg", 8, seed=4) != fedavg


def test_draws_cover_a_range_evenly(space):
    """Each eighth of the logarithmic range has one of eight trials, and no value is outside of its range."""
    draws = spaces.draw(space, "fedprox", 8, seed=0)
    shares = [math.log(float(each["lr"]) / 0.001) / math.log(100) for each in draws]
    assert sorted(min(7, int(8 * share)) for share in shares) == list(range(8))
    assert all(0 <= float(each["momentum"]) <= 0.9 and 4 <= int(each["batch_size"]) <= 64 for each in draws)


def test_rounded_values_stay_in_their_range():
    momentum = spaces.Dimension("momentum", low=0.99, high=0.9999)
    assert momentum.ends() == ("0.99", "0.9999") and float(momentum.at(np.float64(0.999))) < 1


def test_a_whole_grid_within_the_budget_is_tried_completely():
    Path("grid.flags").write_text("--lr=0.1,0.2\n--fedprox_mu=1,2,3\n")
    grid = spaces.read("grid.flags")
    assert spaces.draw(grid, "fedavg", 8, seed=0) == [{"lr": "0.1"}, {"lr": "0.2"}]
    assert len(spaces.draw(grid, "fedprox", 6, seed=0)) == 6
    five = spaces.draw(grid, "fedprox", 5, seed=0)
    assert len({tuple(each.items()) for each in five}) == 5


def test_a_space_with_fewer_settings_than_the_budget_ends():
    Path("short.flags").write_text("--local_epochs=lin:1:3\n")
    assert sorted(each["local_epochs"] for each in spaces.draw(spaces.read("short.flags"), "fedavg", 9, 0)) == [*"123"]


def test_a_value_may_set_others():
    Path("pairs.flags").write_text("--optimizer=sgd+lr=0.1,adam+lr=0.001\n")
    assert spaces.draw(spaces.read("pairs.flags"), "fedavg", 2, 0) == [
        {"optimizer": "sgd", "lr": "0.1"}, {"optimizer": "adam", "lr": "0.001"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("--lr=log:0:1", ["a.flags, line 1", "above 0"]),
        ("\n--lr=log:1:0.1", ["line 2", "below the second"]),
        ("--lr=log:a:1", ["not numbers"]),
        ("--lr=log:1", ["two ends"]),
        ("--lr=", ["--flag=values"]),
        ("lr=0.1", ["--flag=values"]),
        ("--lr=0.1,,1", ["empty value"]),
        ("--lt=0.1", ["'lt'", "did you mean 'lr'?"]),
        ("--model=log:1:2", ["only numbers have ranges"]),
        ("--batch_size=lin:1:2.5", ["not numbers of this flag"]),
        ("--alpha=0.1,1", ["--alpha describes the problem"]),
        ("--rounds=10,20", ["--rounds describes the problem"]),
        ("--lr=0.1\n--lr=0.2", ["--lr twice"]),
        ("--optimizer=sgd,adam+lr=0.001\n--lr=0.1", ["--lr twice"]),
        ("--lr=0.1,0.2+seed=1", ["line 1", "--seed describes the problem"]),
        ("# nothing", ["no flag to search"]),
    ],
)
def test_a_bad_file_is_one_line(text, parts):
    Path("a.flags").write_text(text)
    with pytest.raises(UserError) as error:
        spaces.read("a.flags")
    assert all(part in str(error.value) for part in parts), error.value


def test_a_large_space_is_refused_or_drawn_from_without_being_listed():
    Path("space.flags").write_text("--lr=" + ",".join(map(str, range(1, 200_001))))
    with pytest.raises(UserError, match=r"line 1: --lr has 200,000 values, more than 1,000: write a range"):
        spaces.read("space.flags")
    many = ",".join(map(str, range(1, 1001)))
    Path("space.flags").write_text(f"--lr={many}\n--local_epochs={many}\n--batch_size={many}")
    space = spaces.read("space.flags")
    assert spaces.grid(space, "fedavg", 100) is None and len(spaces.draw(space, "fedavg", 4, 0)) == 4


def test_a_missing_file_is_one_line():
    with pytest.raises(UserError, match=r"cannot read --space=absent.flags \(No such file"):
        spaces.read("absent.flags")


def test_the_trials_of_the_kept_record_are_drawn_again():
    """Other points for the same seed would leave half-finished tunings, and the record's, without their trials."""
    experiments = Path(__file__).parents[2] / "experiments"
    space = spaces.read(experiments / "record_space.txt")
    kept_trials: dict[str, list[dict[str, str]]] = {}
    for path in kept.find(experiments / "results" / "cifar10_equal_tuning.jsonl.gz"):
        config = configuration.load(path)
        flags = dict(flag[2:].split("=", 1) for flag in configuration.to_flags(config) if "=" in flag)
        searched = {each.flag: flags[each.flag] for each in spaces.of_method(space, config.strategy).values()}
        kept_trials.setdefault(config.strategy, []).append(searched)
    assert len(kept_trials) == 8
    for strategy, trials in kept_trials.items():
        in_order = lambda choices: sorted(choices, key=lambda each: each["lr"])
        assert in_order(trials) == in_order(spaces.draw(space, strategy, 6, seed=0))
