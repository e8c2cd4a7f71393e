"""Every strategy runs by its name alone on the embedded digits."""

import functools

import pytest

import fedjax_mr as fmr
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.experiment.build import build_model, simulator_of
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.method import strategy_of
from fedjax_mr.experiment.resolve import public_share, resolve
from fedjax_mr.experiment.user_objects import UserObjects
from fedjax_mr.strategies import fedme, on_any_network

NEED_PUBLIC = ("fedme", "pfedhr", "fedmd", "fedkemf", "fccl")


@functools.cache
def problem(public_share):
    """Return the problem of the embedded job, which is the same for all methods but for the public set."""
    config = Config(strategy="fedavg", public_share=public_share)
    federated = federated_data(config)
    return simulator_of(config, federated, build_model(config, federated.dataset)).problem


@pytest.mark.parametrize("strategy", on_any_network())
def test_the_name_is_enough_to_build_it(strategy):
    config, _, notes = resolve(configuration.parse([f"--strategy={strategy}"]))
    assert config.public_share == (0.1 if strategy in NEED_PUBLIC else 0.0)
    assert sum("public" in line and "0.1" in line for line in notes) == (strategy in NEED_PUBLIC)
    again = resolve(config)
    assert again[:2] == (config, UserObjects()) and not any("public" in line for line in again.notes)
    federation = problem(config.public_share)
    assert (federation.public is not None) == (strategy in NEED_PUBLIC)
    assert strategy_of(config)(federation).init is not None


def test_settings_of_the_channel_and_the_clock_without_effect_are_named():
    notes = resolve(configuration.parse(["--compress_ratio=0.5", "--staleness=constant"])).notes
    assert notes == (
        "--compress_ratio has no effect without --compress=topk or randk",
        "--staleness has no effect without --mode=async",
    )


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"strategy": "pfedhr", "public_share": 0.2}, 0.2),
        ({"strategy": "pfedhr", "partition_file": "x.npz"}, 0.0),  # which may hold a public set
        ({"strategy": "fedme", "hyper": fedme.Hyper(clustering=False)}, 0.0),
        ({"strategy": "unknown"}, 0.0),
    ],
)
def test_who_gets_public_data(changes, share):
    assert public_share(Config(**changes)) == share


@pytest.mark.slow
@pytest.mark.parametrize("strategy", on_any_network())
def test_the_name_is_enough_to_run_it(strategy, tmp_path, capsys):
    result = fmr.run(Config(strategy=strategy, rounds=2, devices=1, run_dir=str(tmp_path / "run")))
    assert result.rows[-1]["round"] == 2 and 0 < result.summary["accuracy_last"] <= 1
    needs = f"{strategy} needs public data: 0.1 of the training samples (--public_share=0.1), which no client has\n"
    assert (needs in capsys.readouterr().err) == (strategy in NEED_PUBLIC)
