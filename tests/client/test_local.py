"""One client's training and the evaluation of a model, against plain loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData, Samples, gather
from fedjax_mr.testing.federations import numbers_like

shuffle = jax.jit(local.shuffle, static_argnums=2)


@pytest.mark.parametrize("size", [0, 1, 5, 8])
def test_shuffle_permutes_the_first_numbers_whatever_the_room(size):
    drawn = np.asarray(shuffle(jax.random.key(1), np.int32(size), 8))
    assert sorted(drawn[:size]) == list(range(size))
    longer = np.asarray(shuffle(jax.random.key(1), np.int32(size), 20))
    np.testing.assert_array_equal(drawn[:size], longer[:size])  # the longest client of a federation changes nobody


def test_shuffle_is_uniform():
    keys = jax.random.split(jax.random.key(0), 6000)
    shuffled = jax.jit(jax.vmap(lambda key: local.shuffle(key, jnp.int32(3), 5)))(keys)
    counts = np.unique(np.asarray(shuffled)[:, :3] @ np.array([9, 3, 1]), return_counts=True)[1]
    assert len(counts) == 6
    assert counts.min() > 850  # 1,000 expected, standard deviation 29


def one_client(federation, client):
    samples, index, offsets = jax.device_get(federation.federation)
    offset, size = np.int32(offsets[client]), np.asarray(federation.problem.sizes)[client]
    return ClientData(samples, index, offset, size, np.int32(client))


def train(model, setting, variables, data, key, loss=None):
    """Train one client in one compiled program."""
    return jax.jit(lambda *constants: local.train(model, setting, *constants, loss=loss))(variables, data, key)


def test_every_epoch_visits_every_sample_once_and_smaller_batches_count_true_samples(federation, close):
    """Replay the batches of `train` in a Python loop without padding: the same weights, BatchNorm statistics too."""
    federation = federation(lr=0.1, momentum=0.9)
    problem, client, key = federation.problem, 1, jax.random.key(5)  # 12 samples
    setting = local.LocalSetting(problem.local.optimizer, epochs=2, batch_size=5, max_size=12)
    variables = numbers_like(problem.model.shapes())
    data = one_client(federation, client)

    seen = []
    ordinary = local.supervised(problem.model)

    def spying(params, state, batch, key):
        jax.debug.callback(lambda y, mask: seen.append((np.asarray(y), np.asarray(mask))), batch.y, batch.mask)
        return ordinary(params, state, batch, key)

    trained, metrics = train(problem.model, setting, variables, data, key, loss=spying)
    jax.effects_barrier()
    assert [int(mask.sum()) for _, mask in seen] == [5, 5, 2] * 2
    own = data.samples.y[data.index[data.offset : data.offset + 12]]
    for epoch in (seen[:3], seen[3:]):
        labels = np.concatenate([y[mask > 0] for y, mask in epoch])
        np.testing.assert_array_equal(np.bincount(labels, minlength=3), np.bincount(own, minlength=3))
    assert (int(metrics.images), int(metrics.steps), int(metrics.bad_step)) == (24, 6, -1)

    params, state = variables["params"], {"batch_stats": variables["batch_stats"]}
    optimizer_state, total = jax.jit(setting.optimizer.init)(params), 0.0

    @jax.jit
    def one_step(params, state, optimizer_state, batch, key):
        (value, state), gradients = jax.value_and_grad(ordinary, has_aux=True)(params, state, batch, key)
        updates, optimizer_state = setting.optimizer.update(gradients, optimizer_state, params)
        return optax.apply_updates(params, updates), state, optimizer_state, value

    for epoch in range(2):
        order = np.asarray(shuffle(jax.random.fold_in(key, 2 * epoch), data.size, 12))
        step_key = jax.random.fold_in(key, 2 * epoch + 1)
        for step in range(3):
            chosen = order[5 * step : 5 * step + 5][: 12 - 5 * step]
            rows = data.index[data.offset + chosen]
            # Dropout draws by shape, so a smaller batch needs the same room: pad with zeros, masked.
            pad = lambda leaf: np.pad(leaf, [(0, 5 - len(leaf))] + [(0, 0)] * (np.ndim(leaf) - 1))
            batch = local.Batch(
                pad(data.samples.x[rows]), pad(data.samples.y[rows]), pad(np.ones(len(rows), np.float32))
            )
            batch_key = jax.random.fold_in(step_key, step)
            params, state, optimizer_state, value = one_step(params, state, optimizer_state, batch, batch_key)
            total += float(value) * len(chosen)
    close(trained, {"params": params, **state})
    np.testing.assert_allclose(float(metrics.loss), total, rtol=1e-5)


def test_a_loss_that_is_not_finite_is_named_by_its_first_step(federation):
    federation = federation("linear", lr=0.1, momentum=0.0)
    problem = federation.problem
    data = one_client(federation, 1)
    variables = numbers_like(problem.model.shapes())

    def breaking(params, state, batch, key):
        loss = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return jnp.where(loss > 0, loss, 0.0) * jnp.nan, state

    _, metrics = train(problem.model, problem.local, variables, data, jax.random.key(0), loss=breaking)
    assert int(metrics.bad_step) == 0

    def overflowing(params, state, batch, key):  # the loss is finite, its gradient is not
        loss = sum(jnp.sum(jnp.sqrt(jnp.abs(leaf * 0))) for leaf in jax.tree.leaves(params))
        return loss, state

    one_step = local.LocalSetting(problem.local.optimizer, epochs=1, batch_size=12, max_size=12)
    trained, metrics = train(problem.model, one_step, variables, data, jax.random.key(0), loss=overflowing)
    assert not np.isfinite(jax.tree.leaves(trained)[0]).all()
    assert (int(metrics.steps), int(metrics.bad_step)) == (1, 1)


def test_the_mean_of_a_batch_is_that_of_its_true_samples():
    values = jnp.array([1.0, 2.0, 6.0, 100.0])
    assert float(local.masked_mean(values, jnp.array([1.0, 1.0, 1.0, 0.0]))) == 3.0
    assert float(local.masked_mean(values, jnp.zeros(4))) == 0.0


def test_a_drawn_batch_is_the_start_of_an_epoch_and_a_client_that_stops_early_does_a_share_of_all_its_steps():
    samples = Samples(
        np.arange(8, dtype=np.float32).reshape(8, 1), np.arange(8, dtype=np.int32), np.ones(1), np.zeros(1)
    )
    data = ClientData(samples, np.array([7, 6, 5, 4, 3], np.int32), np.int32(1), np.int32(3), np.int32(0))
    setting, key = local.LocalSetting("sgd", epochs=2, batch_size=2, max_size=5), jax.random.key(3)
    counted = local.LocalStep(
        lambda start: start, lambda carry, batch, key: (carry + batch.mask.sum(), 0.0), lambda c: c
    )

    @jax.jit
    def results(data):
        early = local.run(counted, setting, 0.0, data._replace(work=jnp.float32(0.8)), key)
        order = local.shuffle(jax.random.fold_in(key, 0), data.size, 5)
        steps = jnp.stack([setting.num_steps(data.size, jnp.float32(work)) for work in (1.0, 0.8, 0.25)])
        return local.draw(setting, data, key), order[:2], early, steps

    batch, order, (seen, metrics), steps = results(data)
    np.testing.assert_array_equal(batch.position, order)
    np.testing.assert_array_equal(batch.y, np.array([6, 5, 4])[order])
    np.testing.assert_array_equal(batch.x[:, 0], np.array([6, 5, 4])[order])
    np.testing.assert_array_equal(batch.mask, [1, 1])
    np.testing.assert_array_equal(steps, [4, 3, 1])  # of three samples, two a step: two steps in each of two epochs
    assert (float(seen), int(metrics.images), int(metrics.steps)) == (5.0, 5, 3)  # 2 + 1 in one epoch, then 2


def test_bytes_become_normalised_pixels_and_tokens_stay():
    samples = Samples(
        np.array([[[[0, 255]]], [[[51, 0]]]], np.uint8), np.zeros(2, np.int32),
        np.array([1 / (255 * 0.5), 1 / (255 * 0.25)], np.float32), np.array([-1.0, -2.0], np.float32),
    )  # fmt: skip
    compiled = jax.jit(gather)
    np.testing.assert_allclose(compiled(samples, np.array([1, 0])), [[[[-0.6, -2.0]]], [[[-1.0, 2.0]]]], atol=1e-6)
    tokens = samples._replace(x=np.array([[3, 4], [5, 6]], np.int32))
    np.testing.assert_array_equal(compiled(tokens, np.array([1])), [[5, 6]])


@pytest.mark.parametrize(
    ("shape", "arranged"),
    [
        ((32, 32, 3), (24, 128)),
        ((28, 28, 1), (7, 112)),
        ((8, 8, 1), (1, 64)),
        ((13, 13, 1), (13, 13)),
        ((5,), (5,)),
        ((), ()),
    ],
)
def test_images_in_rows_are_the_same_images(shape, arranged):
    x = np.random.default_rng(0).integers(0, 256, (6, *shape), np.uint8)
    samples = Samples(x, np.arange(6, dtype=np.int32), np.full(1, 0.01, np.float32), np.full(1, -1, np.float32))
    rows, turned = samples.in_rows(), lambda images: images[:, ::-1]
    assert rows.x.shape == (6, *arranged)
    assert samples._replace(x=x[:0]).in_rows().x.shape == (0, *arranged)
    changes = (None, turned) if len(shape) == 3 else (None,)
    take = jax.jit(lambda samples: [gather(samples, np.array([4, 0, 4]), change=change) for change in changes])
    for one, other in zip(take(rows), take(samples), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "settings",
    [
        dict(name="sgd", lr=0.1),
        dict(name="sgd", lr=0.1, momentum=0.9),
        dict(name="sgd", lr=0.1, momentum=0.5, weight_decay=0.01),
        dict(name="sgd", lr=0.1, momentum=0.5, weight_decay=0.01, clip_norm=0.5),
        dict(name="adam", lr=0.01, weight_decay=0.01),
        dict(name="adamw", lr=0.01, weight_decay=0.1),
    ],
)
@jax.numpy_dtype_promotion("standard")  # optax's Adam divides by 1 - decay**count, a float to an integer power
def test_optimizers_are_pytorchs(settings):
    torch = pytest.importorskip("torch", reason="parity needs the extra 'parity'")
    rng = np.random.default_rng(0)
    start = rng.normal(size=4).astype(np.float32)
    gradients = rng.normal(size=(5, 4)).astype(np.float32)

    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    theirs = torch.nn.Parameter(torch.tensor(start))
    constants = {name: settings[name] for name in ("lr", "momentum", "weight_decay") if name in settings}
    optimizer = kinds[settings["name"]]([theirs], **constants)
    for gradient in gradients:
        theirs.grad = torch.tensor(gradient)
        if "clip_norm" in settings:
            torch.nn.utils.clip_grad_norm_([theirs], settings["clip_norm"])
        optimizer.step()

    transformation = local.make_optimizer(**settings)

    @jax.jit
    def step(ours, state, gradient):
        updates, state = transformation.update(gradient, state, ours)
        return optax.apply_updates(ours, updates), state

    ours, state = start, jax.jit(transformation.init)(start)
    for gradient in gradients:
        ours, state = step(ours, state, gradient)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=2e-5, atol=1e-6)


def test_a_rate_falls_within_a_clients_own_round_and_a_step_may_carry_numbers_of_its_own(federation):
    """A client of 5 samples has 2 epochs of 2 steps; the step counts them beside what SGD carries."""
    problem = federation("linear").problem
    setting = dataclasses.replace(problem.local, rule=optax.sgd(1.0))
    data = one_client(federation("linear"), 3)._replace(size=np.int32(5))
    steps = setting.num_steps(data.size)
    assert (int(steps), int(setting.num_steps(np.int32(0)))) == (4, 0)

    def ones(loss):
        return lambda params, *rest: (loss(params, *rest), jax.tree.map(jnp.ones_like, params))

    def counted(step):
        def counting(carry, batch, key):
            inner, loss = step.step(carry[0], batch, key)
            return (inner, carry[1] + 1), loss

        init = lambda start: (step.init(start), jnp.zeros((), jnp.int32))
        return local.LocalStep(init, counting, lambda carry: step.result(carry[0]) | {"count": carry[1]})

    def trained(data):
        optimizer = local.with_schedule(setting.optimizer, lambda over: 1 - over, steps=jnp.int32(steps))
        loss = lambda params, state, batch, key: (jnp.sum(params["w"]), state)
        by_setting = dataclasses.replace(setting, gradient=ones)
        step = counted(local.sgd(loss, by_setting, optimizer=optimizer))
        return local.run(step, setting, {"params": {"w": jnp.zeros(2)}}, data, jax.random.key(0))

    variables, metrics = jax.jit(trained)(data)
    assert (int(variables["count"]), int(metrics.steps)) == (4, 4)
    np.testing.assert_allclose(variables["params"]["w"], -(1 + 3 / 4 + 2 / 4 + 1 / 4))


@functools.cache
def recorder(room, **options):
    """The setting, and the compiled run of a client of some size, which records the samples of its steps."""
    setting = dataclasses.replace(local.setting(**{"epochs": 1, "batch_size": 4} | options), max_size=room)
    samples = Samples(np.zeros((room, 1), np.float32), np.zeros(room, np.int32), np.ones(1), np.zeros(1))
    data = ClientData(samples, jnp.arange(room, dtype=jnp.int32), np.int32(0), np.int32(0), np.int32(0))

    def step(carry, batch, key):
        number, rows = carry
        seen = jnp.where(batch.mask > 0, batch.position, -1)
        return (number + 1, rows.at[number].set(seen)), jnp.float32(0)

    def run(size):
        sized = data._replace(size=size)
        start = (jnp.int32(0), jnp.full((400, 4), -1, jnp.int32))
        same = lambda carry: carry
        return local.run(local.LocalStep(same, step, same), setting, start, sized, jax.random.key(0))

    return setting, jax.jit(run)


def batches_of(size, room, **options):
    """The samples [B] of each step of a client of ``size`` samples in a federation whose largest has ``room``."""
    setting, run = recorder(room, **options)
    (number, rows), metrics = run(np.int32(size))
    return np.asarray(rows)[: int(number)], metrics, int(setting.num_steps(np.int32(size)))


@pytest.mark.parametrize(("size", "images"), [(0, 0), (3, 30), (300, 40)])
def test_every_client_does_the_same_number_of_steps(size, images):
    """10 steps of 4: a client of 3 samples begins 10 epochs, one of 300 samples sees 40 of them once."""
    rows, metrics, counted = batches_of(size, 300, steps=10)
    assert len(rows) == int(metrics.steps) == counted == (10 if size else 0)
    assert int(metrics.images) == np.sum(rows >= 0) == images
    if size == 3:
        assert all(sorted(row) == [-1, 0, 1, 2] for row in rows) and len({tuple(row) for row in rows}) > 1
    if size == 300:
        assert len(set(rows.ravel())) == 40


@pytest.mark.parametrize("size", [3, 8, 10])
def test_steps_of_whole_epochs_are_those_epochs(size):
    """S = E ceil(n / B): the same batches with the same keys. With fewer steps, the first ones of them."""
    in_epochs, metrics, steps = batches_of(size, 12, epochs=3)
    in_steps, same, _ = batches_of(size, 12, steps=steps)
    np.testing.assert_array_equal(in_epochs, in_steps)
    assert (int(same.images), int(same.steps)) == (int(metrics.images), int(metrics.steps))
    fewer, _, _ = batches_of(size, 12, steps=steps - 2)
    np.testing.assert_array_equal(fewer, in_steps[:-2])


def test_a_late_client_does_its_share_of_the_steps():
    setting = local.setting(steps=10, batch_size=4)
    sizes = np.int32([3, 300, 0])
    np.testing.assert_array_equal(setting.num_steps(sizes), [10, 10, 0])
    np.testing.assert_array_equal(setting.num_steps(jnp.asarray(sizes), jnp.float32([0.5, 0.26, 1])), [5, 3, 0])
    assert setting.in_epochs(2).num_steps(np.int32(5)) == 4
