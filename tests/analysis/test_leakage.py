"""Leakage: measures against values by hand, attacks on models that leak and on models that cannot, and the command."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inversion
import leakage
import membership
from fedjax_mr import trees
from fedjax_mr.analysis import runs
from fedjax_mr.analysis.command import script
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples, gather, one_client
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError

# --- Membership -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "others", "area"),
    [
        ([3, 4], [1, 2], 1.0),
        ([1, 2], [3, 4], 0.0),
        ([1, 3], [2, 4], 0.25),  # one of the four pairs is in order
        ([1, 1], [1, 1, 1], 0.5),
        ([2, 1], [1, 0], 0.875),  # three pairs and a tie
    ],
)
def test_the_area_counts_pairs(members, others, area):
    assert membership.auc(np.array(members), np.array(others)) == area


def test_true_positives_allow_few_false_ones():
    others = np.arange(200)  # 1 % are two: thresholds above 197
    assert membership.true_positives(np.array([198, 198.5, 197, 3]), others) == 0.5
    assert membership.true_positives(np.array([300, 199, 198, 197.5]), others) == 1.0
    few = np.array([5.0, 4.0])  # not a single false one is allowed
    assert membership.true_positives(np.array([6.0, 5.0, 4.0, 1.0]), few) == 0.25
    assert membership.true_positives(np.array([6.0, 5.0, 4.0, 1.0]), few, at=0.5) == 0.5
    assert membership.true_positives(np.zeros(3), few, at=1.0) == 1.0


def test_equal_scores_are_accepted_together():
    """Three of 100 share the highest score: a threshold below it has 3 % false positives, so it is not allowed."""
    others = np.concatenate([np.zeros(97), np.ones(3)])
    assert membership.true_positives(np.array([1.0, 1.0]), others) == 0.0
    assert membership.true_positives(np.array([1.0, 2.0]), others) == 0.5
    assert membership.true_positives(np.array([1.0, 2.0]), others, at=0.03) == 1.0


def test_matched_samples_have_the_same_labels():
    labels = np.array([0] * 10 + [1] * 3 + [2] * 5 + [0] * 4 + [1] * 8)
    members, others = np.arange(18), np.arange(18, 30)
    a, b = membership.matched(members, labels[members], others, labels[others], np.random.default_rng(0))
    np.testing.assert_array_equal(np.bincount(labels[a], minlength=3), [4, 3, 0])
    np.testing.assert_array_equal(np.bincount(labels[b], minlength=3), [4, 3, 0])
    assert set(a) <= set(members) and set(b) <= set(others) and len(set(a)) == len(set(b)) == 7


def test_features_are_loss_confidences_and_correctness():
    logits = np.log([[0.5, 0.1, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4]])
    expected = [[-np.log(0.5), 0.5, 0.3, 0.1, 1], [-np.log(0.1), 0.4, 0.3, 0.2, 0]]
    np.testing.assert_allclose(membership.features(logits, np.array([0, 0])), expected)


def test_the_learned_attack_finds_the_feature_that_matters():
    rng = np.random.default_rng(0)
    draw = lambda shift: rng.normal(size=(500, 3)) * [1, 10, 0] + [0, shift, 7]  # the last one is constant
    learned = membership.Logistic.fit(draw(0), draw(20))
    assert membership.auc(learned.scores(draw(0)), learned.scores(draw(20))) > 0.9
    assert abs(membership.auc(learned.scores(draw(0)), learned.scores(draw(0))) - 0.5) < 0.06


def test_an_overfit_model_leaks_and_a_fresh_one_does_not(federation):
    """Random images and labels: nothing can be learnt but the samples themselves."""
    model, rng = federation("perceptron").problem.model, np.random.default_rng(0)
    x, y = rng.normal(size=(400, 4, 4, 1)).astype(np.float32), rng.integers(0, 3, 400).astype(np.int32)
    samples = Samples(jnp.asarray(x), jnp.asarray(y), jnp.ones(1), jnp.zeros(1))
    setting = local.LocalSetting("sgd", 100, 10, max_size=16, lr=jnp.float32(0.3))
    data = one_client(samples)._replace(size=jnp.int32(16))
    fresh = jax.jit(model.init)(jax.random.key(0))
    trained = jax.jit(lambda start, data: local.train(model, setting, start, data, jax.random.key(1))[0])(fresh, data)
    areas = []
    for variables in (trained, fresh):
        logits = np.asarray(jax.jit(model.apply)(variables, jnp.asarray(x)))
        scores = -membership.losses(logits, y)
        areas.append(membership.auc(scores[:16], scores[16:]))
    assert areas[0] > 0.8
    assert abs(areas[1] - 0.5) < 0.25  # three standard errors of 16 members


# --- Inversion --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def linear(federation):
    """A linear classifier, brightnesses of its inputs, two images of known labels, and the attack."""
    model = federation("linear").problem.model
    variables = jax.jit(model.init)(jax.random.key(0))
    pixels = inversion.Pixels(jnp.array([2.0]), jnp.array([-1.0]))  # inputs from -1 to 1
    images = jax.random.uniform(jax.random.key(1), (2, 1, 4, 4, 1), minval=0.1, maxval=0.9)
    labels = jnp.array([[0], [2]], jnp.int32)
    attack = inversion.inverter(model, pixels, steps=300, smoothness=0.0, lr=0.05)
    return model, variables, pixels, images, labels, attack


FACTORS = np.array([[0.02, 0.01, 0.03], [-1, 0, 0.5]], np.float32)  # scale and shift of three channels


def test_brightness_is_the_inverse_of_inputs():
    samples = Samples(np.zeros((1, 2, 2, 3), np.uint8), np.zeros(1, np.int32), *FACTORS)
    pixels = inversion.Pixels.of(samples, 0, 255)
    raw = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    inputs = gather(samples._replace(x=raw), jnp.array([0]))
    np.testing.assert_allclose(pixels.brightness(inputs), raw / 255, atol=1e-5)
    np.testing.assert_allclose(pixels.inputs(pixels.brightness(inputs)), inputs, rtol=1e-5)


@pytest.mark.parametrize("choose", [inversion.all_tensors, inversion.largest_tensor])
def test_a_linear_models_gradient_is_the_sample(linear, choose):
    """Its kernel's gradient is (p - onehot) x^T, so a sample can be read off, up to a factor without the bias."""
    model, variables, pixels, images, labels, attack = linear
    one = lambda each: inversion.gradient(model, variables, pixels.inputs(each[0]), each[1])
    gradients = jax.lax.map(one, (images, labels))
    kernel = np.asarray(gradients["classifier"]["dense"]["kernel"])  # [2, 16, 3]
    bias = np.asarray(gradients["classifier"]["dense"]["bias"])
    exact = kernel[:, :, 0] / bias[:, None, 0]  # the known result
    np.testing.assert_allclose(exact.reshape(images.shape), pixels.inputs(images), rtol=1e-3, atol=1e-4)
    restored, cosines = attack(variables, gradients, labels, choose(variables["params"]), jax.random.key(2))
    assert np.all(np.asarray(cosines) > 0.99)
    for index, (found, true) in enumerate(zip(np.asarray(restored), np.asarray(images), strict=True)):
        assert inversion.most_similar(found, np.asarray(images)) == index
        if choose is inversion.all_tensors:
            assert inversion.best_psnr(found, true) > 30


def test_noise_has_no_sample(linear):
    _, variables, _, images, labels, attack = linear
    params = variables["params"]
    noise = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), (2, *leaf.shape)), params)
    restored, _ = attack(variables, noise, labels, inversion.all_tensors(params), jax.random.key(2))
    for found, true in zip(np.asarray(restored), np.asarray(images), strict=True):
        assert inversion.best_psnr(found, true) < 15


def test_restored_images_are_compared_in_the_best_order():
    rng = np.random.default_rng(0)
    batches = rng.uniform(size=(3, 2, 4, 4, 1))
    restored = 0.5 * batches[1, ::-1] + 0.1  # brightness and contrast are wrong
    assert inversion.most_similar(restored, batches) == 1
    np.testing.assert_array_equal(inversion.order(restored, batches[1]), [1, 0])
    assert inversion.best_psnr(batches[1, ::-1], batches[1]) == pytest.approx(100)
    assert inversion.psnr(np.zeros((1, 1, 1)), np.full((1, 1, 1), 0.1)) == pytest.approx(20)


# --- A run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def victim(finished):
    (run,) = runs.read([str(finished("fedmr"))])
    return leakage.open_run(run, round=None, data_dir=None, trust=False)


@pytest.mark.slow
def test_the_round_is_that_of_the_engine(victim, close):
    rounds = victim.rebuilt.rounds
    seen = leakage.play(rounds, rounds.constants, victim.progress)
    after, _ = rounds.run(jax.tree.map(jnp.copy, victim.progress), 1)
    models = jax.device_get(after.server.models)
    close(jax.device_get(trees.mean(seen.following)), jax.device_get(rounds.deployed(after)))
    close(jax.tree.map(lambda leaf: np.sort(leaf, axis=0), jax.device_get(seen.uploads)),
          jax.tree.map(lambda leaf: np.sort(leaf, axis=0), models))  # fmt: skip
    close(jax.device_get(seen.sent), jax.device_get(victim.progress.server.models))


@pytest.mark.slow
def test_tokens_are_not_images(victim):
    samples = types.SimpleNamespace(x=np.zeros((3, 80), np.int32))
    tokens = victim.rebuilt._replace(federated=types.SimpleNamespace(dataset=samples))
    with pytest.raises(UserError, match="tokens, not images"):
        leakage.require_images(victim._replace(rebuilt=tokens), runs.RunRecord("run", "run", victim.rebuilt.config))


def test_decoys_share_the_labels():
    y, rows = np.array([0, 1, 0, 1, 2, 0]), np.array([[0, 1], [4, 2]])
    decoys = leakage._of_the_same_labels(y, rows, np.random.default_rng(0))
    np.testing.assert_array_equal(decoys, [[5, 3], [4, 5]])  # there is no other 2, and a single other 0


def test_no_victim_is_attacked_twice():
    before, after = {"w": jnp.zeros((2, 1))}, {"w": jnp.array([[1.0], [2.0]])}
    np.testing.assert_array_equal(leakage._change(before, after, 0.5, 1)["w"], [[-2]])
    np.testing.assert_array_equal(leakage._change(before, after, 0.5, 4)["w"], [[-2], [-4]])  # a cohort of two


def test_membership_alone(finished, tmp_path, capsys):
    options = ["--only=membership", "--shadows=1", f"--out={tmp_path}"]
    assert script(leakage, [str(finished("fedmr")), *options]) == 0
    out = capsys.readouterr().out
    kept = json.loads((tmp_path / leakage.RESULTS).read_text())
    (facts,) = kept["runs"].values()
    assert facts["round"] == 4 and "inversion" not in facts
    for view in (leakage.UPLOAD, leakage.NEXT):
        for attack in ("loss", "shadow models"):
            score = facts["membership"][view][attack]
            assert 0.2 < score["auc"] < 0.8 and 0 <= score["true_positives"] <= 1 and score["samples"] > 10
            assert f"{score['auc']:.3f} ±" in out
    assert {each.name for each in tmp_path.iterdir()} == {leakage.RESULTS}


@pytest.mark.slow
def test_the_command(finished, tmp_path, capsys):
    folder = finished("fedmr")
    options = ["--shadows=1", "--steps=3", "--batch_sizes=1,2", "--victims=2", f"--out={tmp_path}"]
    assert script(leakage, [str(folder), *options]) == 0
    kept = json.loads((tmp_path / leakage.RESULTS).read_text())
    name = configuration.portable_name(runs.read([str(folder)])[0].config)
    assert kept["batch_sizes"] == [1, 2] and "membership" in kept["runs"][name]
    found = kept["runs"][name]["inversion"]
    rows = [(each["batch"], each["view"], each["tensors"]) for each in found]
    assert rows == [(b, v, t) for b in (1, 2) for v in (leakage.UPLOAD, leakage.NEXT) for t in ("all", "largest")]
    by_row = dict(zip(rows, found, strict=True))
    # An upload is one client's gradient. Of a recombined model, this is true of each tensor alone.
    assert by_row[1, leakage.UPLOAD, "all"]["cosine"] > 0.999
    assert by_row[1, leakage.NEXT, "largest"]["cosine"] > 0.999
    assert by_row[1, leakage.NEXT, "all"]["cosine"] <= by_row[1, leakage.UPLOAD, "all"]["cosine"]
    assert f"{found[0]['psnr']:.1f} ±" in capsys.readouterr().out
    assert (tmp_path / f"leakage-{name}.png").stat().st_size > 10_000


def test_methods_without_whole_models_are_refused(victim):
    model, run = victim.rebuilt.model, runs.RunRecord("run", "run", victim.rebuilt.config)
    stacked = trees.broadcast(victim.rebuilt.rounds.deployed(victim.progress), 3)
    assert leakage.whole_models(model, {"model": stacked}) is stacked
    head = {"params": {"classifier": stacked["params"]["classifier"]}}
    for message in ({}, {"logits": jnp.zeros((3, 10))}, {"model": head}):
        with pytest.raises(UserError, match="whole models"):
            leakage.whole_models(model, message)
    without = victim.rebuilt.rounds.strategy._replace(global_model=None)
    rounds = types.SimpleNamespace(strategy=without)
    with pytest.raises(UserError, match="deploys no model"):
        leakage.require_images(victim._replace(rebuilt=victim.rebuilt._replace(rounds=rounds)), run)


@pytest.mark.parametrize(
    "option",
    ["--shadows=0", "--victims=0", "--steps=0", "--batch_sizes=1,x", "--batch_sizes=0", "--seed=-1", "--round=3000"],
)
def test_bad_options_are_one_line(finished, capsys, option):
    assert script(leakage, [str(finished("fedmr")), option]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("fedjax-mr: ") and shown.count("\n") == 1
    assert option.strip("-").partition("=")[0] in shown
