"""Metrics as sums over samples. `METRICS` has each by its name; ``fmr.METRICS["mine"] = fmr.Metric(...)`` adds one.

Sums of batches, devices, clients and processes are added. Where a metric needs an order of all samples (AUROC,
concordance), samples are counted in bins, and its error is stated. Counts are float32: exact up to 2^24 = 16.8 million
per cell, from where on the sum of each further batch is rounded to 7 digits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry
from fedjax_mr.tasks.base import Metric
from fedjax_mr.tasks.language import token_losses

BINS = 512
"""Bins of scores. Two samples in one bin count as a tie, so the error of an AUROC or of a concordance is at most half
the share of such pairs."""
FINEST, LARGEST = 1 / 16, 256.0  # scores below share bins evenly; those above are in the last bin
CALIBRATION_BINS = 15  # Guo et al., ICML 2017


# --- shared ----------------------------------------------------------------------------------------------------------


def _total(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The sum of values [B, ...] over the samples. Those of padding may be anything, NaN as well."""
    return jnp.sum(values, axis=0, where=mask.reshape(-1, *(1,) * (values.ndim - 1)) > 0)


def _counted(values: jax.Array, mask: jax.Array) -> Any:
    """The sums of `_mean`."""
    return {"total": _total(values.astype(jnp.float32), mask), "count": jnp.sum(mask)}


def _mean(sums: Any) -> Any:
    return sums["total"] / sums["count"]


def _mean_of_known(values: Any) -> Any:
    """The mean without NaN; NaN if there is nothing else."""
    known = values[~np.isnan(values)]
    return known.mean() if len(known) else float("nan")


def _bin(scores: jax.Array) -> jax.Array:
    """The bin of each score on the real line, such as the logarithm of odds.

    Bins are FINEST * asinh(LARGEST / FINEST) / (BINS / 2) = 0.002 wide around 0 and 4 percent of the score far from it.
    So they tell apart both the scores of a new network, which are nearly equal, and those of one that is always sure.
    """
    scaled = jnp.arcsinh(scores / FINEST) / math.asinh(LARGEST / FINEST)  # -1..1
    return jnp.clip(jnp.floor((scaled + 1) * (BINS / 2)), 0, BINS - 1).astype(jnp.int32)


# --- classes ---------------------------------------------------------------------------------------------------------


def _correct(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    return _counted(jnp.argmax(outputs, axis=-1) == targets, mask)


def _in_top_five(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    """Whether the class is one of the five with the largest outputs; of equal ones the first, as in `_correct`."""
    _, top = jax.lax.top_k(outputs, min(5, task.width))
    return _counted(jnp.any(top == targets[:, None], axis=-1), mask)


def _confusion(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """The number of samples (or pixels) of each true class and predicted class [C, C]. A target of -1 is none."""
    true = jax.nn.one_hot(targets, task.width) * mask.reshape(-1, *(1,) * targets.ndim)
    predicted = jax.nn.one_hot(jnp.argmax(outputs, axis=-1), task.width)
    return jnp.einsum("nc,nd->cd", true.reshape(-1, task.width), predicted.reshape(-1, task.width))


def _recalls(confusion: Any) -> Any:
    """The recall of each class [C]; NaN for a class without samples."""
    return np.diag(confusion) / confusion.sum(1)


def _balanced_accuracy(confusion: Any) -> Any:
    """The mean recall of the classes that have samples."""
    return _mean_of_known(_recalls(confusion))


def _calibration(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Samples, their confidences and correct ones [3, bins] in bins [k/15, (k+1)/15) of the largest probability."""
    shares = task.predict(outputs)
    confidence, correct = jnp.max(shares, axis=-1), jnp.argmax(shares, axis=-1) == targets
    cell = jnp.clip((confidence * CALIBRATION_BINS).astype(jnp.int32), 0, CALIBRATION_BINS - 1)
    rows = jnp.stack([mask, mask * confidence, mask * correct.astype(jnp.float32)])
    return jnp.zeros((3, CALIBRATION_BINS)).at[:, cell].add(rows)


def _ece(bins: Any) -> Any:
    """The mean of |accuracy - confidence| over bins, weighted by their samples."""
    count, confidence, correct = bins
    return np.abs(confidence - correct).sum() / count.sum()


def _brier(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    """The squared errors of the C probabilities, added: 0..2 (Brier 1950). For C = 2 it is twice the binary form."""
    errors = task.predict(outputs) - jax.nn.one_hot(targets, task.width)
    return _counted(jnp.sum(jnp.square(errors), axis=-1), mask)


# --- classes or labels -----------------------------------------------------------------------------------------------


def _yes_or_no(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
    """Whether each label is true, predicted and known, 0 or 1 [B, C]. A class is a label of which one is true."""
    if "classes" in task.provides:
        true = jax.nn.one_hot(targets, task.width)
        predicted = jax.nn.one_hot(jnp.argmax(outputs, axis=-1), task.width)
        return true, predicted, jnp.broadcast_to(mask[:, None], true.shape)
    known = (targets >= 0).astype(jnp.float32) * mask[:, None]
    return (targets > 0).astype(jnp.float32), (outputs > 0).astype(jnp.float32), known


def _label_counts(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """True and predicted ones, true ones and predicted ones of each label [3, C]."""
    true, predicted, known = _yes_or_no(task, outputs, targets, mask)
    return jnp.sum(jnp.stack([true * predicted, true, predicted]) * known[None], axis=1)


def _f1(counts: Any) -> Any:
    """F1 [C] from both, true and predicted ones [3, C]; NaN for a class that is neither there nor predicted."""
    both, true, predicted = counts
    return 2 * both / (true + predicted)


def _macro_f1(counts: Any) -> Any:
    """The mean F1 of the classes that are there or predicted."""
    return _mean_of_known(_f1(counts))


def _micro_f1(counts: Any) -> Any:
    """The F1 of all decisions; for classes this is the accuracy."""
    return _f1(counts.sum(-1))


def _scores(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    """Histograms [2, C, bins] of each label's scores: of the samples without it and of those with it."""
    true, _, known = _yes_or_no(task, outputs, targets, mask)
    cell = _bin(_log_odds(outputs) if "classes" in task.provides else outputs)
    column = jnp.broadcast_to(jnp.arange(task.width)[None], cell.shape)
    return jnp.zeros((2, task.width, BINS)).at[true.astype(jnp.int32), column, cell].add(known)


def _log_odds(logits: jax.Array) -> jax.Array:
    """log(p / (1 - p)) + log(C - 1) of the softmax p [B, C] of logits, which is 0 at p = 1 / C, where bins are narrow.

    The order of the samples is kept also where p rounds to 0 or 1.
    """
    count = logits.shape[-1]
    top = jax.nn.one_hot(jnp.argmax(logits, axis=-1), count) > 0
    others = jax.nn.logsumexp(logits, axis=-1, where=~top, keepdims=True)
    log_p = jax.nn.log_softmax(logits)  # at most -log(2), except for the top
    return jnp.where(top, logits - others, log_p - jnp.log1p(-jnp.exp(log_p))) + math.log(max(count - 1, 1))


def _aurocs(histograms: Any) -> Any:
    """The area under the ROC curve of each label [C], one against the rest; NaN if all or no samples have it."""
    others, own = np.asarray(histograms, np.float64)  # there are more pairs than float32 can count
    lower = np.cumsum(others, -1) - others
    return ((lower + others / 2) * own).sum(-1) / (others.sum(-1) * own.sum(-1))


def _auroc(histograms: Any) -> Any:
    """The mean of `_aurocs` over the labels that have one."""
    return _mean_of_known(_aurocs(histograms))


def _exact(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    """Whether all known labels of a sample are right. Samples without known labels do not count."""
    known = targets >= 0
    same = ((outputs > 0) == (targets > 0)) | ~known
    return _counted(jnp.all(same, axis=-1), mask * jnp.any(known, axis=-1).astype(jnp.float32))


# --- pixels ----------------------------------------------------------------------------------------------------------
# Pixels of all images are counted together, so large images and classes weigh as many pixels as they have.


def _dices(confusion: Any) -> Any:
    """Dice's coefficient of each class [C], which is the F1 of its pixels."""
    return _f1((np.diag(confusion), confusion.sum(1), confusion.sum(0)))


def _ious(confusion: Any) -> Any:
    """Intersection over union of each class [C]; NaN for a class that is neither there nor predicted."""
    both = np.diag(confusion)
    return both / (confusion.sum(0) + confusion.sum(1) - both)


def _dice(confusion: Any) -> Any:
    return _mean_of_known(_dices(confusion))


def _iou(confusion: Any) -> Any:
    return _mean_of_known(_ious(confusion))


def _pixel_accuracy(confusion: Any) -> Any:
    confusion = np.asarray(confusion, np.float64)  # rounded sums of many pixels could have a share above 1
    return np.trace(confusion) / confusion.sum()


# --- numbers ---------------------------------------------------------------------------------------------------------


def _absolute(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    return _counted(jnp.mean(jnp.abs(task.predict(outputs) - targets), axis=-1), mask)


def _squared(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    return _counted(jnp.mean(jnp.square(task.predict(outputs) - targets), axis=-1), mask)


def _root(sums: Any) -> Any:
    return np.sqrt(_mean(sums))


def _explained(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    """Sums for each number [C] in standardised units, because squares of large targets lose digits in float32."""
    standard = task.standardised(targets)
    return {
        "count": jnp.sum(mask),
        "errors_squared": _total(jnp.square(outputs - standard), mask),
        "targets": _total(standard, mask),
        "targets_squared": _total(jnp.square(standard), mask),
    }


def _r2(sums: Any) -> Any:
    """The mean of R2 over the C numbers; NaN where targets are constant, which float32 sums tell to five digits."""
    squared, total = np.float64(sums["targets_squared"]), np.float64(sums["targets"])
    spread = squared - np.square(total) / sums["count"]
    spread = np.where(spread > 1e-5 * squared, spread, np.nan)
    return np.mean(1 - sums["errors_squared"] / spread)


# --- tokens ----------------------------------------------------------------------------------------------------------


def _tokens(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    """Each token that counts has the same weight, whichever sample it is in."""
    losses, known = token_losses(outputs, targets)
    correct = (jnp.argmax(outputs, axis=-1) == targets).astype(jnp.float32) * known
    return {
        "loss": jnp.sum(_total(losses, mask)),
        "correct": jnp.sum(_total(correct, mask)),
        "count": jnp.sum(_total(known, mask)),
    }


def _perplexity(sums: Any) -> Any:
    return np.exp(sums["loss"] / sums["count"])


def _token_accuracy(sums: Any) -> Any:
    return sums["correct"] / sums["count"]


def _bits(sums: Any) -> Any:
    return sums["loss"] / sums["count"] / np.log(2)


# --- risks -----------------------------------------------------------------------------------------------------------


def _risks(task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Histograms [2, times, bins] of the log risks of censored samples and of events, by the interval of their time."""
    time = jnp.searchsorted(jnp.asarray(task.times, jnp.float32), targets[:, 0], side="right")
    event = (targets[:, 1] > 0).astype(jnp.int32)
    return jnp.zeros((2, len(task.times) + 1, BINS)).at[event, time, _bin(outputs[:, 0])].add(mask)


def _concordance(histograms: Any) -> Any:
    """The share of comparable pairs in which the sample with the earlier event has the higher risk; ties count half.

    A pair is comparable if one sample has an event in an earlier interval than the other's time, or if in the same
    interval one has an event and the other is censored (Harrell et al. 1982; equal times as in lifelines). This is
    exact where the times of the samples are among the task's times, but for the ties of risks in one bin. Otherwise
    two events in one interval are not compared, and a sample that is censored in it counts as longer observed.
    """
    censored, events = np.asarray(histograms, np.float64)  # there are more pairs than float32 can count
    everyone = censored + events
    later = np.cumsum(everyone[::-1], 0)[::-1] - everyone + censored  # those who outlast an event of this interval
    lower = np.cumsum(later, -1) - later
    return (events * (lower + later / 2)).sum() / (events * later.sum(-1, keepdims=True)).sum()


# --- by name ---------------------------------------------------------------------------------------------------------


def _identity(sums: Any) -> Any:
    return sums


def _needs(*provided: str) -> dict[str, Any]:
    return {"needs": frozenset(provided)}


_CLASSES, _SCORED, _LABELS = _needs("classes"), _needs("classes|labels"), _needs("labels")
_PIXELS, _NUMBERS, _TOKENS, _RISK = _needs("pixels"), _needs("numbers"), _needs("tokens"), _needs("risk")
_LOW: dict[str, Any] = {"higher_is_better": False}
_SHARE: dict[str, Any] = {"unit": "fraction"}
_OURS = (
    Metric("accuracy", _correct, _mean, **_SHARE, **_CLASSES),
    Metric("top5_accuracy", _in_top_five, _mean, **_SHARE, **_CLASSES),
    Metric("balanced_accuracy", _confusion, _balanced_accuracy, **_SHARE, **_CLASSES),
    Metric("recall", _confusion, _recalls, **_SHARE, **_CLASSES),
    Metric("confusion", _confusion, _identity, **_CLASSES),
    Metric("ece", _calibration, _ece, **_LOW, **_SHARE, **_CLASSES),
    Metric("brier", _brier, _mean, **_LOW, **_CLASSES),
    Metric("macro_f1", _label_counts, _macro_f1, **_SHARE, **_SCORED),
    Metric("micro_f1", _label_counts, _micro_f1, **_SHARE, **_SCORED),
    Metric("f1", _label_counts, _f1, **_SHARE, **_SCORED),
    Metric("auroc", _scores, _auroc, **_SHARE, **_SCORED),
    Metric("auroc_of_class", _scores, _aurocs, **_SHARE, **_SCORED),
    Metric("exact_match", _exact, _mean, **_SHARE, **_LABELS),
    Metric("dice", _confusion, _dice, **_SHARE, **_PIXELS),
    Metric("iou", _confusion, _iou, **_SHARE, **_PIXELS),
    Metric("iou_of_class", _confusion, _ious, **_SHARE, **_PIXELS),
    Metric("pixel_accuracy", _confusion, _pixel_accuracy, **_SHARE, **_PIXELS),
    Metric("rmse", _squared, _root, **_LOW, unit="target", **_NUMBERS),
    Metric("mae", _absolute, _mean, **_LOW, unit="target", **_NUMBERS),
    Metric("r2", _explained, _r2, **_NUMBERS),
    Metric("perplexity", _tokens, _perplexity, **_LOW, **_TOKENS),
    Metric("token_accuracy", _tokens, _token_accuracy, **_SHARE, **_TOKENS),
    Metric("bits_per_token", _tokens, _bits, **_LOW, unit="bits", **_TOKENS),
    Metric("concordance", _risks, _concordance, **_SHARE, **_RISK),
)


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `METRICS`. Raises a UserError: it is not a `Metric` of that name."""
    if not isinstance(row, Metric) or row.name != name or not callable(row.sums) or not callable(row.value):
        raise UserError(f"fmr.METRICS[{name!r}] takes fmr.Metric({name!r}, sums, value)")


METRICS = Registry("metric", "fmr.METRICS", check_row, {metric.name: metric for metric in _OURS})
"""Every metric by its name."""
