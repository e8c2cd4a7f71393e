"""One client with a well-formed reply neither ends a federation nor spoils its newest checkpoint."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedjax_mr.client.local import Metrics, score_outputs
from fedjax_mr.deploy import wire
from fedjax_mr.deploy.remote import RemoteClients, scores_of, too_large
from fedjax_mr.deploy.server import RemoteExperiment
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.experiment import Experiment
from fedjax_mr.tasks import Classification, Metric, Regression, with_metrics


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


# --- Tests of the clients' own models ---------------------------------------------------------------------------------

OWN = Metric("own", lambda task, outputs, targets, mask: mask.sum(), lambda sums: sums / 6, unit="fraction")
CLASSES = with_metrics(Classification(width=3), ["macro_f1", "recall", "auroc_of_class", "ece", OWN])
NUMBERS = with_metrics(Regression(width=2, mean=(50.0,), std=(9.0,)))
MOVED = np.array([[-3, 3, 0], [0, 0, 0], [0, 0, 0]], np.float32)
SAMPLES = {"test": 5, "validation": 0}


scored = jax.jit(score_outputs, static_argnums=0)


def reader_of_tests(task, *, finite=True):
    """The server's check of a client's test with two networks, and the scores of an honest client."""
    remote = object.__new__(RemoteClients)
    remote._finite = finite
    model = SimpleNamespace(task=task, input_shape=(4,), networks=(None, None))
    member = SimpleNamespace(test_size=SAMPLES["test"], validation_size=SAMPLES["validation"])
    remote.manager = SimpleNamespace(members={7: member})
    remote._constants = SimpleNamespace(problem=SimpleNamespace(model=model))
    remote._scores = scores_of(model)
    random = np.random.default_rng(0)
    outputs = random.normal(size=(6, task.width)).astype(np.float32)
    targets = np.array([0, 0, 1, 1, 1, 1]) if task is CLASSES else 50 + 9 * random.normal(size=(6, 2))
    score = lambda count: scored(task, outputs, targets.astype(task.dtype), np.float32(np.arange(6) < count))
    scores = {name: score(count) for name, count in SAMPLES.items()}
    record = wire.pack(scores | {"architecture": np.int32(1)})
    return lambda record, **options: remote.read(7, {"scores": record}, **options), record


@pytest.mark.parametrize("task", [CLASSES, NUMBERS], ids=["classes", "numbers"])
def test_the_sums_of_all_metrics_arrive_as_they_were_sent(task):
    """Class 2 has no samples, so its recall and its AUROC are NaN, as is everything without validation samples."""
    read, record = reader_of_tests(task)
    scores = read(record)
    for name, sent in wire.pack(scores).items():
        np.testing.assert_array_equal(sent, record[name])
    values = task.values(scores["test"].metrics)
    if task is CLASSES:
        assert set(scores["test"].metrics) == {"macro_f1", "recall", "auroc_of_class", "ece", "own"}
        np.testing.assert_array_equal(np.isnan(values["recall"]), [False, False, True])
        assert np.isnan(values["auroc_of_class"][2])
    else:
        assert record["test/metrics/rmse/count"] == 5 and all(np.isfinite(list(values.values())))
    assert scores["test"].count == 5 and scores["validation"].count == 0


def changed(name, function, *, dtype=None):
    """A fault that replaces an array of a record by a function of it, in the same type if none is given."""
    return lambda record: record | {name: np.asarray(function(record[name]), dtype or record[name].dtype)}


FALSE_TESTS = {
    "more samples": (CLASSES, changed("test/count", lambda x: x + 1), "reports 6 samples, but it has 5"),
    "fewer samples": (CLASSES, changed("test/count", lambda x: x - 1), "reports 4 samples, but it has 5"),
    "samples for validation": (NUMBERS, changed("validation/count", lambda x: x + 1), "1 samples, but it has 0"),
    "an F1 above 1": (CLASSES, changed("test/metrics/macro_f1", lambda x: x * [[9], [1], [1]]), "macro_f1 [1-9]"),
    "a recall below 0": (CLASSES, changed("test/metrics/recall", lambda x: x + MOVED), "recall -"),
    "an own share": (CLASSES, changed("test/metrics/own", lambda x: 2 * x), "own 1.66667, which is not"),
    "a sum without a number": (NUMBERS, changed("test/metrics/rmse/total", lambda x: np.nan * x), "not finite"),
    "an infinite histogram": (CLASSES, changed("test/metrics/auroc_of_class", lambda x: x + np.inf), "not finite"),
    "a loss without a number": (NUMBERS, changed("test/loss", lambda x: np.nan * x), "'test/loss' has numbers"),
    "fewer classes": (CLASSES, changed("test/metrics/recall", lambda x: x[:2]), r"recall' is .*\[2, 3\], expected"),
    "another type": (CLASSES, changed("test/metrics/recall", lambda x: x, dtype=np.float64), "is float64"),
    "no sums": (NUMBERS, lambda record: {k: record[k] for k in record if "r2" not in k}, "lacks '.*r2/count'"),
    "a third network": (NUMBERS, changed("architecture", lambda x: x + 1), "of network 2, but there are 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", FALSE_TESTS)
def test_a_false_test_is_refused_in_one_line(name):
    task, fault, words = FALSE_TESTS[name]
    read, record = reader_of_tests(task)
    with pytest.raises(UserError, match=words) as refused:
        read(fault(record))
    assert str(refused.value).startswith("its test") and "\n" not in str(refused.value)


def test_a_fine_tuned_model_may_have_diverged():
    read, record = reader_of_tests(NUMBERS)
    record["test/loss"] = np.asarray(np.nan, np.float32)
    assert np.isnan(read(record, epochs=2)["test"].loss)
    assert np.isnan(reader_of_tests(NUMBERS, finite=False)[0](record)["test"].loss)


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
