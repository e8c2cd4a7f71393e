"""Small federations of real clients: Flower's own processes on this machine, and the simulator's numbers."""

import importlib.util
import os
import signal

import deployment
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import config as configuration
from fedjax_mr.deploy import __main__ as command
from fedjax_mr.engine.round import Progress
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import read_rows, read_summary
from fedjax_mr.testing.federations import tree_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="real clients need the extra deploy"),
]
FLAGS = [
    *("--dataset=digits", "--model=mlp", "--clients=2", "--cohort=2", "--rounds=3", "--eval_every=1"),
    *("--local_epochs=1", "--client_test_share=0.2", "--devices=1", "--lanes=1", "--noprogress"),
]


@pytest.fixture(params=["scaffold", "fedme --nofedme_clustering"])
def app(request, tmp_path):
    """The app of a federation in tmp_path / app, its samples, and the simulator's result."""
    flags = [*FLAGS, *f"--strategy={request.param}".split()]
    simulated = fmr.run(configuration.parse([*flags, f"--run_dir={tmp_path / 'simulated'}"]))
    folder = tmp_path / "app"
    assert command.main(["new", str(folder), *flags]) == 0
    assert command.main(["divide", str(folder / "data"), *flags]) == 0
    return folder, simulated


def test_a_killed_server_goes_on_with_the_simulators_bits(app, tmp_path):
    """Of a method whose clients have a memory, and of one with personal models; the ServerApp dies after a round."""
    folder, simulated = app
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    with deployment.federation(tmp_path / "flower") as flower:
        flower.superlink()
        for client in range(2):
            state = folder / f"state-{client}"
            data = folder / "data" / f"client-{client}.npz"
            flower.supernode(client, {"client-id": client, "data": str(data), "state": str(state)})
        run = flower.run(folder)
        deployment.wait_for(lambda: (checkpoints.latest() or 0) >= 1, 240, f"round 1: {flower.log('run')}")
        for pid in flower.children("superlink", "flwr-serverapp"):
            os.kill(pid, signal.SIGKILL)
        flower.flwr("stop", run, deployment.NAME, check=False)
        assert (checkpoints.latest() or 0) < 3
        assert "completed" in flower.finish(flower.run(folder, name="again"), 400, name="again"), flower.log("again")
    known = np.zeros(2, np.int32) if simulated.summary["strategy"] == "scaffold" else None  # of the clients' memory
    progress, _ = checkpoints.restore(Progress(simulated.state, known, np.int32(0)), 3)
    tree_equal(progress.server, simulated.state)
    drop = lambda row: {name: value for name, value in row.items() if name != "seconds"}
    assert [drop(row) for row in read_rows(folder / "run")] == [drop(row) for row in simulated.rows]
    assert read_summary(folder / "run")["accuracy_last"] == simulated.summary["accuracy_last"]
