"""Federations of Flower's own processes whose server is killed: FedMR, clients with a memory, and with own models."""

import importlib.util
import os
import signal

import pytest

import deployment
import fedjax_mr as fmr
from fedjax_mr.deploy import __main__ as command
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import read_rows
from fedjax_mr.testing.federations import tree_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed (the extra deploy)"),
]
FLAGS = (
    "--dataset=digits --model=mlp --clients=2 --cohort=2 --rounds=3 --eval_every=1 --local_epochs=1 "
    "--client_test_share=0.2 --devices=1 --lanes=1 --noprogress"
)


@pytest.mark.parametrize("method", ["fedmr", "scaffold", "fedme --nofedme_clustering"])
def test_a_killed_server_goes_on_with_the_simulators_bits(method, tmp_path):
    """The server's state, and every row of the metrics, among them the tests of the clients' own models."""
    folder, flags = tmp_path / "app", [*FLAGS.split(), *f"--strategy={method}".split()]
    for each in (["new", str(folder), *flags], ["divide", str(folder / "data"), *flags]):
        assert command.main(each) == 0
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    with deployment.federation(tmp_path / "flower") as flower:
        flower.python("fedjax_mr.main", *flags, f"--run_dir={tmp_path / 'simulated'}")  # not with the options of tests
        flower.superlink()
        for client in range(2):
            own = {"data": f"{folder}/data/client-{client}.npz", "state": f"{folder}/state-{client}"}
            flower.supernode(client, {"client-id": client, **own})
        run = flower.run(folder)
        deployment.wait_for(lambda: (checkpoints.latest() or 0) >= 1, 300, f"round 1: {flower.log('run')}")
        for pid in flower.children("superlink", "flwr-serverapp"):
            os.kill(pid, signal.SIGKILL)
        flower.flwr("stop", run, deployment.NAME, check=False)
        assert (checkpoints.latest() or 0) < 3
        again = flower.run(folder, name="again")
        assert "completed" in flower.finish(again, 500, name="again"), flower.log("again")
    simulated, real = fmr.load(tmp_path / "simulated"), fmr.load(folder / "run")
    tree_equal(real._progress.server, simulated._progress.server)
    drop = lambda row: {name: value for name, value in row.items() if name != "seconds"}
    assert [drop(row) for row in read_rows(folder / "run")] == [drop(row) for row in simulated.rows]
