"""Batches whose samples are mixed: the images, the targets and the losses of every method."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import fedjax_mr as fmr
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples, one_client
from fedjax_mr.data.augment import cutmix
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing import tasks as small

SIZE, BATCH = 5, 8  # three samples of every batch are padding
halves = functools.partial(cutmix, alpha=1000.0, probability=1.0)


def a_third(key, x):
    return jnp.full((1,) * x.ndim, 1 / 3)


def nothing(key, x):  # each sample is replaced by another one of its batch
    return jnp.zeros((1,) * x.ndim)


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw(mixed, plain, data, key):
    return local.draw(mixed, data, key), local.draw(plain, data, key).position


def batch_of(x, y, mix, seed=0):
    """A batch of a client with five samples, and the positions of its samples among them."""
    data = one_client(Samples(x, y, np.ones(1, np.float32), np.zeros(1, np.float32)))
    settings = (local.LocalSetting("sgd", 1, BATCH, SIZE, mix=each) for each in (mix, None))
    batch, position = draw(*settings, data, jax.random.key(seed))
    return batch, np.asarray(position)


def test_a_box_comes_from_another_true_sample_and_its_share_is_the_real_area():
    x = np.broadcast_to(np.arange(1, 1 + SIZE, dtype=np.uint8).reshape(SIZE, 1, 1, 1), (SIZE, 9, 12, 3))
    y, partners = np.arange(SIZE, dtype=np.int32), set()
    for seed in range(10):
        batch, position = batch_of(x, y, halves, seed)
        assert batch.y is None and batch.position is None  # a loss that forgets the other half fails
        other, share, images = map(np.asarray, (batch.mixture.other, batch.mixture.share, batch.x))
        assert sorted(other[:SIZE]) == list(range(SIZE))
        np.testing.assert_array_equal(other[SIZE:], range(SIZE, BATCH))
        np.testing.assert_array_equal(batch.mixture.y, y[position])
        for row in range(SIZE):
            values, (mine, theirs) = images[row], (position[row] + 1, position[other[row]] + 1)
            assert set(np.unique(values)) == {mine, theirs}
            if mine != theirs:
                assert (values == mine).mean() == pytest.approx(share[row])
        partners.add(tuple(other))
    assert len(partners) > 5


def test_the_loss_of_mixed_images_is_the_cross_entropy_of_mixed_targets():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(SIZE, 4, 4, 1)).astype(np.float32), rng.integers(0, 3, SIZE).astype(np.int32)
    batch, position = batch_of(x, y, a_third)
    model, outputs = small.network("classification"), rng.normal(size=(BATCH, 3)).astype(np.float32)
    mine, theirs = y[position], y[position][np.asarray(batch.mixture.other)]
    soft = np.eye(3)[mine] / 3 + np.eye(3)[theirs] * 2 / 3
    both = jax.jit(lambda outputs, batch: [f(model, outputs, batch) for f in (local.task_losses, local.task_loss)])
    losses, loss = jax.device_get(both(outputs, batch))
    np.testing.assert_allclose(losses, scipy.special.logsumexp(outputs, axis=1) - (outputs * soft).sum(1), rtol=1e-5)
    np.testing.assert_allclose(loss, losses[:SIZE].mean(), rtol=1e-6)
    images = x[position] / 3 + x[position][np.asarray(batch.mixture.other)] * 2 / 3
    np.testing.assert_allclose(batch.x, images, rtol=1e-5, atol=1e-6)


def test_numbers_of_tables_are_mixed_and_their_squared_error_has_the_gradient_of_mixed_targets():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(SIZE, 6)).astype(np.float32), rng.normal(size=(SIZE, 2)).astype(np.float32)
    batch, position = batch_of(x, y, a_third)
    task, outputs = small.KINDS["regression"], rng.normal(size=(BATCH, 2)).astype(np.float32)
    model = dataclasses.replace(small.network("regression"), task=task)
    mixed = y[position] / 3 + y[position][np.asarray(batch.mixture.other)] * 2 / 3
    ours = lambda outputs, batch: local.task_loss(model, outputs, batch)
    by_hand = lambda outputs, batch: local.masked_mean(task.loss(outputs, mixed, batch.mask), batch.mask)
    both = jax.jit(lambda outputs, batch: [jax.grad(loss)(outputs, batch) for loss in (ours, by_hand)])
    np.testing.assert_allclose(*both(outputs, batch), rtol=1e-4, atol=1e-7)


def test_the_classes_of_pixels_are_cut_out_with_them():
    y = np.broadcast_to(np.arange(SIZE, dtype=np.int32).reshape(SIZE, 1, 1), (SIZE, 9, 12))
    batch, _ = batch_of(y[..., None].astype(np.float32), y, halves)
    assert batch.mixture is None and len(np.unique(batch.y[0])) == 2
    np.testing.assert_array_equal(batch.y, batch.x[..., 0])
    blended, _ = batch_of(y[..., None].astype(np.float32), y, a_third)  # half a class is none: the losses are mixed
    assert blended.mixture.share[0] == pytest.approx(1 / 3)


def test_tokens_are_not_mixed():
    with pytest.raises(UserError, match="the samples are tokens: leave it out"):
        batch_of(np.zeros((SIZE, 4), np.int32), np.zeros(SIZE, np.int32), a_third)


QUICK = ("fedntd",)  # with an own term that needs the classes, beside FedAvg's
NOISY = ("fedgen",)  # its noise belongs to a row of the batch


@pytest.mark.parametrize(
    "strategy", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)
def test_every_loss_of_a_method_belongs_to_the_sample_that_is_mixed_in(strategy, close):
    """If every sample is replaced by another one of its batch, with its target, the batch is the same in another order.

    So the rounds agree, unless a term of the method depends on the sample that was replaced.
    """
    whole = small.simulator(strategy, "classification")
    replaced = small.SharingSimulator(
        strategy,
        whole.model,
        small.federated("classification"),
        cohort=5,
        local=local.setting(lr=0.05, epochs=2, batch_size=4, mix=nothing),
        hyper=small.default_hyper(strategy),
        layout=fmr.Layout(devices=1, lanes=1),
        seed=1,
    )
    rounds = 1 if strategy in QUICK else 2  # some methods distil only from the second one
    (one, first), (other, second) = (each.run(each.init(), rounds) for each in (whole, replaced))
    assert np.isfinite(second.train_loss).all()
    if strategy not in NOISY:
        close(one.server, other.server)
        np.testing.assert_allclose(first.train_loss, second.train_loss, rtol=1e-4)


# --- By name ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_crops_and_boxes_together_train_a_network(tmp_path):
    settings = dict(augment="crop_flip,cutmix", augment_pad=1, local_epochs=1, clients=6, cohort=2, rounds=2)
    settings |= {"model": "mlp"}
    first = fmr.Config(strategy="fedmr", run_dir=str(tmp_path / "run"), progress=False, **settings)
    result = fmr.run(first, record=False)
    flags = (tmp_path / "run" / "run.flags").read_text()
    assert "--augment=crop_flip,cutmix" in flags and "--cutmix_alpha=1.0" in flags
    again = fmr.run(fmr.Config(strategy="fedmr", progress=False, **settings | {"augment": "crop_flip"}), record=False)
    assert again.rows[-1]["train_loss"] < result.rows[-1]["train_loss"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "diabetes"}, "augment=cutmix requires images, but diabetes has none"),
        ({"augment": "cutmix,cutmix"}, "augment=cutmix,cutmix has two that mix images: name one"),
        ({"augment": "cutmix,cropflip"}, "unknown augmentation 'cropflip'; did you mean 'crop_flip'"),
    ],
)
def test_what_cannot_be_mixed_is_refused_in_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        fmr.run(fmr.Config(**{"augment": "cutmix", "model": "mlp", "strategy": "fedavg", **settings}), record=False)


def test_times_are_not_mixed():
    rng = np.random.default_rng(0)
    y = np.stack([rng.random(40), np.ones(40)], axis=1)
    scans = fmr.from_arrays(rng.random((40, 8, 8)).astype(np.float32), y, task="survival", name="scans")
    with pytest.raises(UserError, match="augment=cutmix mixes two samples, but survival compares their times"):
        config = fmr.Config(augment="cutmix", model="mlp", strategy="fedavg", clients=2, cohort=2, partition="iid")
        fmr.run(config, dataset=scans, record=False)
