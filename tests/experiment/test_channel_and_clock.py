"""Runs whose messages go through a channel, and runs in simulated time: columns, resuming, one-line errors."""

import dataclasses
import importlib.util
import json
import shutil
import sys

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.channel import accounting
from fedjax_mr.config import config as configuration
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import guarantee
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.method import build_chosen, chosen
from fedjax_mr.experiment.simulated_time import most_at_once
from fedjax_mr.strategies import fedcross
from fedjax_mr.terminal.messages import with_flags
from fedjax_mr.testing.federations import constants

CONFIG = fmr.Config(
    strategy="fedmr", model="logistic", clients=9, cohort=3, rounds=4, eval_every=2, local_epochs=1, devices=1,
    progress=False,
)  # fmt: skip


def run(folder, **changes):
    return fmr.run(dataclasses.replace(CONFIG, run_dir=str(folder), **changes), record=False)


def numbers(result, names=("accuracy", "loss", "bytes_up")):
    return np.array([[row[name] for name in names] for row in result.rows])


@pytest.mark.slow
def test_compression_changes_the_bytes(tmp_path):
    plain = run(tmp_path / "plain")
    signs = run(tmp_path / "signs", compress="sign", error_feedback="ef")
    assert signs.rows[-1]["bytes_up"] < plain.rows[-1]["bytes_up"] / 25


@pytest.mark.slow
def test_the_clients_of_fedcross_exchange_layers(tmp_path):
    """In a round, the mean of the models keeps its value, and half of the layers go and come."""
    once = {"strategy": "fedcross", "model": "mlp", "rounds": 1, "eval_every": 1}
    once["hyper"] = fedcross.Hyper(selection="in_order")
    (plain,), (ours,) = (run(tmp_path / when, exchange=when, **once).rows for when in ("none", "before_upload"))
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-4) and ours["accuracy"] == plain["accuracy"]
    assert ours["bytes_peer"] == ours["bytes_up"] == plain["bytes_up"] and "bytes_peer" not in plain
    assert 0 < ours["layers_unmoved"] < 1 and 0 < ours["layers_held_by_others"] < 1


EARLIER = {"secure": True, "secure_when": "both", "secure_share": 0.25, "secure_repetitions": 3}


def test_the_exchange_of_layers_was_a_setting_of_fedmr(tmp_path):
    """Its flags, and the settings of recorded runs, are names of the link."""
    today = ["--exchange=both", "--exchange_share=0.25", "--exchange_repetitions=3"]
    flags = ["--fedmr_secure", *(f"--fedmr_{name}={value}" for name, value in EARLIER.items() if value is not True)]
    ours = configuration.parse(today)
    assert ours.exchange == "both" and configuration.parse(flags) == ours
    assert configuration.parse([*flags, "--exchange=before_upload"]).exchange == "before_upload"
    assert configuration.parse(flags[1:]) == configuration.parse(["--nofedmr_secure"]) == configuration.parse([])
    assert configuration.parse([*flags, "--strategy=indep"]).exchange == "none"  # as flags of other methods
    with pytest.raises(UserError, match="fedmr_secure_share=2"):
        configuration.parse([*flags, "--fedmr_secure_share=2"])
    recorded = {flag: value for flag, value in configuration.to_json(ours).items() if not flag.startswith("exchange")}
    for secure in (True, False):
        values = recorded | {f"fedmr_{name}": value for name, value in (EARLIER | {"secure": secure}).items()}
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert configuration.load(tmp_path) == (ours if secure else configuration.parse([]))


@pytest.mark.slow
def test_links_have_columns(tmp_path):
    attacked = run(
        tmp_path / "attacked", attack="sign_flip", attackers=0.34, robust="median", robust_outliers=1, dp_clip=0.1
    )
    assert {"attackers", "rejected"} <= set(attacked.rows[-1])
    assert attacked.rows[0]["clipped"] == 1 and "epsilon" not in attacked.rows[0]


@pytest.mark.skipif(importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting is not installed")
def test_epsilon_grows_and_a_target_is_met(tmp_path):
    private = run(tmp_path / "private", dp_clip=1.0, dp_target_epsilon=50.0, dp_delta=1e-3)
    epsilons = [row["epsilon"] for row in private.rows]
    assert epsilons[0] < epsilons[-1] <= 50.01 and epsilons[-1] > 49


NOISY = dataclasses.replace(CONFIG, dp_clip=1.0, dp_noise=1.0)


PUBLIC = {"attack": "label_flip", "dp_clip": 1.0, "dp_noise": 1.0}  # so that epsilon needs no further package


@pytest.mark.slow
def test_runs_of_one_seed_have_different_noise_and_resume_with_their_own(tmp_path):
    changes = PUBLIC | {"rounds": 1, "eval_every": 1}
    one, other = (run(tmp_path / name, **changes) for name in ("one", "other"))
    assert numbers(one)[0, 1] != numbers(other)[0, 1]
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    resumed = [run(tmp_path / name, **changes | {"rounds": 2, "resume": True}) for name in ("one", "copy")]
    np.testing.assert_array_equal(*map(numbers, resumed))


def test_only_checkpoints_contain_the_secret_of_a_run_and_a_resumed_run_goes_on_with_it(tmp_path, monkeypatch):
    used = []

    def instead_of_training(rounds, progress, count):
        used.append([leaf for leaf in jax.tree.leaves(rounds.constants.build) if leaf.dtype == np.uint32])
        raise UserError("enough")

    monkeypatch.setattr(Rounds, "run", instead_of_training)
    for resume in (False, True):
        with pytest.raises(UserError, match="enough"):
            run(tmp_path / "run", resume=resume, **PUBLIC)
    ((first,), (second,)) = used
    words = Checkpoints(tmp_path / "run" / "checkpoints").meta(0)["secret"]
    assert first.tolist() == second.tolist() == words
    published = "".join(path.read_text() for path in (tmp_path / "run").iterdir() if path.suffix in (".json", ".flags"))
    assert "dp_noise" in published and not any(str(word) in published for word in words)


def test_the_secret_of_a_run(tmp_path):
    drawn = [tuple(guarantee.secret_of(NOISY)) for _ in range(2)]
    assert drawn[0] != drawn[1]
    seeded = dataclasses.replace(NOISY, dp_seed=3, resume=True, run_dir=str(tmp_path))
    np.testing.assert_array_equal(guarantee.secret_of(seeded), [0, 3])
    assert guarantee.secret_of(dataclasses.replace(CONFIG, dp_clip=1.0)) is None
    for round, kept in enumerate(({"secret": [1, 2]}, {"secret": [3, 4]}, {"secret": "56"}, {})):
        Checkpoints(tmp_path / "checkpoints", keep=9).save(round, {}, kept)
    resumed = dataclasses.replace(seeded, dp_seed=None)
    np.testing.assert_array_equal(guarantee.secret_of(resumed), [3, 4])
    assert tuple(guarantee.secret_of(dataclasses.replace(resumed, resume=False))) != (3, 4)


def test_noise_and_cohorts_follow_from_the_secret_but_cohorts_not_where_simulated_time_shows_them():
    problem = constants("linear").problem
    secret = np.asarray([1, 2], np.uint32)
    selects = lambda config: build_chosen(chosen(config, secret=secret), problem).select is not None
    assert selects(NOISY) and not selects(dataclasses.replace(NOISY, fleet="uniform"))


@pytest.mark.parametrize(
    ("changes", "sampling"),
    [
        ({}, "without_replacement"),
        ({"fleet": "uniform"}, "public"),
        ({"attack": "label_flip"}, "public"),
        ({"attack": "alie"}, "public"),
        ({"strategy": "scaffold"}, "public"),
    ],
    ids=str,
)
def test_cohorts_that_somebody_can_know_are_accounted_as_public(monkeypatch, changes, sampling):
    seen = []
    monkeypatch.setattr(accounting, "epsilon", lambda rounds, **settings: seen.append(settings["sampling"]))
    guarantee.epsilon_after(dataclasses.replace(NOISY, **changes), constants("linear").problem)
    assert seen == [sampling]


def test_a_resumed_run_with_a_target_names_the_flag_that_was_set(tmp_path):
    """More rounds need more noise than the run was trained with."""
    configuration.save(dataclasses.replace(CONFIG, dp_clip=1.0, dp_noise=2.0), tmp_path)
    resumed = dataclasses.replace(CONFIG, dp_clip=1.0, dp_target_epsilon=8.0, run_dir=str(tmp_path), resume=True)
    guarantee.require_noise_of_run(resumed, 2.0)
    with pytest.raises(UserError) as error:
        guarantee.require_noise_of_run(dataclasses.replace(resumed, rounds=8), 4.0)
    line = with_flags(str(error.value), "fedmr")
    assert line.startswith("--dp_target_epsilon=8 needs the noise 4 for 8 rounds, but ")
    assert line.endswith("was trained with 2: resume it with --dp_noise=2.0, without --dp_target_epsilon")


def test_without_the_accounting_package_noise_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match="dp-accounting"):
        run(tmp_path / "noise", dp_clip=1.0, dp_noise=1.0)
    assert not (tmp_path / "noise").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dp_noise": 1.0}, "dp_noise=1 needs dp_clip="),
        ({"dp_clip": 1.0, "dp_noise": 1.0, "dp_target_epsilon": 2.0}, "leave dp_noise= out"),
        ({"dp_clip": 1.0, "dp_poisson": 0.1}, "add dp_noise_on=mean"),
        ({"dp_clip": 1.0, "dp_poisson": 0.1, "dp_noise_on": "mean", "dp_quantile": 0.5}, "leave dp_quantile= out"),
        ({"dp_clip": 1.0, "dp_poisson": 0.1, "dp_noise_on": "mean", "attack": "alie"}, "attackers add no noise"),
        ({"dp_clip": 1.0, "dp_noise_on": "mean", "attack": "label_flip"}, "use dp_noise_on=upload"),
        ({"dp_clip": 1.0, "dp_seed": 0}, "this run adds none"),
        (
            {"strategy": "scaffold", "dp_clip": 1.0, "dp_poisson": 0.1, "dp_noise_on": "mean"},
            "needs clients without a memory",
        ),
        ({"dp_clip": 1.0, "dp_noise": 1.0, "mode": "async"}, "epsilon of asynchronous clients"),
        ({"mode": "async", "compress_download": "int8"}, "use compress_download=none"),
        ({"strategy": "fml", "model": "logistic,mlp", "mode": "async"}, "different networks"),
        ({"error_feedback": "ef"}, "needs compress="),
        ({"robust": "krum", "robust_outliers": 1}, "cohort"),
        ({"strategy": "fedavg", "dp_clip": 1.0}, "numbers of samples"),
        ({"strategy": "local", "compress": "int8"}, "upload no"),
        ({"fleet": "unifrom"}, "did you mean 'uniform'"),
        ({"mode": "async", "in_flight": 2}, "in_flight=2 is below cohort=3"),
        ({"mode": "async", "in_flight": 10}, "too few"),
        ({"strategy": "fedmr", "mode": "async", "in_flight": 4, "refill": "arrival"}, "use refill=update"),
        ({"strategy": "fedmr", "mode": "async", "server_optimizer": "adam"}, "models that clients are training"),
        ({"strategy": "clusamp", "fleet": "uniform"}, "selects its clients itself"),
        ({"deadline": -1.0}, "deadline=-1.0 is out of range"),
        ({"over_select": 0.9}, "over_select=0.9 is out of range"),
        ({"over_select": 4.0}, "over_select=4 asks 12 of 9 clients"),
        ({"deadline": 0.5}, "deadline=0.5 is met by no client"),
        ({"late": "partial"}, "needs deadline="),
        ({"mode": "async", "over_select": 2.0}, "for synchronous rounds"),
        ({"deadline": 9.0, "robust": "median"}, "deadline= drops uploads, which robust="),
        ({"deadline": 9.0, "dp_clip": 1.0, "dp_quantile": 0.5}, "deadline= drops uploads, which dp_quantile="),
    ],
    ids=str,
)
def test_bad_settings_have_one_line(tmp_path, changes, words):
    with pytest.raises(UserError, match=words) as error:
        run(tmp_path / "run", **changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_simulated_time(tmp_path):
    """A synchronous round lasts as long as its slowest client; the column changes nothing else."""
    plain, timed = run(tmp_path / "plain"), run(tmp_path / "timed", fleet="classes")
    np.testing.assert_array_equal(numbers(plain), numbers(timed))
    clock = [row["clock"] for row in timed.rows]
    assert 0 < clock[0] < clock[1]
    same = run(tmp_path / "same", fleet="classes", mode="async", in_flight=3)  # no upload is stale
    np.testing.assert_array_equal(numbers(plain), numbers(same))
    assert [row["clock"] for row in same.rows] == clock


@pytest.mark.slow  # quick: test_simulated_time
def test_the_clock_counts_the_bytes_that_are_sent(tmp_path):
    """Downloads, too; and rows of a wave without a client do not count in the means of the clients."""
    whole = run(tmp_path / "whole", fleet="lognormal", rounds=2)
    small = run(tmp_path / "small", fleet="lognormal", rounds=2, compress_download="int8")
    assert small.rows[-1]["clock"] < whole.rows[-1]["clock"]
    late = run(tmp_path / "late", mode="async", in_flight=6, cohort=2, eval_every=1, dp_clip=1e-4)
    assert {row["clipped"] for row in late.rows} <= {1.0, None} and late.rows[0]["clipped"] == 1.0


@pytest.mark.slow
def test_deadlines_and_more_clients_than_needed(tmp_path):
    """The columns: late clients, and the bytes of the uploads that the server takes. Resumed in the middle."""
    changes = {"fleet": "classes", "deadline": 250.0, "over_select": 1.5, "late": "partial"}
    whole = run(tmp_path / "whole", **changes)
    assert whole.rows[-1]["clock"] <= 4 * 250
    assert all(row["late"] >= 2 for row in whole.rows)
    assert whole.rows[-1]["bytes_down"] / 5 >= whole.rows[-1]["bytes_up"] / 3
    run(tmp_path / "parts", **changes | {"rounds": 2})
    parts = run(tmp_path / "parts", resume=True, **changes)
    np.testing.assert_array_equal(
        *(numbers(each, ("accuracy", "loss", "bytes_up", "clock")) for each in (whole, parts))
    )


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 3), ({"over_select": 1.5}, 5), ({"mode": "async"}, 6), ({"mode": "async", "in_flight": 4}, 4)],
    ids=str,
)
def test_cores_are_set_up_for_all_clients_that_train_at_once(changes, count):
    assert most_at_once(dataclasses.replace(CONFIG, **changes)) == count


def test_asynchronous_runs_resume_and_go_on(tmp_path):
    late = {"fleet": "lognormal", "mode": "async", "in_flight": 6, "compress": "sign", "error_feedback": "ef"}
    whole = run(tmp_path / "whole", **late)
    assert whole.rows[-1]["staleness_max"] >= 1 and "clock" in whole.rows[-1]
    run(tmp_path / "parts", rounds=2, **late)
    parts = run(tmp_path / "parts", resume=True, **late)
    names = ("accuracy", "loss", "bytes_up", "clock", "staleness")
    np.testing.assert_array_equal(numbers(whole, names), numbers(parts, names))
