"""FedGen against its equations, its special case, and the generator that fits every network."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import models, trees
from fedjax_mr.client import local
from fedjax_mr.engine.round import CLIENT, SERVER
from fedjax_mr.strategies import Cohort, fedgen
from fedjax_mr.strategies.fedgen import Hyper

TINY = dict(gamma_teacher=0.7, gamma_latent=0.4, server_lr=0.01, steps=4, batch_size=8, noise=3, hidden=4, decay=0.9)


uniform = jax.jit(jax.random.uniform, static_argnums=1)
shuffle = jax.jit(local.shuffle, static_argnums=2)


@jax.jit
def client_key(key, number, client):
    """The key of a client's training in a round."""
    key = jax.random.fold_in(jax.random.fold_in(key, CLIENT), number)
    return jax.random.fold_in(jax.random.fold_in(key, client), 0)


@jax.jit
def epoch_keys(key, epoch):
    """The keys of the order of an epoch's samples and of its only step."""
    return jax.random.fold_in(key, 2 * epoch), jax.random.fold_in(jax.random.fold_in(key, 2 * epoch + 1), 0)


@jax.jit
def client_draws(key):
    """The labels that a client draws in a step, and the keys of the two noises."""
    label_key, key, same_key = jax.random.split(key, 3)
    return jax.random.randint(label_key, (8,), 0, 3), key, same_key


@jax.jit
def server_draws(key, number, step, several):
    """The labels that the server draws in a step among those that several clients hold, and a noise's key."""
    key = jax.random.fold_in(jax.random.fold_in(key, SERVER), number)
    label_key, noise_key = jax.random.split(jax.random.fold_in(key, step))
    return jax.random.categorical(label_key, jnp.where(several, 0.0, -jnp.inf), shape=(8,)), noise_key


class ByHand:
    """FedGen in PyTorch: its networks and losses. Random numbers are drawn from the keys that the strategy uses."""

    def __init__(self, by_hand, hyper):
        self.by_hand, self.torch, self.hyper = by_hand, by_hand.torch, hyper
        state = by_hand.progress.server
        self.generator = [leaf.requires_grad_() for leaf in by_hand.read(state.generator)]
        self.statistics = by_hand.read(state.generator["batch_stats"])
        self.optimizer = self.adam()

    def adam(self):
        return self.torch.optim.Adam(self.generator, lr=self.hyper.server_lr, weight_decay=self.hyper.weight_decay)

    def decay(self, number):
        return self.hyper.decay**number if self.hyper.variant == "original" else 1.0

    def number(self, array):
        return self.torch.tensor(np.asarray(array))

    def noise(self, key, count):
        return self.number(uniform(key, (count, self.hyper.noise))).double()

    def generate(self, noise, labels, *, train=False):
        """Representations; leaves: hidden, latent, norm with (bias, kernel), (bias, kernel), (bias, scale)."""
        hidden_bias, hidden, latent_bias, latent, norm_bias, norm_scale = self.generator
        classes = self.torch.nn.functional.one_hot(labels, 3).double()
        x = self.torch.cat([noise, classes], dim=1) @ hidden + hidden_bias
        mean, var = self.statistics
        x = self.torch.nn.functional.batch_norm(x, mean, var, norm_scale, norm_bias, training=train)
        return x.relu() @ latent + latent_bias

    def client_loss(self, weights, number, key, rows, client):
        """A client's loss on its samples ``rows``."""
        functional, hand = self.torch.nn.functional, self.by_hand
        logits = hand.head(weights, hand.features(weights, hand.x[client][rows]))
        labels = hand.y[client][rows]
        value = functional.cross_entropy(logits, labels)
        if number == 0:
            return value
        drawn, key, same_key = client_draws(key)
        target = hand.head(weights, self.generate(self.noise(same_key, 6)[: len(rows)], labels)).detach()
        shares = functional.softmax(target, dim=1)
        divergence = functional.kl_div(functional.log_softmax(logits, dim=1), shares, reduction="batchmean")
        drawn = self.number(drawn).long()
        taught = functional.cross_entropy(hand.head(weights, self.generate(self.noise(key, 8), drawn)), drawn)
        decay = self.decay(number)
        return value + self.hyper.gamma_latent * decay * divergence + self.hyper.gamma_teacher * decay * taught

    def client_gradients(self, number, client):
        """The gradient of each local step in turn, as a function of the weights."""
        key = client_key(self.by_hand.engine.constants.key, number, client)
        epochs = iter(range(3))

        def gradient(weights):
            order_key, step_key = epoch_keys(key, next(epochs))
            size = self.by_hand.sizes[client]
            order = np.array(shuffle(order_key, jnp.asarray(size), 6))[:size]
            loss = lambda weights: self.client_loss(weights, number, step_key, order, client)
            return self.by_hand.gradient(loss, weights)

        return gradient

    def train_generator(self, number, uploads, counts):
        """Take the server's steps before the clients' models are averaged."""
        functional, constants = self.torch.nn.functional, self.by_hand.engine.constants
        if self.hyper.variant == "authors":
            self.optimizer = self.adam()
        for group in self.optimizer.param_groups:
            group["lr"] = self.hyper.server_lr * self.decay(number)
        several = (counts > 1).any(axis=0)
        for step in range(self.hyper.steps):
            labels, noise_key = server_draws(constants.key, number, step, several)
            labels, noise = self.number(labels).long(), self.noise(noise_key, 8)
            z = self.generate(noise, labels, train=True)
            loss = 0.0
            for count, weights in zip(counts, uploads, strict=True):
                shares = self.number(count / np.maximum(counts.sum(axis=0), 1))[labels]
                losses = functional.cross_entropy(self.by_hand.head(weights, z), labels, reduction="none")
                # The released codes multiply [B, 1] and [B], which is [B, B].
                loss = loss + ((shares[:, None] if self.hyper.variant == "authors" else shares) * losses).mean()
            apart = ((noise[:, None] - noise[None]) ** 2).mean(2) * (z[:, None] - z[None]).abs().mean(2)
            self.optimizer.zero_grad()
            (loss + self.torch.exp(-apart.mean())).backward()
            self.optimizer.step()


@pytest.mark.parametrize("variant", ["original", pytest.param("authors", marks=pytest.mark.slow)])
def test_three_rounds_equal_the_equations(transcription, variant):
    hyper = Hyper(variant=variant, **TINY)
    by_hand = transcription("fedgen", hyper)
    second = ByHand(by_hand, hyper)
    model = by_hand.read(by_hand.progress.server.model)
    counts = np.asarray(by_hand.engine.constants.problem.label_counts)
    for number, clients in enumerate(by_hand.rounds(3)):
        trained = [by_hand.train(model, i, gradient=second.client_gradients(number, i)) for i in clients]
        second.train_generator(number, trained, counts[clients])
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        server = by_hand.progress.server
        by_hand.check(server.model, model)
        by_hand.check(server.generator["batch_stats"], second.statistics)
        generator = [leaf.detach() for leaf in second.generator]
        # In front of BatchNorm a bias changes nothing: its gradient is rounding, which Adam scales up.
        by_hand.check({"params": server.generator["params"]["latent"]}, generator[2:4])
        by_hand.check({"params": server.generator["params"]["norm"]}, generator[4:])
        by_hand.check({"params": server.generator["params"]["hidden"]["kernel"]}, generator[1:2])


@pytest.mark.parametrize("released", [False, True])
def test_label_shares_count_for_their_own_samples_unless_released(released):
    rng = np.random.default_rng(0)
    losses, shares = rng.exponential(size=(2, 3, 7))
    products = [
        (share[:, None] if released else share) * loss for share, loss in zip(shares, losses, strict=True)
    ]  # [B, B] or [B] of each model
    expected = sum(product.mean() for product in products)
    result = fedgen.teacher_loss(jnp.asarray(losses), jnp.asarray(shares), released=released)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["perceptron", "thin"])
def test_without_both_terms_it_is_fedavg(engine, close, network):
    without = Hyper(gamma_teacher=0.0, gamma_latent=0.0, steps=1, batch_size=2, hidden=4)
    free, average = engine("fedgen", network, hyper=without), engine("fedavg", network)
    close(free.run(free.init(), 4)[0].server.model, average.run(average.init(), 4)[0].server.model)


@pytest.mark.parametrize(
    "name, num_classes, latent, parameters",
    [
        ("lenet5", 10, 84, 100_948),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("lenet5", 20, 84, 106_068),
                ("cnn_femnist", 62, 256, 215_808),
                ("resnet20", 10, 256, 189_184),
                ("resnet20", 20, 256, 194_304),
                ("vgg16", 10, 4096, 2_159_104),
                ("vgg_femnist", 62, 256, 215_808),
            )
        ),
    ],
)
def test_the_generator_is_as_wide_as_the_networks_representation(federation, name, num_classes, latent, parameters):
    row = models.MODELS[name]
    network = models.build(name, input_shape=row.input_shape, num_classes=num_classes)
    generator = fedgen.generator_for(Hyper(), network, num_classes)
    assert generator.shape == (latent,)
    shapes = jax.eval_shape(generator.init, jax.random.key(0), jnp.zeros((1, 100)), jnp.zeros(1, jnp.int32))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["params"])) == parameters


def test_alike_representations_cost_one_and_different_ones_less():
    noise = np.random.default_rng(0).random((6, 5), np.float32)
    diversity = jax.jit(fedgen.diversity)
    assert float(diversity(noise, np.ones((6, 4), np.float32))) == 1
    assert float(diversity(noise, 10 * noise)) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "perceptron"])
def test_no_label_that_several_hold_is_no_nan(engine, network):
    """Clients with one sample each: no label is held twice, and some are held by no client of the cohort."""
    alone = engine("fedgen", network, sizes=(1, 1, 1, 1), cohort=2, hyper=Hyper(**TINY))
    progress, _ = alone.run(alone.init(), 3)
    assert bool(trees.all_finite(progress.server))


def test_the_label_counts_are_sent_once(engine, sent):
    (_, first, _), (_, later, _) = (sent(engine("fedgen", "perceptron"), round) for round in (0, 1))
    assert first - later == 6 * 3 * 4  # N x C integers


LN2, LN3 = float(np.log(2)), float(np.log(3))
SMALL = dict(noise=1, hidden=2, batch_size=8, steps=1, weight_decay=0.0)


def constant_generator(strategy, representation):
    """A generator that gives one representation for all labels and noises: all parameters are 0 but the last bias."""
    shapes = jax.eval_shape(strategy.init, jax.random.key(0)).generator
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
    zero["params"]["latent"]["bias"] = jnp.asarray(representation, jnp.float32)
    return zero


def client_losses(tiny, hyper, head, rounds):
    """The losses of a client with x = (1, 0) and label 0 in some rounds; generated representations are (0, 1)."""
    strategy = fedgen.build(hyper, tiny.problem(width=2))
    payload = {"model": tiny.model(head, np.eye(2)), "generator": constant_generator(strategy, [0.0, 1.0])}
    data = tiny.client(x=[[1.0, 0.0], [0.0, 5.0]], y=[0, 1], size=1)  # the second row is padding
    update = jax.jit(lambda round: strategy.client_update(payload, None, data, round, jax.random.key(0))[2].loss)
    return [float(update(jnp.int32(round))) for round in rounds]


@pytest.mark.parametrize(
    "variant, decays",
    [
        # Not in round 0, when the generator is untrained; then decays to a lower bound.
        ("original", {0: (0, 0), 1: (0.8 / 2, 0.4 / 2), 2: (0.8 / 4, 0.4 / 4), 99: (1e-4, 1e-4)}),
        ("authors", {0: (0, 0), 2: (0.8, 0.4)}),
    ],
)
def test_a_clients_loss_has_a_head_term_and_a_divergence_from_the_second_round_on(tiny, variant, decays):
    """Its shares are (3/4, 1/4), and those of generated representations are equal."""
    hyper = Hyper(gamma_teacher=0.8, gamma_latent=0.4, decay=0.5, variant=variant, **SMALL)
    divergence = 0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)
    expected = [np.log(4 / 3) + teacher * LN2 + latent * divergence for teacher, latent in decays.values()]
    np.testing.assert_allclose(client_losses(tiny, hyper, [[LN3, 0.0], [0.0, 0.0]], decays), expected, rtol=2e-6)


def test_weights_below_the_lower_bound_are_not_raised_to_it(tiny):
    hyper = Hyper(gamma_teacher=0.0, gamma_latent=0.0, **SMALL)
    assert client_losses(tiny, hyper, np.zeros((2, 2)), [5]) == [float(np.float32(LN2))]


def test_the_generator_learns_labels_that_the_round_holds_from_heads_by_their_shares(tiny):
    """The head of client 2 is the identity I, that of client 1 is -2 I. Generated representations are zero."""
    problem = tiny.problem(width=2)
    hyper = Hyper(server_lr=0.1, decay=0.5, **SMALL)
    heads = [tiny.model(sign * np.eye(2), np.eye(2)) for sign in (1, -2)]
    uploads = {"model": jax.tree.map(lambda *leaves: jnp.stack(leaves), *heads)}
    strategy = fedgen.build(hyper, problem)
    shapes = jax.eval_shape(strategy.init, jax.random.key(0)).optimizer
    optimizer = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    state = fedgen.State(heads[0], constant_generator(strategy, [0.0, 0.0]), optimizer)

    @jax.jit
    def update(counts, sizes):
        counted = fedgen.build(hyper, dataclasses.replace(problem, label_counts=counts))
        cohort = Cohort(jnp.array([2, 1]), sizes)
        return counted.server_update(state, uploads, cohort, jnp.int32(2), jax.random.key(0))[0]

    for counts, sizes, gradient in (
        # Only label 0 is held more than once, by shares 3/4 and 1/4: 3/4 (-1/2, 1/2) - 2/4 (-1/2, 1/2).
        ([[9, 9], [2, 1], [6, 0]], (6, 3), [-0.125, 0.125]),
        # Client 2 is late, so only label 1 can be drawn, although client 1 holds it once: -2 (1/2, -1/2).
        ([[9, 9], [0, 1], [3, 0]], (0, 1), [-1.0, 1.0]),
    ):
        new = update(jnp.array(counts, jnp.int32), jnp.array(sizes, jnp.int32))
        (moment,) = [each for each in new.optimizer if hasattr(each, "mu")]
        np.testing.assert_allclose(moment.mu["latent"]["bias"], 0.1 * np.array(gradient), rtol=1e-5)
        # Adam's first step has the length of the rate, which has been halved twice.
        bias = new.generator["params"]["latent"]["bias"]
        np.testing.assert_allclose(bias, -0.1 / 4 * np.sign(gradient), rtol=1e-5)
        share = (sizes[0] - 2 * sizes[1]) / sum(sizes)
        np.testing.assert_allclose(tiny.head(new.model), share * np.eye(2), atol=1e-6)


def test_the_diversity_is_the_exponential_of_the_mean_product_of_distances():
    """Two pairs of distances 4 (squared) and (1 + 3) / 2, and two of 0: exp(-(2 x 4 x 2) / 4)."""
    loss = fedgen.diversity(jnp.array([[0.0], [2.0]]), jnp.array([[0.0, 0.0], [1.0, -3.0]]))
    assert float(loss) == pytest.approx(np.exp(-4))
