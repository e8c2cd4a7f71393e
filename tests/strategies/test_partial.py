"""Networks of which a part is shared: against their equations, and which part that is."""

import dataclasses

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES, partial

HEAD, BODY = (0, 1), (2, 3)  # positions of the perceptron's tensors


@pytest.mark.slow  # quick: the tests by hand
@pytest.mark.parametrize(
    "name, own",
    [
        ("fedrep", HEAD),
        pytest.param("fedper", HEAD, marks=pytest.mark.slow),
        pytest.param("lgfedavg", BODY, marks=pytest.mark.slow),
        pytest.param("fedbn", (), marks=pytest.mark.slow),
    ],
)
def test_three_rounds_equal_the_equations(transcription, name, own):
    by_hand = transcription(name, partial.FedRep(shared_epochs=2) if name == "fedrep" else None)
    settings = by_hand.settings

    def whole(client):
        """A client's network after the rounds so far."""
        joined = partial.join(by_hand.progress.server.part, trees.take(by_hand.progress.memory, client))
        return by_hand.read(joined)

    models = {i: whole(i) for i in range(4)}

    def train(weights, i):
        velocity = [0 * leaf for leaf in weights]
        for epoch in range(settings["epochs"]):  # one batch each
            moving = range(4)
            if name == "fedrep":
                moving = HEAD if epoch < 1 else BODY
            gradient = by_hand.gradient(lambda w: by_hand.cross_entropy(w, i), weights)
            for leaf in moving:
                velocity[leaf] = settings["momentum"] * velocity[leaf] + gradient[leaf]
            weights = [
                w - settings["lr"] * v if leaf in moving else w
                for leaf, (w, v) in enumerate(zip(weights, velocity, strict=True))
            ]
        return weights

    for clients in by_hand.rounds(3):
        trained = {i: train(models[i], i) for i in clients}
        mean = by_hand.mean([trained[i] for i in clients], by_hand.sizes_of(clients))
        models |= trained
        models = {i: [each[k] if k in own else mean[k] for k in range(4)] for i, each in models.items()}
        for i, model in models.items():
            for ours, theirs in zip(whole(i), model, strict=True):
                np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_what_stays_and_what_is_sent(federation):
    problem = federation("thin").problem
    shapes = problem.model.shapes()
    expected = {
        "fedper": lambda path: path[1] == "classifier",
        "fedrep": lambda path: path[1] == "classifier",
        "lgfedavg": lambda path: path[1] == "body",
        "fedbn": lambda path: path[2] == "norm",
    }
    for name, stays in expected.items():
        row = STRATEGIES[name]
        strategy = row.build(row.hyper() if row.hyper else None, problem)
        state = jax.eval_shape(strategy.init, jax.random.key(0))
        memory = jax.eval_shape(strategy.init_memory, jax.random.key(0), 0)
        kept = {path for path in flatten_dict(shapes) if stays(path)}
        assert set(flatten_dict(memory)) == kept and set(flatten_dict(state.part)) == set(flatten_dict(shapes)) - kept
        assert len(kept) in range(1, len(flatten_dict(shapes)))
        payload = jax.eval_shape(lambda state, each=strategy: each.dispatch(state, None, None), state)
        sent = problem.cohort_size * (trees.num_bytes(shapes) - trees.num_bytes(memory))
        assert trees.num_bytes(payload) == sent
        joined = partial.join(state.part, memory)
        assert jax.tree.structure(joined) == jax.tree.structure(shapes)


def test_fedper_keeps_the_variables_that_are_named(federation):
    """Such as a private vector of each user; a name that is none, or names everything, is refused."""
    problem = federation("thin").problem
    strategy = partial.fedper(partial.FedPer(part="body/conv/*"), problem)
    memory = jax.eval_shape(strategy.init_memory, jax.random.key(0), 0)
    assert set(flatten_dict(memory)) == {("params", "body", "conv", "kernel")}
    for part, words in (("bodi/*", "names no variables of thin: it has .*body/conv/kernel"), ("*", "names all")):
        with pytest.raises(UserError, match=words):
            partial.fedper(partial.FedPer(part=part), problem)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lgfedavg", "fedbn"])
def test_a_client_joins_both_parts_trains_them_sends_the_shared_one_and_keeps_its_own(
    tokens, trainings, monkeypatch, name
):
    """Received numbers are 10 and kept ones 20. Training adds 1. `is_own` stands in for the rule of each method."""
    federation = tokens([[0, 1, 1], [1]], epochs=5)
    model = federation.model([[0, 0]])
    is_own = {"lgfedavg": lambda path: path[1] == "body", "fedbn": lambda path: path[-1] == "bias"}.get(
        name, lambda path: path[1] == "classifier"
    )
    monkeypatch.setattr(partial, "in_batchnorm", lambda model: lambda path: path[-1] == "bias")
    hyper = partial.FedRep(shared_epochs=2) if name == "fedrep" else partial.FedPer()
    strategy = getattr(partial, name)(hyper, federation.problem)
    filled = {path: np.full_like(leaf, 20 if is_own(path) else 10) for path, leaf in flatten_dict(model).items()}
    split = lambda own: unflatten_dict({path: leaf for path, leaf in filled.items() if is_own(path) == own})
    upload, memory, _ = strategy.client_update({"part": split(False)}, split(True), federation.client(0), 0, None)
    jax.tree.map(np.testing.assert_array_equal, trainings[0].start, unflatten_dict(filled))
    more = lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree)
    jax.tree.map(np.testing.assert_array_equal, upload, {"part": more(split(False))})
    jax.tree.map(np.testing.assert_array_equal, memory, more(split(True)))
    jax.tree.map(
        np.testing.assert_array_equal,
        strategy.personal_model(partial.State(split(False)), split(True), None, None),
        unflatten_dict(filled),
    )
    uploads = {"part": jax.tree.map(lambda leaf: np.stack([leaf, leaf + 8]), split(False))}
    state, _ = strategy.server_update(None, uploads, federation.cohort, 0, None)  # 3 samples and 1
    jax.tree.map(lambda new, old: np.testing.assert_allclose(new, old + 2), state.part, split(False))


def test_fedrep_moves_only_the_head_in_the_first_epochs_and_only_the_rest_in_the_last(tokens, trainings):
    """Five samples in batches of two and three epochs are nine steps, of which the head has the first six.

    With momentum 0.5, lr 1 and gradients of 1, a part that just begins to move makes a step of 1: no velocity is left
    from the steps in which it stood still.
    """
    federation = tokens([[0, 1, 1, 0, 1], [1]], epochs=3)
    problem = dataclasses.replace(
        federation.problem, local=dataclasses.replace(federation.problem.local, momentum=np.float32(0.5))
    )
    model = federation.model([[0, 0]])
    strategy = partial.fedrep(partial.FedRep(shared_epochs=1), problem)
    memory = {"params": {"classifier": model["params"]["classifier"]}}
    strategy.client_update(
        {"part": {"params": {"body": model["params"]["body"]}}}, memory, federation.client(0), 0, None
    )
    optimizer, params = trainings[0].optimizer, model["params"]
    state, ones, steps = optimizer.init(params), jax.tree.map(np.ones_like, params), []
    for _ in range(9):
        update, state = optimizer.update(ones, state, params)
        steps.append((float(update["classifier"]["dense"]["bias"][0]), float(update["body"]["z"][0, 0])))
    assert [head != 0 for head, _ in steps] == [True] * 6 + [False] * 3
    assert [body != 0 for _, body in steps] == [False] * 6 + [True] * 3
    assert [head for head, _ in steps[:2]] == [body for _, body in steps[6:8]] == [-1.0, -1.5]


def test_batchnorm_layers_are_those_with_statistics_and_heads_the_last_block(federation):
    network = federation("normed").problem.model
    paths = sorted(flatten_dict(network.shapes()))
    norm = [path for path in paths if partial.in_batchnorm(network)(path)]
    assert {path[0] for path in norm} == {"params", "batch_stats"} and {path[-2] for path in norm} == {"norm"}
    assert {path[1] for path in paths if partial.in_head(network)(path)} == {"classifier"}


def test_fedrep_needs_an_epoch_for_the_head(federation):
    problem = federation().problem
    problem = dataclasses.replace(problem, local=dataclasses.replace(problem.local, epochs=1))
    with pytest.raises(UserError, match=r"local_epochs= must be larger than hyper.shared_epochs"):
        partial.fedrep(partial.FedRep(), problem)
