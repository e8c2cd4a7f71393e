"""FedKEMF: only the knowledge network travels, and the server distils the ensemble."""

import dataclasses

import jax
import numpy as np
import pytest

from fedjax_mr.engine.samples import gather
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedkemf
from fedjax_mr.strategies.fedkemf import Hyper


def test_only_knowledge_networks_travel(engine, sent):
    assert sent(engine("fedkemf", "linear,thin")) == (3 * 4 * (16 * 3 + 3), 3 * 4 * (16 * 3 + 3), 0)


@pytest.mark.parametrize("variant", ["original", pytest.param("authors", marks=pytest.mark.slow)])
def test_the_server_learns_the_ensemble(engine, variant):
    """Outputs after distillation are nearer to the mean of the clients' probabilities than the network before."""
    one = engine("fedkemf", "linear,perceptron", hyper=Hyper(server_epochs=40, server_lr=0.02, variant=variant))
    public, small = one.constants.problem.public, one.constants.problem.model.networks[0]
    x = gather(public, np.arange(10))
    softmax = jax.jit(lambda variables: jax.nn.softmax(small.apply(variables, x)))
    probabilities = lambda variables: np.asarray(softmax(variables))
    state = jax.tree.map(np.array, one.init().server)
    uploads = {"knowledge": jax.jit(jax.vmap(small.init))(jax.random.split(jax.random.key(1), 3))}
    uploads = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), uploads)
    update = jax.jit(lambda state, uploads: one.strategy.server_update(state, uploads, None, 0, jax.random.key(2))[0])
    after = update(state, uploads)
    if variant == "original":
        target = np.mean(
            [probabilities(jax.tree.map(lambda leaf, i=i: leaf[i], uploads["knowledge"])) for i in range(3)], axis=0
        )
        far = lambda variables: float((target * np.log(target / probabilities(variables))).sum(axis=1).mean())
        assert far(after.knowledge) < 0.3 * far(state.knowledge)
    else:
        right = lambda variables: probabilities(variables)[np.arange(10), public.y].mean()
        assert right(after.knowledge) > right(state.knowledge) + 0.05


def test_bad_input(federation):
    problem = federation("thin").problem
    with pytest.raises(UserError, match="public_share"):
        fedkemf.build(Hyper(), dataclasses.replace(problem, public=None))
    with pytest.raises(UserError, match="labelled"):
        fedkemf.build(Hyper(variant="authors"), dataclasses.replace(problem, public=problem.public._replace(y=None)))
    with pytest.raises(UserError, match=r"hyper.knowledge=.* must be below the number of networks"):
        fedkemf.build(Hyper(knowledge=1), problem)
