"""HeteroFL against its equations, its special cases, and what it sends."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedavg, heterofl
from fedjax_mr.strategies.heterofl import Hyper, covered_mean
from fedjax_mr.testing.federations import tree_equal

WIDTHS = (1.0, 0.4, 0.2)  # of the perceptron's five hidden units: 5, 2, 1
HIDDEN = (5, 2, 1)


@pytest.mark.parametrize(
    "own_classes, scaler", [(True, "layers"), pytest.param(False, "norms", marks=pytest.mark.slow)]
)
def test_three_rounds_equal_the_equations(transcription, own_classes, scaler):
    """The slices as networks of their own size; nothing is normalised in this one."""
    by_hand = transcription("heterofl", Hyper(widths=WIDTHS, own_classes=own_classes, scaler=scaler))
    torch, model = by_hand.torch, by_hand.read(by_hand.progress.server.model)
    levels = [client * len(WIDTHS) // 4 for client in range(4)]
    assert levels == [0, 0, 1, 2]

    for clients in by_hand.rounds(3):
        totals, counts = [torch.zeros_like(leaf) for leaf in model], [torch.zeros_like(leaf) for leaf in model]
        for i in clients:
            width, units = WIDTHS[levels[i]] if scaler == "layers" else 1.0, HIDDEN[levels[i]]
            own = torch.zeros(3, dtype=torch.bool)
            own[by_hand.y[i].unique()] = True
            own |= not own_classes

            def loss(weights, i=i, own=own, width=width):
                bias, kernel, hidden_bias, hidden = weights
                z = torch.tanh((by_hand.x[i] @ hidden + hidden_bias) / width)
                logits = (z @ kernel + bias).masked_fill(~own, 0)
                return torch.nn.functional.cross_entropy(logits, by_hand.y[i])

            cut = [model[0], model[1][:units], model[2][:units], model[3][:, :units]]
            bias, kernel, hidden_bias, hidden = by_hand.train(cut, i, loss=loss)
            for into, (a, b, c, d) in ((totals, (bias, kernel, hidden_bias, hidden)), (counts, (1, 1, 1, 1))):
                into[0][own] += a[own] if into is totals else a
                into[1][:units, own] += b[:, own] if into is totals else b
                into[2][:units] += c
                into[3][:, :units] += d
        pairs = zip(model, totals, counts, strict=True)
        model = [torch.where(count > 0, total / count.clamp(min=1), old) for old, total, count in pairs]
        by_hand.check(by_hand.progress.server.model, model)
        # Of 4 bytes each: 16 numbers and a bias into each hidden unit, 3 out of it, 3 biases.
        units = np.array([HIDDEN[levels[i]] for i in clients])
        sent = 4 * int((20 * units + 3).sum())
        assert by_hand.report.traffic.num_bytes() == (sent, sent, 0)
        assert float(by_hand.report.info["slice_multiply_adds"]) == pytest.approx(units.mean() / 5)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["perceptron", "thin"])
def test_full_width_without_masks_is_fedavg_with_equal_weights(engine, close, network):
    hetero = engine("heterofl", network, hyper=Hyper(widths=(1.0,), own_classes=False))
    average = engine("fedavg", network, hyper=fedavg.Hyper(weights="uniform"))
    progress, report = hetero.run(hetero.init(), 3)
    expected, usual = average.run(average.init(), 3)
    close(progress.server.model, expected.server.model)
    assert report.traffic.num_bytes() == usual.traffic.num_bytes()
    assert float(report.info["slice_multiply_adds"]) == 1.0


def test_the_mean_of_what_is_held_leaves_the_rest_bit_for_bit():
    rng = np.random.default_rng(0)
    old, new = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (5, 4, 3)))
    rows, weights = rng.random((5, 4)) < 0.4, rng.integers(1, 9, 5)
    rows[:, 0] = False
    for each in (None, weights):
        result = np.asarray(covered_mean(old, new, jnp.asarray(rows)[:, :, None], weights=each))
        for place in range(4):
            held = rows[:, place]
            of_rows = None if each is None else each[held]
            expected = np.average(new[held, place], axis=0, weights=of_rows) if held.any() else old[place]
            np.testing.assert_allclose(result[place], expected, rtol=1e-5)
        np.testing.assert_array_equal(result[0], old[0])


def test_a_client_trains_with_the_statistics_of_divided_inputs_and_uploads_those_of_undivided_ones(
    federation, monkeypatch
):
    """Width 1/2: means are multiplied by 2 before the training and by 1/2 after it, variances by 4 and 1/4."""
    each, problem = strategy(federation, "normed", widths=(0.5,))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), problem.model.shapes())
    data = SimpleNamespace(client_id=0)

    def train(model, setting, start, given, key, *, loss):
        assert given is data
        return start, (start, key)

    monkeypatch.setattr(heterofl.local, "train", train)
    update = jax.jit(lambda payload, key: each.client_update(payload, (), data, 0, key))
    key = jax.random.key(3)
    upload, _, (start, used) = update({"model": ones, "level": jnp.int32(0)}, key)
    assert used == key
    statistics = start["batch_stats"]["body"]["norm"]
    assert (float(statistics["mean"][0]), float(statistics["var"][0])) == (2, 4)
    tree_equal(start["params"], ones["params"])
    tree_equal(upload["model"], ones)


def test_the_inputs_of_a_normalisation_are_divided_in_training(federation):
    """Its running mean, which starts at 0, moves twice as far, and its variance, of zeros, four times."""
    problem = federation("normed").problem
    shapes = problem.model.shapes()
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes["params"])
    state = {"batch_stats": jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes["batch_stats"])}
    x = jnp.asarray(problem.public.x).reshape(-1, 4, 4, 1)
    mask = jnp.ones(len(x))

    @jax.jit
    def after():
        _, plain = problem.model.train_apply(params, state, x, mask=mask, key=jax.random.key(0))
        with heterofl.scaled(problem.layers, jnp.float32(0.5)):
            _, divided = problem.model.train_apply(params, state, x, mask=mask, key=jax.random.key(0))
        return [each["batch_stats"]["body"]["norm"] for each in (plain, divided)]

    plain, divided = after()
    np.testing.assert_allclose(divided["mean"], 2 * plain["mean"], rtol=1e-5)
    np.testing.assert_allclose(divided["var"], 4 * plain["var"], rtol=1e-5)


def test_widths_are_dealt_to_clients_by_their_numbers(federation):
    """Six clients and three widths: 0 and 1 are wide, 4 and 5 narrow, whatever their places in the cohort."""
    each, problem = strategy(federation, "perceptron", widths=WIDTHS)
    model = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), problem.model.shapes())
    cohort = heterofl.Cohort(np.array([5, 0, 3], np.int32), np.ones(3, np.float32))
    sent = jax.jit(each.dispatch)(heterofl.GlobalModel(model), cohort, None)
    assert sent["level"].tolist() == [2, 0, 1]
    assert np.count_nonzero(sent["model"]["params"]["hidden"]["dense"]["bias"], axis=1).tolist() == [1, 5, 2]


@pytest.mark.slow
def test_a_round_of_weak_clients_changes_their_slice_alone(engine):
    hetero = engine("heterofl", "perceptron", hyper=Hyper(widths=(0.4,)))
    start = jax.device_get(hetero.init())
    progress, _ = hetero.run(hetero.place(start), 1)
    before, after = (each.server.model["params"]["hidden"]["dense"] for each in (start, progress))
    np.testing.assert_array_equal(before["kernel"][:, 2:], np.asarray(after["kernel"])[:, 2:])
    np.testing.assert_array_equal(before["bias"][2:], np.asarray(after["bias"])[2:])
    assert np.all(before["kernel"][:, :2] != np.asarray(after["kernel"])[:, :2])


def test_dynamic_widths_are_drawn_anew_in_every_round(federation):
    each, problem = strategy(federation, "perceptron", widths=WIDTHS, dynamic=True)
    cohort = heterofl.Cohort(jnp.arange(6, dtype=jnp.int32), jnp.ones(6))
    state = heterofl.GlobalModel(jax.tree.map(lambda leaf: jnp.ones(leaf.shape), problem.model.shapes()))
    dispatch = jax.jit(lambda key: each.dispatch(state, cohort, key)["level"])
    drawn = np.array([dispatch(jax.random.key(seed)) for seed in range(4)])
    assert set(drawn.ravel().tolist()) == {0, 1, 2} and len(np.unique(drawn, axis=0)) == 4


def strategy(federation, network="thin", **hyper):
    problem = federation(network).problem
    return heterofl.build(Hyper(**hyper), problem), problem


@pytest.mark.slow
def test_widths_are_dealt_once_or_drawn_anew(federation):
    fixed, problem = strategy(federation, "perceptron", widths=WIDTHS)
    drawn, _ = strategy(federation, "perceptron", widths=WIDTHS, dynamic=True)
    state = fixed.init(jax.random.key(0))
    cohort = heterofl.Cohort(jnp.arange(6, dtype=jnp.int32), problem.sizes)
    levels = lambda each, seed: np.asarray(each.dispatch(state, cohort, jax.random.key(seed))["level"]).tolist()
    assert levels(fixed, 0) == levels(fixed, 1) == [0, 0, 1, 1, 2, 2]
    several = [levels(drawn, seed) for seed in range(9)]
    assert {level for each in several for level in each} == {0, 1, 2} and len({tuple(each) for each in several}) > 1


@pytest.mark.slow
def test_static_statistics_are_the_mean_over_batches_of_the_public_samples_and_do_not_travel(engine, federation):
    hetero, problem = strategy(federation, statistics="public")
    state = hetero.init(jax.random.key(0))
    result = hetero.global_model(state)["batch_stats"]["body"]["norm"]
    x, kernel = problem.public.x, np.asarray(state.model["params"]["body"]["conv"]["kernel"], np.float64)
    patches = x.reshape(10, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(10, 2, 2, 4)
    maps = patches @ kernel.reshape(4, 4)
    batches = [maps[start : start + 4].reshape(-1, 4) for start in range(0, 10, 4)]  # batches of 4, 4 and 2
    np.testing.assert_allclose(result["mean"], np.mean([each.mean(0) for each in batches], axis=0), atol=1e-5)
    np.testing.assert_allclose(result["var"], np.mean([each.var(0, ddof=1) for each in batches], axis=0), atol=1e-4)
    compiled = engine("heterofl", hyper=Hyper(widths=(1.0,), statistics="public"))
    _, report = compiled.run(compiled.init(), 1)
    sent = 3 * trees.num_bytes(problem.model.shapes()["params"])
    assert report.traffic.num_bytes() == (sent, sent, 0)


@pytest.mark.slow
@pytest.mark.parametrize("network, block, layer", [("thin", "body", "conv"), ("perceptron", "hidden", "dense")])
def test_the_scaler_divides_what_enters_normalisation_or_else_leaves_layers(federation, network, block, layer):
    """Here it is the same in both, since nothing has been normalised yet: twice what a layer gives."""
    problem = federation(network).problem
    model, x = problem.model, jax.random.normal(jax.random.key(1), (9, 4, 4, 1))
    variables = model.init(jax.random.key(0))
    with heterofl.scaled(problem.layers, jnp.float32(0.5)):
        halved = model.apply(variables, x)
    assert not np.allclose(halved, model.apply(variables, x))
    variables["params"][block][layer] = trees.scale(variables["params"][block][layer], 2.0)
    np.testing.assert_allclose(halved, model.apply(variables, x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_running_statistics_are_those_without_the_scaler(engine, close):
    """What is normalised does not depend on its unit, up to epsilon, so neither does anything else."""
    divided, plain = (engine("heterofl", "normed", hyper=Hyper(widths=(0.5,), scaler=on)) for on in ("norms", "none"))
    models = [each.run(each.init(), 3)[0].server.model for each in (divided, plain)]
    close(*models, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "hyper, message", [(Hyper(widths=()), "one width"), (Hyper(statistics="public"), "public data")]
)
def test_what_it_cannot_do_is_refused(federation, hyper, message):
    problem = federation().problem
    problem = dataclasses.replace(problem, public=None)
    with pytest.raises(UserError, match=message):
        heterofl.build(hyper, problem)
