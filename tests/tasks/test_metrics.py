"""Every metric equals its oracle, in sums over uneven batches and clients whose padding holds garbage."""

import functools
import math
import warnings

import jax
import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp, softmax

from fedjax_mr.tasks import (
    METRICS,
    Classification,
    Language,
    Multilabel,
    Regression,
    Segmentation,
    Survival,
)
from fedjax_mr.tasks.metrics import BINS, FINEST, LARGEST

BATCH = 8
CLASSES = Classification(width=7)
CLASSES5 = Classification(width=5)
LABELS = Multilabel(width=4)
PIXELS = Segmentation(width=4)
NUMBERS = Regression(width=2, mean=(2000.0, -3.0), std=(10.0, 0.5))
TOKENS = Language(width=6)
RISKS = Survival(times=(1.0, 2.0, 3.0, 5.0))
CENTRES = FINEST * np.sinh((np.arange(BINS) + 0.5 - BINS / 2) / (BINS / 2) * math.asinh(LARGEST / FINEST))

CELLS = st.sampled_from([0, 255, 256, 257, 300, BINS - 1])  # few, so that there are ties


@functools.cache
def compiled(name, task):
    return jax.jit(functools.partial(METRICS[name].sums, task))


def summed(name, task, outputs, targets, sizes=None):
    """The sums over clients of some sizes and their batches, which are filled up with garbage."""
    sizes = [len(outputs) // 2, 0, len(outputs) - len(outputs) // 2] if sizes is None else sizes
    assert sum(sizes) == len(outputs)
    garbage = np.nan if np.issubdtype(targets.dtype, np.floating) else 10**6
    total, start = None, 0
    for size in sizes:
        for first in range(start, max(start + size, start + 1), BATCH):  # a client without samples has an empty batch
            count = min(BATCH, start + size - first)
            x = np.full((BATCH, *outputs.shape[1:]), 3.0, np.float32)
            y = np.full((BATCH, *targets.shape[1:]), garbage, targets.dtype)
            x[count:, ..., 0] = -7.0
            y[-1:] = 0 if garbage == 10**6 else y[-1:]  # garbage that might be a target, too
            x[:count], y[:count] = outputs[first : first + count], targets[first : first + count]
            mask = (np.arange(BATCH) < count).astype(np.float32)
            sums = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), compiled(name, task)(x, y, mask))
            total = sums if total is None else jax.tree.map(np.add, total, sums)
        start += size
    return total


def value(name, task, outputs, targets, sizes=None):
    return METRICS[name].of(summed(name, task, np.asarray(outputs, np.float32), targets, sizes))


# --- random data and an oracle for every metric ----------------------------------------------------------------------


def draw(task, count=83):
    """Random outputs and targets: some class is absent, some targets are unknown, some times are equal."""
    rng = np.random.default_rng(7)
    if task is CLASSES:
        y = rng.choice([0, 1, 2, 3, 4, 6], count)
        return (2 * rng.normal(size=(count, 7)) + 2 * np.eye(7)[y]).astype(np.float32), y.astype(np.int32)
    if task is LABELS:
        y = rng.choice([-1, 0, 1], (count, 4), p=[0.2, 0.5, 0.3]) * [1, 1, 1, 0]
        return (2 * rng.normal(size=(count, 4)) + y).astype(np.float32), y.astype(np.int32)
    if task is PIXELS:
        y = rng.choice([-1, 0, 1, 2], (count, 3, 5), p=[0.1, 0.5, 0.3, 0.1])
        return (rng.normal(size=(count, 3, 5, 4)) - 99 * np.eye(4)[3]).astype(np.float32), y.astype(np.int32)
    if task is NUMBERS:
        y = [2000.0, -3.0] + rng.normal(size=(count, 2)) * [10.0, 0.5]
        return ((y - [2000, -3]) / [10, 0.5] + rng.normal(size=(count, 2))).astype(np.float32), y.astype(np.float32)
    if task is TOKENS:
        y = rng.choice(7, (count, 5)) - 1
        return (2 * rng.normal(size=(count, 5, 6))).astype(np.float32), y.astype(np.int32)
    time, event = rng.choice([0.5, 1.0, 2.0, 3.0, 5.0], count), rng.choice(2, count)
    risk = CENTRES[rng.integers(BINS // 2 - 20, BINS // 2 + 20, count)] - time / 9
    risk = CENTRES[np.abs(CENTRES[None] - risk[:, None]).argmin(1)]
    return risk[:, None].astype(np.float32), np.stack([time, event], 1).astype(np.float32)


def of_labels(score):
    """The score of each label over the samples where it is known [C]."""
    return lambda z, y: np.array([score(y[y[:, c] >= 0, c], z[y[:, c] >= 0, c]) for c in range(z.shape[1])])


def f1_of(y, z):
    return sk.f1_score(y, z > 0, zero_division=np.nan)


def auroc_of(y, z):
    return sk.roc_auc_score(y, z) if len(set(y.tolist())) == 2 else np.nan


def quietly_balanced(z, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class is predicted that is not there
        return sk.balanced_accuracy_score(y, z.argmax(-1))


def ece_by_hand(z, y):
    shares, bins = softmax(z, -1), [[] for _ in range(15)]
    for p, label in zip(shares, y, strict=True):
        bins[min(int(p.max() * 15), 14)].append((p.max(), p.argmax() == label))
    return sum(abs(sum(p - hit for p, hit in each)) for each in bins) / len(y)


def overlaps(z, y):
    """Pixels of both, the truth and the prediction of each class, by loops."""
    both, true, predicted = np.zeros((3, z.shape[-1]))
    for index, c in np.ndenumerate(y):
        if c >= 0:
            guess = int(np.argmax(z[index]))
            true[c] += 1
            predicted[guess] += 1
            both[c] += guess == c
    return both, true, predicted


@np.errstate(invalid="ignore")
def dice_by_hand(z, y):
    both, true, predicted = overlaps(z, y)
    return 2 * both / (true + predicted)


@np.errstate(invalid="ignore")
def iou_by_hand(z, y):
    both, true, predicted = overlaps(z, y)
    return both / (true + predicted - both)


def nats_by_hand(z, y):
    losses = [-log_softmax(z[index].astype(np.float64))[token] for index, token in np.ndenumerate(y) if token >= 0]
    return sum(losses) / len(losses)


def token_accuracy_by_hand(z, y):
    hits = [np.argmax(z[index]) == token for index, token in np.ndenumerate(y) if token >= 0]
    return sum(hits) / len(hits)


def concordance_by_hand(z, y):
    """All pairs; of equal times only an event and a censored sample are compared."""
    score, pairs = 0.0, 0
    for (time, event), risk in zip(y, z[:, 0], strict=True):
        for (other_time, other_event), other_risk in zip(y, z[:, 0], strict=True):
            if event and (time < other_time or (time == other_time and not other_event)):
                pairs += 1
                score += 1.0 if risk > other_risk else 0.5 if risk == other_risk else 0.0
    return score / pairs if pairs else np.nan


def predicted(z):
    return z.astype(np.float64) * [10, 0.5] + [2000, -3]


C = range(7)
EXACT, ROUNDED, BINNED = 1e-12, 2e-6, 1e-2
ORACLES = {
    ("accuracy", CLASSES): (lambda z, y: sk.accuracy_score(y, z.argmax(-1)), EXACT),
    ("top5_accuracy", CLASSES): (lambda z, y: sk.top_k_accuracy_score(y, z, k=5, labels=C), EXACT),
    ("balanced_accuracy", CLASSES): (quietly_balanced, EXACT),
    ("recall", CLASSES): (
        lambda z, y: sk.recall_score(y, z.argmax(-1), labels=C, average=None, zero_division=np.nan), EXACT
    ),
    ("confusion", CLASSES): (lambda z, y: sk.confusion_matrix(y, z.argmax(-1), labels=C), EXACT),
    ("ece", CLASSES): (ece_by_hand, ROUNDED),
    ("brier", CLASSES): (
        lambda z, y: sum(sk.brier_score_loss(y == c, softmax(z, -1)[:, c].clip(0, 1)) for c in C), ROUNDED
    ),
    ("macro_f1", CLASSES): (lambda z, y: sk.f1_score(y, z.argmax(-1), average="macro"), EXACT),
    ("micro_f1", CLASSES): (lambda z, y: sk.f1_score(y, z.argmax(-1), average="micro"), EXACT),
    ("f1", CLASSES): (
        lambda z, y: sk.f1_score(y, z.argmax(-1), labels=C, average=None, zero_division=np.nan), EXACT
    ),
    ("auroc", CLASSES): (lambda z, y: np.nanmean([auroc_of(y == c, softmax(z, -1)[:, c]) for c in C]), BINNED),
    ("auroc_of_class", CLASSES): (lambda z, y: [auroc_of(y == c, softmax(z, -1)[:, c]) for c in C], BINNED),
    ("macro_f1", LABELS): (lambda z, y: np.nanmean(of_labels(f1_of)(z, y)), EXACT),
    ("micro_f1", LABELS): (lambda z, y: f1_of(y[y >= 0], z[y >= 0]), EXACT),
    ("f1", LABELS): (of_labels(f1_of), EXACT),
    ("auroc", LABELS): (lambda z, y: np.nanmean(of_labels(auroc_of)(z, y)), BINNED),
    ("auroc_of_class", LABELS): (of_labels(auroc_of), BINNED),
    ("exact_match", LABELS): (
        lambda z, y: np.mean([
            all((score > 0) == label for score, label in zip(zs, ys, strict=True) if label >= 0)
            for zs, ys in zip(z, y, strict=True) if max(ys) >= 0
        ]),
        EXACT,
    ),
    ("dice", PIXELS): (lambda z, y: np.nanmean(dice_by_hand(z, y)), EXACT),
    ("iou", PIXELS): (lambda z, y: np.nanmean(iou_by_hand(z, y)), EXACT),
    ("iou_of_class", PIXELS): (iou_by_hand, EXACT),
    ("pixel_accuracy", PIXELS): (token_accuracy_by_hand, EXACT),
    ("rmse", NUMBERS): (lambda z, y: sk.mean_squared_error(y, predicted(z)) ** 0.5, ROUNDED),
    ("mae", NUMBERS): (lambda z, y: sk.mean_absolute_error(y, predicted(z)), ROUNDED),
    ("r2", NUMBERS): (lambda z, y: sk.r2_score(y, predicted(z)), ROUNDED),
    ("perplexity", TOKENS): (lambda z, y: math.exp(nats_by_hand(z, y)), ROUNDED),
    ("bits_per_token", TOKENS): (lambda z, y: nats_by_hand(z, y) / math.log(2), ROUNDED),
    ("token_accuracy", TOKENS): (token_accuracy_by_hand, EXACT),
    ("concordance", RISKS): (concordance_by_hand, EXACT),
}  # fmt: skip


def test_every_metric_has_an_oracle():
    assert {name for name, _ in ORACLES} == set(METRICS)


@pytest.mark.parametrize(("name", "task"), ORACLES, ids=lambda each: getattr(each, "name", each))
def test_a_metric_equals_its_oracle(name, task):
    oracle, error = ORACLES[name, task]
    outputs, targets = draw(task)
    for sizes in (None, [83], [1, 0, 9, 50, 23]):
        found = value(name, task, outputs, targets, sizes)
        np.testing.assert_allclose(found, oracle(outputs, targets), rtol=error, atol=0)


@pytest.mark.parametrize("name", METRICS)
def test_without_samples_a_metric_is_nan(name):
    task = next(task for metric, task in ORACLES if metric == name)
    outputs, targets = draw(task, 0)
    found = value(name, task, outputs, targets, sizes=[0, 0])  # warnings are errors
    assert np.all(found == 0) if name == "confusion" else np.all(np.isnan(found)), found


def test_each_client_has_its_value():
    outputs, targets = draw(CLASSES)
    sums = [summed("recall", CLASSES, outputs[:n], targets[:n], [n]) for n in (0, 40, 83)]
    found = METRICS["recall"].each(np.stack(sums))
    assert found.shape == (3, 7) and np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[2], value("recall", CLASSES, outputs, targets))


# --- classes and labels ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=20))
def test_absent_classes_are_left_out_as_in_scikit_learn(pairs):
    task, (y, guess) = Classification(width=3), np.array(pairs, np.int32).T
    z = np.eye(3, dtype=np.float32)[guess]
    assert value("balanced_accuracy", task, z, y) == pytest.approx(quietly_balanced(z, y), rel=1e-12)
    assert value("macro_f1", task, z, y) == pytest.approx(sk.f1_score(y, guess, average="macro"), rel=1e-12)
    assert value("micro_f1", task, z, y) == pytest.approx(sk.accuracy_score(y, guess), rel=1e-12)


def test_equal_outputs_are_no_success_among_the_first_five():
    """Of equal outputs the first counts, so a network that has learnt nothing has the accuracy of chance."""
    y = np.arange(10, dtype=np.int32)
    assert value("top5_accuracy", Classification(width=10), np.zeros((10, 10)), y) == 0.5
    assert value("accuracy", Classification(width=10), np.zeros((10, 10)), y) == 0.1
    assert value("top5_accuracy", Classification(width=3), np.zeros((3, 3)), y[:3]) == 1.0


def test_one_class_alone():
    task, z, y = Classification(width=1), np.ones((3, 1)), np.zeros(3, np.int32)
    assert value("accuracy", task, z, y) == value("top5_accuracy", task, z, y) == value("macro_f1", task, z, y) == 1.0
    assert np.isnan(value("auroc", task, z, y)) and value("brier", task, z, y) == 0.0 == value("ece", task, z, y)


def test_the_brier_score_of_two_classes_is_twice_the_binary_one():
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(30, 2)), rng.integers(0, 2, 30).astype(np.int32)
    assert value("brier", Classification(width=2), z, y) == pytest.approx(
        2 * sk.brier_score_loss(y, softmax(z, -1)[:, 1]), rel=1e-6
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(CELLS, st.integers(-1, 1)), min_size=1, max_size=20))
def test_auroc_is_exact_for_scores_in_the_middle_of_bins(pairs):
    cell, y = np.array(pairs).T
    known = y >= 0
    found = value("auroc", Multilabel(width=1), CENTRES[cell][:, None], y.astype(np.int32)[:, None])
    assert found == pytest.approx(auroc_of(y[known], cell[known]), rel=1e-12, nan_ok=True)
    if known.all():  # two classes with the same odds
        logits = np.stack([np.zeros(len(y)), CENTRES[cell]], 1)
        both = value("auroc_of_class", Classification(width=2), logits, y.astype(np.int32))
        np.testing.assert_allclose(both, auroc_of(y, cell), rtol=1e-12)


@pytest.mark.parametrize(("scale", "shift"), [(0.01, 1.0), (1.0, 1.0), (30.0, 1.0), (3.0, 8.0)])
def test_auroc_errs_by_less_than_stated(scale, shift):
    """Also for new networks, whose outputs are nearly equal, and for those whose probabilities round to 0 and 1."""
    rng = np.random.default_rng(1)
    y = rng.integers(0, 5, 400).astype(np.int32)
    z = (scale * (rng.normal(size=(400, 5)) + shift * np.eye(5)[y])).astype(np.float32)
    others, own = histograms = summed("auroc", CLASSES5, z, y)
    bound = (others * own).sum(-1) / (others.sum(-1) * own.sum(-1)) / 2
    rest = np.stack([logsumexp(np.delete(z.astype(np.float64), c, 1), axis=1) for c in range(5)], 1)
    exact = np.array([auroc_of(y == c, z[:, c] - rest[:, c]) for c in range(5)])
    found = METRICS["auroc_of_class"].of(histograms)
    assert np.all(np.abs(found - exact) <= bound) and np.all(bound < 0.02)
    assert np.abs(found - exact).max() < 0.006


def test_auroc_tells_apart_probabilities_that_round_to_one():
    gap = np.linspace(20, 60, 20)
    z, y = np.stack([0 * gap, gap, 0 * gap], 1), np.where(gap > 40, 1, 2).astype(np.int32)
    assert softmax(z.astype(np.float32), -1)[:, 1].min() == 1
    np.testing.assert_array_equal(value("auroc_of_class", Classification(width=3), z, y), [np.nan, 1, 1])


def test_a_sample_with_no_known_label_does_not_count():
    z, y = np.array([[1.0, -1.0], [1.0, 1.0]]), np.array([[1, -1], [-1, -1]], np.int32)
    assert value("exact_match", Multilabel(width=2), z, y) == 1.0
    assert summed("exact_match", Multilabel(width=2), z.astype(np.float32), y)["count"] == 1


def test_counts_are_exact_where_float32_ends():
    """A cell of 2^24 pixels, in two batches: no pixel is lost."""
    half = 2**23
    y, outputs = np.zeros((1, 2**11, 2**12), np.int32), np.zeros((1, 2**11, 2**12, 1), np.float32)
    sums = compiled("dice", Segmentation(width=1))(outputs, y, np.ones(1, np.float32))
    assert sums[0, 0] == half and sums[0, 0] + sums[0, 0] == 2**24


@pytest.mark.parametrize("name", ["auroc", "concordance"])
def test_pairs_are_counted_in_float64(name):
    """The sums of one client are float32, whose digits the pairs of many samples exceed."""
    sums = np.random.default_rng(0).integers(0, 2**20, (2, 5, BINS)).astype(np.float32)
    np.testing.assert_allclose(METRICS[name].of(sums), METRICS[name].of(np.float64(sums)), rtol=1e-12)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_r2_of_far_targets_keeps_its_digits():
    """Years around 2000 of a client that deviates from the mean of all by ten standard deviations."""
    rng = np.random.default_rng(2)
    task = Regression(width=1, mean=(2000.0,), std=(10.0,))
    y = (2100 + 3 * rng.normal(size=(5000, 1))).astype(np.float32)
    z = ((y - 2000) / 10 + 0.1 * rng.normal(size=y.shape)).astype(np.float32)
    exact = sk.r2_score(y.astype(np.float64), z.astype(np.float64) * 10 + 2000)
    assert value("r2", task, z, y) == pytest.approx(exact, abs=1e-3)
    sums = compiled("r2", task)(z, y, np.ones(len(y), np.float32))  # of one client, in float32
    assert METRICS["r2"].of(sums) == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("count", [1, 9, 1000])
def test_r2_of_constant_targets_is_undefined(count):
    y = np.full((count, 1), 2013.7, np.float32)
    assert np.isnan(value("r2", Regression(width=1, mean=(2000.0,), std=(10.0,)), np.ones((count, 1)), y))


def test_perfect_predictions():
    _, y = draw(NUMBERS)
    z = (y - [2000, -3]) / [10, 0.5]
    assert value("r2", NUMBERS, z, y) == pytest.approx(1, abs=1e-6)
    assert value("rmse", NUMBERS, z, y) < 1e-3 > value("mae", NUMBERS, z, y)


# --- risks -----------------------------------------------------------------------------------------------------------

SAMPLES = st.lists(st.tuples(CELLS, st.sampled_from([0.5, 1.0, 2.0, 3.0, 5.0]), st.booleans()), max_size=20)


@settings(max_examples=40, deadline=None)
@given(SAMPLES)
def test_concordance_counts_pairs(samples):
    z = np.array([[CENTRES[cell]] for cell, _, _ in samples], np.float32).reshape(-1, 1)
    y = np.array([[time, event] for _, time, event in samples], np.float32).reshape(-1, 2)
    assert value("concordance", RISKS, z, y) == pytest.approx(concordance_by_hand(z, y), rel=1e-12, nan_ok=True)


def test_concordance_is_that_of_lifelines():
    lifelines = pytest.importorskip("lifelines", reason="the oracle: pip install 'fedjax_mr[parity]'")
    for seed in range(5):
        rng = np.random.default_rng(seed)
        y = np.stack([rng.choice([0.5, 1.0, 2.0, 3.0, 5.0], 60), rng.integers(0, 2, 60)], 1).astype(np.float32)
        z = CENTRES[rng.integers(230, 280, 60)][:, None]
        exact = lifelines.utils.concordance_index(y[:, 0], -z[:, 0], y[:, 1])
        assert value("concordance", RISKS, z, y) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("shift", [0.0, 10.0])
def test_concordance_of_any_risks_and_times_is_near(shift):
    """Cox's likelihood does not see a shift of all risks, so they may be anywhere."""
    rng = np.random.default_rng(3)
    risk = rng.normal(size=(500, 1))
    time = rng.exponential(np.exp(-risk))
    ends = rng.exponential(2.0, size=time.shape)
    y = np.concatenate([np.minimum(time, ends), time <= ends], 1).astype(np.float32)
    task = Survival(times=tuple(map(float, np.quantile(y[:, 0], np.linspace(0, 1, 256)))))
    assert value("concordance", task, risk + shift, y) == pytest.approx(concordance_by_hand(risk, y), abs=0.01)
