"""Losses equal PyTorch's, lifelines' or a transcription in float64, and have finite gradients."""

import dataclasses
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from scipy.special import expit, log_softmax, softmax

from fedjax_mr.errors import UserError
from fedjax_mr.tasks import (
    Classification,
    Language,
    Multilabel,
    Regression,
    Segmentation,
    Survival,
    losses,
    with_metrics,
)
from fedjax_mr.tasks.losses import LOSSES, with_loss

CLASSES = Classification(width=5)
NUMBERS = Regression(width=2, mean=(20.0, -3.0), std=(10.0, 0.5))


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="PyTorch is the reference: pip install 'fedjax_mr[parity]'")


def per_sample(task, outputs, targets, mask=None):
    mask = np.ones(len(outputs), np.float32) if mask is None else mask
    return np.asarray(jax.jit(task.objective)(np.asarray(outputs, np.float32), targets, mask))


def logits(*shape, seed=0):
    return (3 * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def classes(*shape, count=5, low=0, seed=1):
    return np.random.default_rng(seed).integers(low, count, shape).astype(np.int32)


# --- classes ---------------------------------------------------------------------------------------------------------


def of_torch(torch, z, y, **options):
    options = {"reduction": "none"} | options
    return torch.nn.functional.cross_entropy(torch.tensor(z), torch.tensor(y).long(), **options).numpy()


def test_cross_entropy(torch):
    z, y = logits(9, 5), classes(9)
    np.testing.assert_allclose(per_sample(CLASSES, z, y), of_torch(torch, z, y), rtol=1e-5)


@pytest.mark.parametrize("weights", ["balanced", "1,2,0.5,3,1"])
def test_class_weights(torch, weights):
    """Each sample's loss is PyTorch's. PyTorch's mean then divides by the sum of weights, and ours by the samples."""
    z, y, counts = logits(9, 5), classes(9), np.array([10, 20, 5, 0, 15])
    task = with_loss(CLASSES, "weighted", losses.Weighted(loss_weights=weights), counts)
    used = [1.0, 0.5, 2.0, 10.0, 50 / 75] if weights == "balanced" else [1, 2, 0.5, 3, 1]
    weight = torch.tensor(used, dtype=torch.float32)
    np.testing.assert_allclose(per_sample(task, z, y), of_torch(torch, z, y, weight=weight), rtol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.7])
def test_label_smoothing(torch, share):
    z, y = logits(9, 5), classes(9)
    task = with_loss(CLASSES, "smoothed", losses.Smoothed(label_smoothing=share))
    np.testing.assert_allclose(per_sample(task, z, y), of_torch(torch, z, y, label_smoothing=share), rtol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss(gamma):
    z, y = logits(9, 5), classes(9)
    z[0, y[0]] = 60.0  # a sample that is certain: its probability rounds to 1
    task = with_loss(CLASSES, "focal", losses.Focal(focal_gamma=gamma))
    log_p = log_softmax(z.astype(np.float64), -1)[np.arange(9), y]
    np.testing.assert_allclose(per_sample(task, z, y), -((1 - np.exp(log_p)) ** gamma) * log_p, rtol=1e-5, atol=1e-9)
    gradient = jax.jit(jax.grad(lambda z: jnp.sum(task.objective(z, y, np.ones(9, np.float32)))))(z)
    assert np.isfinite(gradient).all() and np.abs(gradient[0]).max() < 1e-20


def test_the_loss_of_a_test_is_the_tasks_own():
    z, y = logits(9, 5), classes(9)
    task = with_loss(CLASSES, "focal")
    tested, own = (np.asarray(jax.jit(each.loss)(z, y, np.ones(9, np.float32))) for each in (task, CLASSES))
    np.testing.assert_array_equal(tested, own)
    assert not np.allclose(per_sample(task, z, y), own)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "quantile"])
def test_losses_of_numbers(torch, name):
    z, y = logits(9, 2), 20 + 10 * logits(9, 2, seed=1)
    chosen = {"huber": losses.Huber(huber_delta=0.7), "quantile": losses.Quantile(quantile=0.9)}.get(name)
    task = NUMBERS if name == "mse" else with_loss(NUMBERS, name, chosen)
    standard = (torch.tensor(y) - torch.tensor([20.0, -3.0])) / torch.tensor([10.0, 0.5])
    ours, f = torch.tensor(z), torch.nn.functional
    expected = {
        "mse": f.mse_loss(ours, standard, reduction="none"),
        "mae": f.l1_loss(ours, standard, reduction="none"),
        "huber": f.huber_loss(ours, standard, reduction="none", delta=0.7),
        "quantile": torch.where(standard > ours, 0.9 * (standard - ours), 0.1 * (ours - standard)),
    }[name].mean(-1)
    np.testing.assert_allclose(per_sample(task, z, y), expected.numpy(), rtol=1e-5)


def test_the_quantile_loss_is_least_at_the_quantile():
    y = np.arange(101, dtype=np.float32)[:, None]
    task = with_loss(Regression(width=1), "quantile", losses.Quantile(quantile=0.9))
    guesses = np.repeat(np.arange(101), 101)[:, None]
    assert per_sample(task, guesses, np.tile(y, (101, 1))).reshape(101, 101).mean(1).argmin() == 90


# --- labels, pixels, tokens ------------------------------------------------------------------------------------------


def test_multilabel_loss_leaves_out_unknown_labels(torch):
    z, y = logits(9, 4), classes(9, 4, count=2, low=-1)
    y[0] = -1  # nothing is known
    each = torch.nn.functional.binary_cross_entropy_with_logits
    expected = [
        each(torch.tensor(a[b >= 0]), torch.tensor(b[b >= 0]).float()) for a, b in zip(z[1:], y[1:], strict=True)
    ]
    np.testing.assert_allclose(per_sample(Multilabel(width=4), z, y), [0.0, *map(float, expected)], rtol=1e-5)


def test_loss_of_a_segmentation():
    z, y = logits(4, 3, 5, 3), classes(4, 3, 5, count=3, low=-1)
    y[1] = np.maximum(y[1], 0) % 2  # without a class
    y[2] = -1
    expected = []
    for image, truth in zip(z.astype(np.float64), y, strict=True):
        pixels = [(softmax(image[at]), c) for at, c in np.ndenumerate(truth) if c >= 0]
        entropies = [-math.log(share[c]) for share, c in pixels]
        present = sorted({c for _, c in pixels})
        dices = [
            2 * sum(share[k] for share, c in pixels if c == k)
            / (sum(share[k] for share, _ in pixels) + sum(c == k for _, c in pixels))
            for k in present
        ]  # fmt: skip
        expected.append(np.mean(entropies) + 1 - np.mean(dices) if pixels else 0.0)
    np.testing.assert_allclose(per_sample(Segmentation(width=3), z, y), expected, rtol=1e-5)


def test_loss_of_tokens(torch):
    z, y = logits(4, 6, 7), classes(4, 6, count=7, low=-1)
    y[1] = -1
    expected = []
    for row, tokens in zip(z, y, strict=True):
        own = [float(of_torch(torch, row[t : t + 1], tokens[t : t + 1])[0]) for t in range(6) if tokens[t] >= 0]
        expected.append(sum(own) / max(len(own), 1))
    np.testing.assert_allclose(per_sample(Language(width=7), z, y), expected, rtol=1e-5)
    together = of_torch(torch, z[0], y[0], ignore_index=-1, reduction="mean")
    assert per_sample(Language(width=7), z, y)[0] == pytest.approx(float(together), rel=1e-5)


# --- survival --------------------------------------------------------------------------------------------------------


def draw_times(count, *, ties, seed=0):
    rng = np.random.default_rng(seed)
    time = rng.integers(1, 6, count) if ties else rng.permutation(count) + 1
    return np.stack([time, rng.integers(0, 2, count)], 1).astype(np.float32), rng.normal(size=(count, 1))


@pytest.mark.parametrize("ties", [False, True])
def test_coxs_loss_is_breslows(ties):
    y, risk = draw_times(40, ties=ties)
    expected = []
    for time, event in y:
        at_risk = [math.exp(r) for r, (other, _) in zip(risk[:, 0], y, strict=True) if other >= time]
        expected.append(math.log(sum(at_risk)) if event else 0.0)
    expected = np.array(expected) - risk[:, 0] * y[:, 1]
    np.testing.assert_allclose(per_sample(Survival(), risk, y), expected, rtol=1e-5, atol=1e-5)


def test_coxs_loss_is_the_likelihood_of_lifelines():
    """Without ties, where Breslow's likelihood and Efron's, which lifelines has, are the same."""
    lifelines = pytest.importorskip("lifelines", reason="the oracle: pip install 'fedjax_mr[parity]'")
    pandas = pytest.importorskip("pandas")
    y, x = draw_times(60, ties=False, seed=4)
    table = pandas.DataFrame({"x": x[:, 0], "time": y[:, 0], "event": y[:, 1]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lifelines calls pandas in ways that a later one will refuse
        fitted = lifelines.CoxPHFitter().fit(table, "time", "event")
    risk = fitted.params_["x"] * x
    assert per_sample(Survival(), risk, y).sum() == pytest.approx(-fitted.log_likelihood_, rel=1e-5)
    best = per_sample(Survival(), risk, y).sum()
    assert best < min(per_sample(Survival(), risk * factor, y).sum() for factor in (0.5, 1.5))


def test_padding_is_at_no_risk():
    y, risk = draw_times(10, ties=True)
    padded_y = np.concatenate([y, np.full((4, 2), 99, np.float32)])
    padded_risk = np.concatenate([risk, np.full((4, 1), 50.0)])
    found = per_sample(Survival(), padded_risk, padded_y, np.repeat([1, 0], [10, 4]).astype(np.float32))
    np.testing.assert_allclose(found[:10], per_sample(Survival(), risk, y), rtol=1e-6)
    assert not found[10:].any()


# --- gradients and divergences ---------------------------------------------------------------------------------------

TASKS = {
    "classification": (CLASSES, logits(6, 5), classes(6)),
    "multilabel": (Multilabel(width=5), logits(6, 5), classes(6, 5, count=2, low=-1)),
    "regression": (NUMBERS, logits(6, 2), logits(6, 2)),
    "segmentation": (Segmentation(width=5), logits(6, 3, 4, 5), classes(6, 3, 4, low=-1)),
    "language": (Language(width=5), logits(6, 7, 5), classes(6, 7, low=-1)),
    "survival": (Survival(), logits(6, 1), draw_times(6, ties=True)[0]),
}


@functools.cache
def checked(name):
    """(z, mask) -> (an error if any operation gives a NaN, (loss, gradient)), compiled once per task."""
    task, _, y = TASKS[name]
    total = lambda z, mask: jnp.sum(task.loss(z, y, mask) * mask)
    return jax.jit(checkify.checkify(jax.value_and_grad(total), errors=checkify.nan_checks))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("samples", [0, 1, 4])
def test_gradients_are_finite(name, size, samples):
    mask = (np.arange(6) < samples).astype(np.float32)
    error, (loss, gradient) = checked(name)(np.float32(size * TASKS[name][1]), mask)
    error.throw()  # nor is there a NaN on the way, at which a user's debugger would stop
    assert np.isfinite(loss) and np.isfinite(gradient).all()
    assert not np.asarray(gradient[samples:]).any()


@pytest.mark.parametrize("row", LOSSES)
def test_gradients_of_every_row_are_finite(row):
    suited = TASKS["classification" if "classes" in LOSSES[row].needs else "regression"]
    task = with_loss(suited[0], row, counts=np.arange(5) if "classes" in LOSSES[row].needs else None)
    mean = jax.jit(jax.value_and_grad(lambda z: jnp.mean(task.objective(z, suited[2], np.ones(6, np.float32)))))
    for size in (1.0, 1e4):
        loss, gradient = mean(np.float32(size * suited[1]))
        assert np.isfinite(loss) and np.isfinite(gradient).all() and np.any(np.asarray(gradient))


@pytest.mark.parametrize("pixels", ["segmentation", "language", "multilabel"])
def test_gradients_without_a_known_target_are_zero(pixels):
    task, z, y = TASKS[pixels]
    total = lambda z: jnp.sum(task.loss(z, np.full_like(y, -1), np.ones(6, np.float32)))
    loss, gradient = jax.jit(jax.value_and_grad(total))(z)
    assert loss == 0 and not np.asarray(gradient).any()


def test_gradients_are_zero_if_all_are_censored():
    y, risk = draw_times(6, ties=True)
    y[:, 1] = 0
    total = lambda z: jnp.sum(Survival().loss(z, y, np.ones(6, np.float32)))
    loss, gradient = jax.jit(jax.value_and_grad(total))(np.float32(risk))
    assert loss == 0 and not np.asarray(gradient).any()


@pytest.mark.parametrize("name", TASKS)
def test_divergence_is_zero_for_equal_outputs_only(name):
    task, z, _ = TASKS[name]
    divergence = jax.jit(task.divergence)
    assert divergence(z, z).shape == (6,)
    np.testing.assert_allclose(divergence(z, z), 0, atol=1e-6)
    assert np.all(np.asarray(divergence(z, z[::-1])) > 0)


def test_divergences_by_others():
    _, z, _ = TASKS["segmentation"]
    teacher = logits(*z.shape, seed=5)
    of_optax = jax.jit(lambda z, teacher: optax.losses.kl_divergence(jax.nn.log_softmax(z), jax.nn.softmax(teacher)))
    each = np.asarray(of_optax(z, teacher)).mean((1, 2))
    np.testing.assert_allclose(jax.jit(Segmentation(width=5).divergence)(z, teacher), each, rtol=1e-4)
    yes, no = expit(teacher.astype(np.float64)), expit(-teacher.astype(np.float64))
    by_hand = yes * np.log(yes / expit(z)) + no * np.log(no / expit(-z))
    found = jax.jit(Multilabel(width=5).divergence)(z.reshape(-1, 5), teacher.reshape(-1, 5))
    np.testing.assert_allclose(found, by_hand.reshape(-1, 5).mean(-1), rtol=1e-4)
    squared = jax.jit(NUMBERS.divergence)(z.reshape(-1, 2), teacher.reshape(-1, 2))
    np.testing.assert_allclose(squared, np.square(z - teacher).reshape(-1, 2).mean(-1) / 2, rtol=1e-5)


# --- by name ---------------------------------------------------------------------------------------------------------


def test_equal_losses_are_equal_so_that_runs_share_programs():
    for row in LOSSES:
        task, counts = (CLASSES, np.arange(5)) if "classes" in LOSSES[row].needs else (NUMBERS, None)
        one, other = with_loss(task, row, counts=counts), with_loss(dataclasses.replace(task), row, counts=counts)
        assert one == other and hash(one) == hash(other) and one != task
        assert with_metrics(one) == with_loss(with_metrics(task), row, counts=counts)


@pytest.mark.parametrize(
    ("task", "name", "settings", "message"),
    [
        (NUMBERS, "focal", None, "loss=focal needs classes, which the task regression has not"),
        (CLASSES, "mae", None, "loss=mae needs numbers, which the task classification has not"),
        (CLASSES, "focall", None, "unknown loss 'focall'; did you mean 'focal'?"),
        (CLASSES, "weighted", losses.Weighted(loss_weights="1,2"), "loss_weights=1,2 must be 5 positive numbers"),
        (CLASSES, "weighted", losses.Weighted(loss_weights="1,2,3,4,0"), "must be 5 positive numbers"),
        (CLASSES, "weighted", losses.Weighted(loss_weights="equal"), "must be 5 positive numbers"),
    ],
)
def test_refusals(task, name, settings, message):
    with pytest.raises(UserError) as refused:
        with_loss(task, name, settings, np.ones(5, int))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_an_own_loss():
    def build(settings, task, counts):
        return hinge

    LOSSES["hinge"] = losses.LossRow(build, needs=frozenset({"classes"}))
    try:
        found = per_sample(with_loss(CLASSES, "hinge"), np.eye(5)[[0, 1]], np.array([0, 3]))
        np.testing.assert_array_equal(found, [0, 2])
    finally:
        del LOSSES["hinge"]
    with pytest.raises(UserError, match=r"fmr.LOSSES\['hinge'\] takes fmr.LossRow"):
        LOSSES.refuse_unless_row("hinge", hinge)


def hinge(outputs, targets, mask):
    own = jax.nn.one_hot(targets, outputs.shape[-1])
    return jnp.maximum(0.0, 1 + jnp.max(outputs - 9 * own, -1) - jnp.sum(outputs * own, -1))
