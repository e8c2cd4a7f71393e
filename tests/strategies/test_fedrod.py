"""FedRoD against its equations, and the logits of its personal models."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from fedjax_mr import models, trees
from fedjax_mr.errors import UserError
from fedjax_mr.models import layers
from fedjax_mr.models.blocks import Flatten
from fedjax_mr.strategies import fedrod


def test_three_rounds_equal_the_equations(transcription):
    by_hand = transcription("fedrod")
    torch, model = by_hand.torch, by_hand.read(by_hand.progress.server.model)
    heads = {i: [0 * leaf for leaf in model[:2]] for i in range(4)}
    counts = [torch.bincount(y, minlength=3).double() for y in by_hand.y]
    cross_entropy = torch.nn.functional.cross_entropy
    for clients in by_hand.rounds(3):
        trained = []
        for i in clients:

            def gradient(weights, i=i):
                generic, head = weights[:4], weights[4:]

                def balanced(w):
                    logits = by_hand.head(w, by_hand.features(w, by_hand.x[i]))
                    return cross_entropy(logits + torch.log(counts[i].clamp(min=1e-9)), by_hand.y[i])

                z = by_hand.features(generic, by_hand.x[i]).detach()
                fixed = by_hand.head(generic, z).detach()
                personal = lambda p: cross_entropy(fixed + by_hand.head(p, z), by_hand.y[i])
                return [*by_hand.gradient(balanced, generic), *by_hand.gradient(personal, head)]

            both = by_hand.train([*model, *heads[i]], i, gradient=gradient)
            trained.append(both[:4])
            heads[i] = both[4:]
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        by_hand.check(by_hand.progress.server.model, model)
        for i, head in heads.items():
            by_hand.check(trees.take(by_hand.progress.memory, i), head)


def test_the_personal_model_has_the_logits_of_both_heads(engine):
    one = engine("fedrod", "perceptron")
    network, state = one.constants.problem.model, jax.device_get(one.init()).server
    rng = np.random.default_rng(0)
    name = network.head_name()
    head = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), state.model["params"][name])
    personal = one.strategy.personal_model(state, head, None, None)
    x = rng.normal(size=(5, 4, 4, 1)).astype(np.float32)
    z = network.features(state.model, x)
    both = network.head(state.model, z) + network.head({"params": {**state.model["params"], name: head}}, z)
    np.testing.assert_allclose(network.apply(personal, x), both, rtol=1e-4, atol=1e-5)


class TwoLayers(nn.Module):
    """A head that is not linear."""

    @nn.compact
    def __call__(self, z, *, train=False, mask=None):
        return layers.Dense(3, name="out")(nn.tanh(layers.Dense(4, name="hidden")(z)))


class NonLinear(models.BlockNet):
    def blocks(self):
        return ("flatten", Flatten()), ("classifier", TwoLayers())


def test_a_network_whose_head_is_not_linear_is_refused(engine):
    problem = engine("fedavg", "linear").constants.problem
    network = models.Model(NonLinear(num_classes=3), (4, 4, 1), name="two_layers")
    with pytest.raises(UserError, match="two linear heads, but the head of two_layers has 4 tensors"):
        fedrod.build(None, dataclasses.replace(problem, model=network))
