"""One client with a well-formed reply neither ends a federation nor spoils its newest checkpoint."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_mr.client.local import Metrics
from fedjax_mr.deploy import wire
from fedjax_mr.deploy.remote import RemoteClients, too_large
from fedjax_mr.deploy.server import RemoteExperiment
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.experiment import Experiment


def reader(*, finite=True, lost="wait"):
    """The server's check of replies with two weights."""
    remote = object.__new__(RemoteClients)
    remote.exchange, remote._finite = None, finite
    remote.manager = SimpleNamespace(policy=SimpleNamespace(lost=lost))
    remote._constants = SimpleNamespace(problem=SimpleNamespace(cohort_size=2))
    remote._answer = ({"model": {"w": np.zeros(2, np.float32)}}, report())
    return lambda reply: remote._read(0, reply)


def report(loss=1.0, bad_step=-1):
    return Metrics(np.float32(loss), np.int32(8), np.int32(2), np.int32(bad_step))


def reply(weights=(1.0, 2.0), **metrics):
    upload = {"model": {"w": np.asarray(weights, np.float32)}}
    return {"upload": wire.pack(upload), "metrics": wire.pack(report(**metrics))}


@pytest.mark.parametrize("lost", ["wait", "untrained", "stop"])
@pytest.mark.parametrize(
    ("invalid", "words"),
    [
        ({"bad_step": 0, "loss": np.nan}, "not finite since its local step 0"),
        ({"bad_step": 1}, "not finite since its local step 1"),
        ({"loss": np.inf}, "no step at which training diverged"),
        ({"weights": (1.0, 3e38)}, "'model/w' has numbers that are too large"),
        ({"weights": (1.0, -2e19)}, "'model/w' has numbers that are too large"),
        ({"weights": (1.0, np.nan)}, "numbers that are not finite"),
    ],
    ids=str,
)
def test_a_reply_that_would_spoil_the_model_is_invalid(invalid, words, lost):
    """The manager asks such a client again, or goes on without it. It does not end the run as a divergence."""
    read = reader(lost=lost)
    with pytest.raises(UserError, match=words):
        read(reply(**invalid))
    upload, metrics = read(reply())
    np.testing.assert_array_equal(upload["model"]["w"], [1, 2])
    assert metrics.bad_step == -1


def test_with_allow_nonfinite_everything_is_accepted():
    upload, metrics = reader(finite=False)(reply((np.nan, 3e38), loss=np.nan, bad_step=0))
    assert np.isnan(upload["model"]["w"][0]) and metrics.bad_step == 0


def test_numbers_are_too_large_if_their_squares_are():
    tree = {"a": np.float32([1e19]), "b": np.float32([2e19]), "c": np.int32([2**31 - 1]), "d": np.float32([np.nan, 0])}
    assert too_large(tree) == ["b", "d"]
    assert too_large(np.full(400, 1e18, np.float32)) == ["tree"]  # 400 squares of 1e36


def test_a_server_state_from_which_no_client_could_train_is_not_saved(monkeypatch):
    saved = []
    monkeypatch.setattr(Experiment, "record_due", lambda self, progress, report, done, stop: saved.append(done))
    experiment = object.__new__(RemoteExperiment)
    experiment.config = SimpleNamespace(allow_nonfinite=False)
    experiment.folder = SimpleNamespace(path=Path("run"))
    experiment.checkpoints = SimpleNamespace(latest=lambda: 4)
    experiment._large_at_start = ["norm"]
    state = lambda weight: SimpleNamespace(server={"w": np.float32([weight]), "norm": np.float32(np.inf)})
    experiment.record_due(state(1.0), None, 4)
    for weight in (1e38, np.nan):
        with pytest.raises(UserError, match=r"round 5: .*\(w\), so it is not saved; the checkpoint of round 4 in run"):
            experiment.record_due(state(weight), None, 5)
    experiment.config.allow_nonfinite = True
    experiment.record_due(state(np.nan), None, 6)
    assert saved == [4, 6]
