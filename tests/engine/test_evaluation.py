"""The test of a model on devices that each hold a share of the test set."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.engine import evaluation
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.testing.federations import numbers_like


@pytest.fixture(scope="module")
def models_and_logits(federation):
    """Three models of a network with BatchNorm, and what each says of every sample."""
    model = federation("normed").problem.model
    models = jax.tree.map(lambda *leaves: np.stack(leaves), *(numbers_like(model.shapes(), seed) for seed in range(3)))
    logits = jax.jit(jax.vmap(model.apply, (0, None)))(models, federation("normed").federation.samples.x)
    return models, np.asarray(logits, np.float64)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("count", [1, 7, 38])
def test_evaluation_equals_a_plain_pass(federation, models_and_logits, monkeypatch, devices, count):
    monkeypatch.setattr(local, "evaluation_batch", lambda model: 8)  # several batches per device, the last one padded
    constants, (models, all_logits) = federation("normed"), models_and_logits
    samples = constants.federation.samples
    samples = samples._replace(x=samples.x[:count], y=samples.y[:count])
    axis = client_axis(devices=devices, lanes=None, cohort_size=2)
    test = evaluation.Evaluation(constants.problem.model, samples, axis)

    def plain(row):
        logits = all_logits[row, :count]
        logits = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(count), samples.y]
        return (logits.argmax(1) == samples.y).mean(), losses.mean()

    one = test.one(trees.take(models, 1))
    np.testing.assert_allclose((one.accuracy, one.loss), plain(1), rtol=1e-5)
    each = test.each(models)
    np.testing.assert_allclose(np.stack([each.accuracy, each.loss], 1), [plain(row) for row in range(3)], rtol=1e-5)
    test.one(trees.take(models, 0))
    assert test.programs["test"].traces == 1


def test_samples_that_do_not_count_and_padding_are_masked(federation):
    constants = federation("linear")
    samples = constants.federation.samples
    samples = samples._replace(x=samples.x[:3], y=samples.y[:3])
    axis = client_axis(devices=2, lanes=None, cohort_size=2)
    counted = np.array([True, False, True])
    for given, expected in ((counted, [1, 0, 1, 0]), (None, [1, 1, 1, 0])):
        test = evaluation.Evaluation(constants.problem.model, samples, axis, counted=given)
        np.testing.assert_array_equal(test._mask, expected)


def test_sums_of_all_devices_become_means(federation, monkeypatch):
    axis = client_axis(devices=2, lanes=None, cohort_size=2)
    constants = federation("linear")
    test = evaluation.Evaluation(constants.problem.model, constants.federation.samples, axis)
    sums = {"accuracy": {"total": np.array([3, 1]), "count": np.array([4, 1])}}
    score = local.Score(sums, np.array([8.0, 2.0]), np.array([4, 1]))
    monkeypatch.setattr(test, "_per_device", lambda name, variables: score)
    assert test.one(None) == ({"accuracy": 0.8}, 2.0)


def test_a_backdoor_counts_the_images_of_other_classes_all_of_which_carry_the_trigger(federation):
    samples = federation().federation.samples
    samples = samples._replace(x=samples.x[:4], y=np.array([0, 2, 1, 2], np.int32))
    triggered, counted = evaluation.backdoor_test(samples, 2)
    assert counted.tolist() == [True, False, True, False]
    assert triggered.y.tolist() == [2] * 4 and triggered.trigger.rows.tolist() == [True] * 4
