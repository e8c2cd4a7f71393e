"""Metrics as sums over samples. `METRICS` has each by its name; ``fmr.METRICS["mine"] = fmr.Metric(...)`` adds one.

What is counted is added over batches, devices, clients and processes. Where a metric needs an order of all samples
(AUROC, concordance), samples are counted in bins, and its error is stated.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry
from fedjax_mr.tasks.base import Metric
from fedjax_mr.tasks.language import token_losses

BINS = 256
"""Bins of scores in 0..1. Two samples in one bin count as a tie, so the error of an AUROC is at most half the share of
such pairs."""
CALIBRATION_BINS = 15  # Guo et al., ICML 2017


# --- classes ---------------------------------------------------------------------------------------------------------


def _correct(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    correct = (jnp.argmax(outputs, axis=-1) == targets).astype(jnp.float32)
    return {"correct": jnp.sum(correct * mask), "count": jnp.sum(mask)}


def _in_top_five(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    true = jnp.take_along_axis(outputs, targets[:, None], axis=-1)
    correct = (jnp.sum(outputs > true, axis=-1) < 5).astype(jnp.float32)
    return {"correct": jnp.sum(correct * mask), "count": jnp.sum(mask)}


def _confusion(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """The number of samples (or pixels) of each true class and predicted class [C, C]."""
    known = mask.reshape(-1, *(1,) * (targets.ndim - 1)) * (targets >= 0)
    true = jax.nn.one_hot(targets, task.width) * known[..., None]
    predicted = jax.nn.one_hot(jnp.argmax(outputs, axis=-1), task.width)
    return jnp.einsum("nc,nd->cd", true.reshape(-1, task.width), predicted.reshape(-1, task.width))


def _share(sums: Any) -> Any:
    return sums["correct"] / sums["count"]


def _recalls(confusion: Any) -> Any:
    """The recall of each class [C]; NaN for a class without samples."""
    return np.diag(confusion) / confusion.sum(1)


def _f1(both: Any, true: Any, predicted: Any) -> Any:
    """F1 [C]; NaN for a class that is neither there nor predicted."""
    return 2 * both / (true + predicted)


def _mean_of_known(values: Any) -> float:
    """The mean without NaN; NaN if nothing else is there."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _scores(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    """Histograms [2, C, bins] of each class's scores: of the samples of other classes and of its own."""
    scores = task.predict(outputs)
    own = jax.nn.one_hot(targets, task.width) if "classes" in task.provides else targets
    known = mask[:, None] * (own >= 0)
    cell = jnp.clip((scores * BINS).astype(jnp.int32), 0, BINS - 1)
    column = jnp.broadcast_to(jnp.arange(task.width), cell.shape)
    histograms = jnp.zeros((2, task.width, BINS))
    return histograms.at[jnp.maximum(own, 0).astype(jnp.int32), column, cell].add(known)


def _aurocs(histograms: Any) -> Any:
    """The area under the ROC curve of each class [C]; NaN for a class that has no or only samples."""
    others, own = histograms
    below = np.cumsum(others, -1) - others
    return ((below + others / 2) * own).sum(-1) / (others.sum(-1) * own.sum(-1))


def _calibration(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Samples, their confidences and correct ones in each bin of confidence [3, bins]."""
    shares = task.predict(outputs)
    confidence, correct = jnp.max(shares, axis=-1), jnp.argmax(shares, axis=-1) == targets
    cell = jnp.clip((confidence * CALIBRATION_BINS).astype(jnp.int32), 0, CALIBRATION_BINS - 1)
    rows = jnp.stack([mask, mask * confidence, mask * correct])
    return jnp.zeros((3, CALIBRATION_BINS)).at[:, cell].add(rows)


def _ece(bins: Any) -> Any:
    count, confidence, correct = bins
    return np.abs(confidence - correct).sum() / count.sum()


def _brier(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    errors = jnp.sum(jnp.square(task.predict(outputs) - jax.nn.one_hot(targets, task.width)), axis=-1)
    return {"correct": jnp.sum(errors * mask), "count": jnp.sum(mask)}


# --- labels ----------------------------------------------------------------------------------------------------------


def _label_counts(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """True and predicted ones, true ones and predicted ones of each label [3, C]."""
    if "classes" in task.provides:
        targets = jax.nn.one_hot(targets, task.width)
        yes = jax.nn.one_hot(jnp.argmax(outputs, axis=-1), task.width)
    else:
        yes = (outputs > 0).astype(jnp.float32)
    known = mask[:, None] * (targets >= 0)
    true = targets * known
    return jnp.stack([jnp.sum(true * yes, 0), jnp.sum(true, 0), jnp.sum(yes * known, 0)])


def _exact(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    same = ((outputs > 0) == (targets > 0)) | (targets < 0)
    return {"correct": jnp.sum(jnp.all(same, axis=-1) * mask), "count": jnp.sum(mask)}


# --- numbers ---------------------------------------------------------------------------------------------------------


def _errors(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    """Sums over samples for each number [C]. Targets are centred, so that float32 keeps their digits."""
    error = task.predict(outputs) - targets
    centred, each = targets - jnp.asarray(task.mean), mask[:, None]
    return {
        "count": jnp.sum(mask),
        "squared": jnp.sum(jnp.square(error) * each, axis=0),
        "absolute": jnp.sum(jnp.abs(error) * each, axis=0),
        "target": jnp.sum(centred * each, axis=0),
        "target_squared": jnp.sum(jnp.square(centred) * each, axis=0),
    }


def _r2(sums: Any) -> float:
    variance = sums["target_squared"] - np.square(sums["target"]) / sums["count"]
    return float(np.mean(1 - sums["squared"] / variance))


# --- tokens ----------------------------------------------------------------------------------------------------------


def _tokens(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    losses, known = token_losses(outputs, targets)
    correct = (jnp.argmax(outputs, axis=-1) == targets) * known
    each = mask[:, None]
    return {"loss": jnp.sum(losses * each), "correct": jnp.sum(correct * each), "count": jnp.sum(known * each)}


# --- risks -----------------------------------------------------------------------------------------------------------


def _risks(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Histograms [2, times, bins] of the risks of censored samples and of events, by the interval of their time."""
    risk = jnp.clip((jax.nn.sigmoid(outputs[:, 0]) * BINS).astype(jnp.int32), 0, BINS - 1)
    time = jnp.searchsorted(jnp.asarray(task.times, jnp.float32), targets[:, 0], side="right")
    return jnp.zeros((2, len(task.times) + 1, BINS)).at[targets[:, 1].astype(jnp.int32), time, risk].add(mask)


def _concordance(histograms: Any) -> Any:
    """The share of comparable pairs in which the sample with the earlier event has the higher risk; ties count half.

    A pair is comparable if one sample has an event in an earlier interval than the other's time, or if in the same
    interval one has an event and the other is censored (Harrell et al. 1982).
    """
    censored, events = histograms
    everyone = censored + events
    later = np.cumsum(everyone[::-1], 0)[::-1] - everyone + censored  # those who outlast an event of this interval
    lower = np.cumsum(later, -1) - later
    return (events * (lower + later / 2)).sum() / (events * later.sum(-1, keepdims=True)).sum()


_CLASSES, _PIXELS, _NUMBERS, _TOKENS = map(frozenset, (("classes",), ("pixels",), ("numbers",), ("tokens",)))
_LABELS = frozenset({"labels"})
_SCORED = frozenset({"classes|labels"})


def _mean(name: str) -> Any:
    return lambda sums: float(np.mean(sums[name] / sums["count"]))


_mean_absolute = _mean("absolute")
_SHARES: dict[str, Any] = {"unit": "fraction"}
_OURS = (
    Metric("accuracy", _correct, _share, needs=_CLASSES, **_SHARES),
    Metric("top5_accuracy", _in_top_five, _share, needs=_CLASSES, **_SHARES),
    Metric("balanced_accuracy", _confusion, lambda sums: _mean_of_known(_recalls(sums)), needs=_CLASSES, **_SHARES),
    Metric("recall", _confusion, _recalls, needs=_CLASSES, **_SHARES),
    Metric("confusion", _confusion, lambda sums: sums, needs=_CLASSES),
    Metric("macro_f1", _label_counts, lambda sums: _mean_of_known(_f1(*sums)), needs=_SCORED, **_SHARES),
    Metric("micro_f1", _label_counts, lambda sums: float(_f1(*sums.sum(-1))), needs=_SCORED, **_SHARES),
    Metric("f1", _label_counts, lambda sums: _f1(*sums), needs=_SCORED, **_SHARES),
    Metric("auroc", _scores, lambda sums: _mean_of_known(_aurocs(sums)), needs=_SCORED, **_SHARES),
    Metric("auroc_of_class", _scores, _aurocs, needs=_SCORED, **_SHARES),
    Metric("ece", _calibration, _ece, False, needs=_CLASSES, **_SHARES),
    Metric("brier", _brier, _share, False, needs=_CLASSES),
    Metric("exact_match", _exact, _share, needs=_LABELS, **_SHARES),
    Metric("rmse", _errors, lambda s: float(np.sqrt(np.mean(s["squared"] / s["count"]))), False, "target", _NUMBERS),
    Metric("mae", _errors, _mean_absolute, False, "target", _NUMBERS),
    Metric("r2", _errors, _r2, needs=_NUMBERS),
    Metric("dice", _confusion, lambda s: _mean_of_known(_f1(np.diag(s), s.sum(1), s.sum(0))), needs=_PIXELS, **_SHARES),
    Metric("iou", _confusion, lambda s: _mean_of_known(_ious(s)), needs=_PIXELS, **_SHARES),
    Metric("iou_of_class", _confusion, lambda sums: _ious(sums), needs=_PIXELS, **_SHARES),
    Metric("pixel_accuracy", _confusion, lambda s: np.trace(s) / s.sum(), needs=_PIXELS, **_SHARES),
    Metric("perplexity", _tokens, lambda sums: float(np.exp(sums["loss"] / sums["count"])), False, "", _TOKENS),
    Metric("token_accuracy", _tokens, _share, needs=_TOKENS, **_SHARES),
    Metric("bits_per_token", _tokens, lambda s: float(s["loss"] / s["count"] / np.log(2)), False, "bits", _TOKENS),
    Metric("concordance", _risks, _concordance, needs=frozenset({"risk"}), **_SHARES),
)


def _ious(confusion: Any) -> Any:
    """Intersection over union of each class [C]; NaN for a class that is neither there nor predicted."""
    both = np.diag(confusion)
    return both / (confusion.sum(0) + confusion.sum(1) - both)


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `METRICS`. Raises a UserError: it is not a `Metric` of that name."""
    if not isinstance(row, Metric) or row.name != name or not callable(row.sums) or not callable(row.value):
        raise UserError(f"fmr.METRICS[{name!r}] takes fmr.Metric({name!r}, sums, value)")


METRICS = Registry("metric", "fmr.METRICS", check_row, {metric.name: metric for metric in _OURS})
"""Every metric by its name."""
