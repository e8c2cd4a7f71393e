"""Tasks as values: what their data must be, their facts, their metrics, and tasks and metrics of a user."""

import dataclasses
import functools
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.errors import UserError
from fedjax_mr.tasks import (
    METRICS,
    TASKS,
    Classification,
    Language,
    Metric,
    Multilabel,
    Regression,
    Segmentation,
    Survival,
    Task,
    of_facts,
    suits,
    with_metrics,
)
from fedjax_mr.tasks.regression import STRATA
from fedjax_mr.tasks.survival import times_of

OURS = {
    "classification": Classification(width=3),
    "multilabel": Multilabel(width=2),
    "regression": Regression(width=2, mean=(0.1, 2.0), std=(1 / 3, 4.0), unit="mm"),
    "segmentation": Segmentation(width=3),
    "language": Language(width=9),
    "survival": Survival(times=(0.1, 2.5)),
}
IMAGES, VECTORS, TEXTS = np.zeros((4, 5, 6, 1), np.float32), np.zeros((4, 7), np.float32), np.zeros((4, 5), np.int32)
GOOD = {
    "classification": (IMAGES, np.array([0, 2, 1, 1], np.int64)),
    "multilabel": (VECTORS, np.array([[0, 1], [1, 1], [-1, 0], [0, 0]], np.int8)),
    "regression": (VECTORS, np.ones((4, 2), np.float64)),
    "segmentation": (IMAGES, np.full((4, 5, 6), -1, np.int32)),
    "language": (TEXTS, np.full((4, 5), 8, np.int32)),
    "survival": (VECTORS, np.array([[1, 0], [0, 1], [3, 1], [2.5, 0]], np.float32)),
}


def test_every_task_is_tested():
    assert set(OURS) == set(GOOD) == set(TASKS)
    assert all(type(task) is TASKS[name] and task.name == name for name, task in OURS.items())


# --- targets ---------------------------------------------------------------------------------------------------------


def changed(y, row, value):
    y = y.copy()
    y[row] = value
    return y


@pytest.mark.parametrize("name", OURS)
def test_good_targets_are_accepted(name):
    OURS[name].check(*GOOD[name], "client 3")
    OURS[name].check(*(each[:0] for each in GOOD[name]), "client 3")


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("classification", lambda x, y: (x, y[:, None]), "one integer label per sample, not int64 of shape (4, 1)"),
        ("classification", lambda x, y: (x, y / 2), "needs one integer label per sample, not float64 of shape (4,)"),
        ("classification", lambda x, y: (x, changed(y, 2, 3)), "has label 3 in row 2, outside 0..2"),
        ("classification", lambda x, y: (x, changed(y, 1, -1)), "has label -1 in row 1, outside 0..2"),
        ("multilabel", lambda x, y: (x, y[:, 0]), "needs integers of shape (2,)"),
        ("multilabel", lambda x, y: (x, y.astype(bool)), "needs integers of shape (2,)"),
        ("multilabel", lambda x, y: (x, changed(y, (3, 1), 2)), "has label 2 in row 3, outside 0..1 (-1: unknown)"),
        ("regression", lambda x, y: (x, y.astype(int)), "needs floating-point numbers of shape (2,)"),
        ("regression", lambda x, y: (x, y.astype(str)), "needs floating-point numbers of shape (2,)"),
        ("regression", lambda x, y: (x, y > 0), "needs floating-point numbers of shape (2,)"),
        ("regression", lambda x, y: (x, y[:, :1]), "not float64 of shape (1,)"),
        ("regression", lambda x, y: (x, changed(y, 2, np.nan)), "has a target that is missing or not finite in row 2"),
        ("regression", lambda x, y: (x, changed(y, 1, np.inf)), "has a target that is missing or not finite in row 1"),
        ("segmentation", lambda x, y: (x[..., 0], y), "needs images [height, width, channels] for segmentation"),
        ("segmentation", lambda x, y: (x, y[:, :4]), "needs integers of shape (5, 6)"),
        ("segmentation", lambda x, y: (x, changed(y, (1, 2, 3), 3)), "label 3 in row 1, outside 0..2 (-1: unknown)"),
        ("language", lambda x, y: (x.astype(float), y), "needs tokens [T] of integers for language, not float64"),
        ("language", lambda x, y: (x, y[:, 0]), "needs integers of shape (5,)"),
        ("language", lambda x, y: (x, changed(y, (2, 0), 9)), "has label 9 in row 2, outside 0..8 (-1: unknown)"),
        ("survival", lambda x, y: (x, y[:, 0]), "needs floating-point numbers of shape (2,)"),
        ("survival", lambda x, y: (x, changed(y, (1, 0), -2)), "has a negative time in row 1"),
        ("survival", lambda x, y: (x, changed(y, (2, 1), 0.5)), "has event 0.5 in row 2: 1 is an event"),
        ("survival", lambda x, y: (x, changed(y, (2, 0), np.nan)), "missing or not finite in row 2"),
    ],
)  # fmt: skip
def test_bad_targets_are_refused_in_one_line(name, fault, message):
    with pytest.raises(UserError) as refused:
        OURS[name].check(*fault(*GOOD[name]), "client 3")
    found = str(refused.value)
    assert found.startswith("client 3 ") and message in found and "\n" not in found


@pytest.mark.parametrize("name", OURS)
def test_shapes(name):
    """The loss takes what ``outputs`` and ``target_shape`` promise, and gives a number per sample."""
    task, (x, y) = OURS[name], GOOD[name]
    assert task.target_shape(x.shape[1:]) == y.shape[1:]
    outputs, y, mask = (
        np.ones((4, *task.outputs(x.shape[1:])), np.float32),
        y.astype(task.dtype),
        np.ones(4, np.float32),
    )
    assert jax.eval_shape(task.loss, outputs, y, mask).shape == (4,)
    assert jax.eval_shape(task.objective, outputs, y, mask).shape == (4,)
    shares = np.asarray(jax.jit(task.predict)(outputs))
    assert shares.shape == outputs.shape
    if "logits" in task.provides:
        np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-6)


def test_predictions_have_the_unit_of_the_targets():
    task = OURS["regression"]
    y = np.array([[0.5, 7.0]], np.float32)
    np.testing.assert_allclose(task.standardised(y), [[1.2, 1.25]], rtol=1e-6)
    np.testing.assert_allclose(task.predict(task.standardised(y)), y, rtol=1e-6)
    np.testing.assert_allclose(OURS["survival"].predict(np.zeros((2, 1), np.float32)), 1)


@pytest.mark.parametrize("name", OURS)
def test_an_exported_network_predicts_as_the_task_does(name):
    """``formula`` stands in the example of an export, which needs no class of ours."""
    task = OURS[name]
    outputs = np.random.default_rng(0).normal(size=(4, *task.outputs((5, 5, 1)))).astype(np.float32)
    facts = json.loads(json.dumps(task.facts()))
    found = eval(task.formula, {"outputs": outputs, "task": facts, "np": np, "jax": jax})
    np.testing.assert_allclose(found, task.predict(outputs), rtol=1e-5)


def test_strata():
    y, count = OURS["classification"].strata(np.array([2, 0, 1]))
    assert list(y) == [2, 0, 1] and count == 3
    y, count = OURS["regression"].strata(np.random.default_rng(0).permutation(100)[:, None] * np.ones((1, 2)))
    assert count == STRATA and list(np.bincount(y)) == [10] * 10 and y.dtype == np.int32
    y, count = OURS["regression"].strata(np.ones((5, 2)))  # all equal
    assert len(set(y)) == 1 and 0 <= y[0] < count
    y, count = OURS["survival"].strata(GOOD["survival"][1])
    assert list(y) == [0, 1, 1, 0] and count == 2
    assert OURS["segmentation"].strata(GOOD["segmentation"][1]) is None


def test_times_of_events():
    y = np.array([[3, 1], [1, 0], [2, 1], [3, 1], [0.5, 1]], np.float32)
    assert times_of(y) == (0.5, 2.0, 3.0)
    assert times_of(y, 2) == (0.5, 3.0)
    assert times_of(y[1:2]) == ()
    many = np.stack([np.arange(1000), np.ones(1000)], 1).astype(np.float32)
    found = times_of(many)
    assert len(found) == 256 and found[0] == 0 and found[-1] == 999 and set(found) <= set(range(1000))


@pytest.mark.parametrize("name", OURS)
def test_a_task_is_found_from_its_targets(name):
    task, y = OURS[name], GOOD[name][1]
    known = np.where(y < 0, task.width - 1, y)
    found = type(task).of(type(task).convert(known)).fitted(known)
    assert found.width == task.width and type(task).convert(known).dtype == task.dtype
    assert found.fitted(known[:1]) == found  # what is known stays


def test_what_a_task_learns_from_its_training_targets():
    y = np.array([[1, 5], [3, 5]])
    fitted = Regression(width=2).fitted(Regression.convert(y))
    assert fitted.mean == (2.0, 5.0) and fitted.std == (1.0, 1.0)  # the second is constant
    assert Regression.convert(y[:, 0]).shape == (2, 1) and Regression.convert(y).dtype == np.float32
    assert Survival().fitted(GOOD["survival"][1]).times == (0.0, 3.0)
    assert Classification.convert(np.array([0.5])).dtype == np.float64  # for `check` to refuse


# --- values and facts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_a_task_is_made_again_from_its_facts(name):
    task = OURS[name]
    again = of_facts(json.loads(json.dumps(task.facts())))
    assert again == with_metrics(task) and hash(again) == hash(with_metrics(task))
    assert [metric.name for metric in again.metrics] == list(task.default_metrics)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"name": "clustering", "width": 3}, "the task 'clustering' is not registered"),
        ({"width": 3}, "the task None is not registered"),
        ({"name": "classification"}, "the task classification needs its width"),
        ({"name": "classification", "width": 3, "std": 1}, "the task classification has no std"),
        ({"name": "classification", "width": 3, "criterion": None}, "the task classification has no criterion"),
    ],
)
def test_wrong_facts(facts, message):
    with pytest.raises(ValueError, match=message):
        of_facts(facts)


@pytest.mark.parametrize("name", OURS)
def test_equal_tasks_are_equal_so_that_they_share_programs(name):
    task = with_metrics(OURS[name])
    again = with_metrics(type(task)(**{key: value for key, value in task.facts().items() if key != "name"}))
    assert task == again and hash(task) == hash(again)
    assert task != with_metrics(type(task)(width=task.width + 1)) and task != OURS[name]
    traced = []

    def loss(task, z):
        traced.append(task)
        return z

    compiled = jax.jit(loss, static_argnums=0)
    compiled(task, 1.0), compiled(again, 1.0)
    assert len(traced) == 1


# --- metrics ---------------------------------------------------------------------------------------------------------


def sums_of(task, outputs, targets):
    """The sums of all metrics of a task, in one program."""
    mask = np.ones(len(outputs), np.float32)
    return jax.jit(lambda *batch: {metric.name: metric.sums(task, *batch) for metric in task.metrics})(
        outputs, targets, mask
    )


def test_metrics_of_a_task():
    task = with_metrics(OURS["classification"], ["auroc", "accuracy", "auroc"])
    assert [metric.name for metric in task.metrics] == ["auroc", "accuracy"] and task.primary is METRICS["auroc"]
    assert with_metrics(task) is task
    z, y = np.float32([[1, 0, 0], [0, 0, 1]]), np.int32([0, 2])
    assert task.values(sums_of(task, z, y)) == {"auroc": 1.0, "accuracy": 1.0}


@pytest.mark.parametrize("name", OURS)
def test_every_task_has_metrics_that_suit_it(name):
    """Each of them can be computed from what the task promises."""
    task, (x, y) = OURS[name], GOOD[name]
    outputs = np.ones((4, *task.outputs(x.shape[1:])), np.float32)
    found = with_metrics(task, [name for name, row in METRICS.items() if suits(task, row)])
    assert set(task.default_metrics) <= {metric.name for metric in found.metrics}
    sums = jax.device_get(sums_of(found, outputs, y.astype(task.dtype)))
    for metric in found.metrics:
        metric.of(sums[metric.name])


@pytest.mark.parametrize(
    ("name", "metrics", "message"),
    [
        ("regression", ["acuracy"], "unknown metric 'acuracy'; did you mean 'accuracy'?"),
        (
            "regression",
            ["rmse", "auroc"],
            "metric auroc needs classes or labels, which regression has not: it has rmse",
        ),
        ("survival", ["accuracy"], "metric accuracy needs classes, which survival has not: it has concordance"),
        ("survival", [METRICS], "a metric is a name or an fmr.Metric, not a Registry"),
        ("survival", ["concordance", Metric("concordance", sum, sum)], "two metrics have the name concordance"),
    ],
)
def test_metrics_are_refused_in_one_line(name, metrics, message):
    with pytest.raises(UserError) as refused:
        with_metrics(OURS[name], metrics)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_columns_of_values():
    task = with_metrics(OURS["classification"], ["accuracy", "recall", "confusion"])
    z, y = np.eye(3, dtype=np.float32)[[[0, 1, 1], [0, 0, 0]]], np.int32([[0, 1, 0], [0, 0, 0]])
    sums = jax.vmap(functools.partial(sums_of, task))(z, y)
    values = task.values_of_each(sums)
    assert values["recall"].shape == (2, 3) and values["confusion"].shape == (2, 3, 3)
    first = task.columns({name: each[0] for name, each in values.items()}, "test_")
    assert list(first) == ["test_accuracy", "test_recall_0", "test_recall_1", "test_recall_2"]
    assert first["test_recall_0"] == 0.5 and first["test_recall_1"] == 1.0 and np.isnan(first["test_recall_2"])
    assert METRICS["top5_accuracy"].title == "top-5 accuracy" and METRICS["exact_match"].title == "exact match"


def test_an_own_metric():
    def cost(task, outputs, targets, mask):
        wrong = (jnp.argmax(outputs, axis=-1) != targets).astype(jnp.float32)
        return {"cost": jnp.sum(wrong * (1.0 + targets.astype(jnp.float32)) * mask), "count": jnp.sum(mask)}

    metric = Metric("cost", cost, lambda sums: sums["cost"] / sums["count"], higher_is_better=False, unit="EUR")
    METRICS["cost"] = metric
    try:
        task = with_metrics(OURS["classification"], ["cost"])
        sums = metric.sums(task, np.eye(3), np.array([0, 2, 1]), np.float32([1, 1, 0]))
        assert task.values({"cost": sums}) == {"cost": 1.5}
    finally:
        del METRICS["cost"]
    for row in (cost, dataclasses.replace(metric, name="price"), dataclasses.replace(metric, sums=None)):
        with pytest.raises(UserError, match=r"fmr.METRICS\['cost'\] takes fmr.Metric\('cost', sums, value\)"):
            METRICS.refuse_unless_row("cost", row)


# --- an own task -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts(Task):
    """Poisson's log-likelihood of counts; the outputs are logarithms of rates."""

    name: ClassVar[str] = "counts"
    default_metrics: ClassVar[tuple[str, ...]] = ("deviation",)

    def loss(self, outputs, targets, mask):
        return jnp.exp(outputs[:, 0]) - targets.astype(jnp.float32) * outputs[:, 0]

    def predict(self, outputs):
        return jnp.exp(outputs)


def deviation(task, outputs, targets, mask):
    return jnp.sum(jnp.abs(task.predict(outputs)[:, 0] - targets.astype(jnp.float32)) * mask)


def test_an_own_task():
    TASKS["counts"], METRICS["deviation"] = Counts, Metric("deviation", deviation, lambda sums: sums)
    try:
        task = with_metrics(Counts(width=1))
        assert of_facts(json.loads(json.dumps(task.facts()))) == task
        task.check(VECTORS, np.arange(4), "here")
        with pytest.raises(UserError, match="here needs integers of shape"):
            task.check(VECTORS, np.arange(4.0), "here")
        z, y = np.zeros((4, *task.outputs((7,))), np.float32), np.arange(4)
        np.testing.assert_array_equal(jax.jit(task.objective)(z, y, np.ones(4)), np.ones(4))
        np.testing.assert_array_equal(jax.jit(task.divergence)(z, z + 1), np.full(4, 0.5))
        assert task.strata(np.arange(4)) is None
        assert task.values({"deviation": deviation(task, z, y, np.float32([1, 0, 0, 1]))}) == {"deviation": 3.0}
    finally:
        del TASKS["counts"], METRICS["deviation"]


def test_own_tasks_are_checked():
    class Plain:
        name = "plain"

    for name, row in (("plain", Plain), ("other", Counts), ("counts", Counts(width=1))):
        with pytest.raises(UserError, match=f"fmr.TASKS\\['{name}'\\] takes a dataclass of fmr.Task"):
            TASKS.refuse_unless_row(name, row)

    class Bare(Counts):
        name = "bare"
        default_metrics = ()

    with pytest.raises(UserError, match="the task bare has no metrics: name some in its default_metrics"):
        with_metrics(Bare(width=1))
