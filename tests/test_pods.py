"""What the compiled rounds move between devices: the figures of the table's script against the bound."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_mr.engine.clients import ClientAxis, client_axis

SCRIPT = Path(__file__).parent.parent / "experiments" / "lab" / "pods.py"


def measured(**options):
    flags = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run([sys.executable, SCRIPT, "--json", *flags], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows):
    """Clients train without a word to each other, and K states go out and come back once, with 10 % to spare."""
    for row in rows:
        assert row["collectives_of_clients"] == 0, row
        devices, count = row["devices"], row["devices"] * row["clients_per_device"]
        moved = 2 * (devices - 1) / devices * count * row["state_bytes"]
        # The least that can be: a program in which the counter sees nothing must not pass.
        assert 0.99 * moved <= row["all_to_all_bytes"] <= 1.1 * moved, row
        assert row["other_bytes"] <= 0.1 * moved or row["model"] == "logistic", row


@pytest.mark.slow
def test_a_round_moves_no_more_than_the_models():
    rows = measured(models="logistic", strategies="fedmr", devices="4", cohort=8)
    assert [(row["model"], row["devices"]) for row in rows] == [("logistic", 4)]
    check(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategies"), [("lenet5", "fedmr,fedcross,indep,dpsgd"), ("resnet20", "fedmr,fedcross,indep")]
)
def test_the_bound_on_real_networks(model, strategies):
    """Without a server, neighbours' models cost no more: an all-gather of all models would exceed the bound."""
    rows = measured(models=model, strategies=strategies, devices="2,8", cohort=16)
    assert len(rows) == 2 * len(strategies.split(","))
    check(rows)


class Axis(ClientAxis):
    """A layout of D devices that need not exist."""

    count: int

    def __init__(self, devices):
        object.__setattr__(self, "count", devices)

    @property
    def num_devices(self):
        return self.count


@pytest.mark.parametrize(
    ("shape", "devices", "cut"),
    [
        ((16, 400, 120), 8, (None, "clients")),  # both divide evenly: the longer one
        ((16, 5, 5, 6, 16), 8, (None, None, None, None, "clients")),
        ((16, 84, 10), 8, (None, "clients")),  # 84 is filled up to 88, 10 would be to 16
        ((16, 120), 1, ()),
        ((16,), 8, ()),
        ((16, 3), 8, (None, "clients")),  # 3 of 8 devices hold something: still less than a copy on each
        ((16, 1), 8, ()),
    ],
)
def test_how_a_leaf_is_divided(shape, devices, cut):
    assert tuple(Axis(devices).parameter_spec(shape)) == cut


def test_division_over_parameters_changes_no_number():
    axis = client_axis(devices=1, lanes=1, cohort_size=4)
    tree = {"kernel": np.ones((4, 3, 2), np.float32)}
    assert axis.by_parameters(tree, rows=(4,)) is tree  # one device: nothing to do
    assert jax.tree.leaves(axis.state_placement(tree, rows=(4,))) == [axis.server_device]
