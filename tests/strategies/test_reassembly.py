"""Networks decomposed and reassembled: similarity, groups, rules, stitches, training in pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mr import models
from fedjax_mr.client.samples import Samples
from fedjax_mr.errors import UserError
from fedjax_mr.models import layers
from fedjax_mr.models.blocks import ConvBlock, DenseBlock, head
from fedjax_mr.strategies.pfedhr import chains, contrastive, groups, search, similarity, stitches
from fedjax_mr.strategies.pfedhr.chains import Block, Piece, PiecePrograms
from fedjax_mr.tasks import Classification

SHAPE, CLASSES = (6, 6, 1), 3

CROSS_ENTROPY = chains.supervised(Classification(width=10))


class Small(models.BlockNet):
    def blocks(self):
        return (
            ("conv1", ConvBlock(4, norm="batch")),
            ("conv2", ConvBlock(6, pool=2)),
            ("hidden", DenseBlock(12, dropout=0.2)),
            ("classifier", head(self.num_classes, initialisation="torch")),
        )


class Tiny(models.BlockNet):
    def blocks(self):
        return ("conv", ConvBlock(4, pool=3)), ("classifier", head(self.num_classes, initialisation="torch"))


def samples(count=21, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, count).astype(np.int32)
    x = (rng.normal(size=(count, *SHAPE)) * 0.5 + y[:, None, None, None]).astype(np.float32)
    return jax.device_put(Samples(x, y, np.ones(1, np.float32), np.zeros(1, np.float32)))


@pytest.fixture(scope="module")
def zoo():
    """Two networks with variables, decomposed into blocks."""
    networks = []
    for owner, network in enumerate((Small, Tiny)):
        model = models.Model(network(num_classes=CLASSES), SHAPE)
        variables = jax.jit(model.init)(jax.random.key(owner))
        networks.append((model, variables, chains.decompose(model, variables, owner=owner)))
    return networks


@pytest.fixture(scope="module")
def programs():
    return PiecePrograms(lr=1e-2)


def chain_of(blocks):
    return tuple(block.piece for block in blocks)


# --- taking apart


def test_the_blocks_of_a_network_in_forward_order(zoo):
    (_, _, small), (_, _, tiny) = zoo
    facts = [(b.owner, b.index, b.kind, b.takes, b.returns) for b in (*small, *tiny)]
    assert facts == [
        (0, 0, "conv", (6, 6, 1), (6, 6, 4)),
        (0, 1, "conv", (6, 6, 4), (3, 3, 6)),
        (0, 2, "fc", (3, 3, 6), (12,)),
        (0, 3, "fc", (12,), (3,)),
        (1, 0, "conv", (6, 6, 1), (2, 2, 4)),
        (1, 1, "fc", (2, 2, 4), (3,)),
    ]


def test_the_chain_of_the_blocks_is_the_network(zoo, programs):
    public = samples()
    for model, variables, blocks in zoo:
        ours = programs.logits(chain_of(blocks), public)
        np.testing.assert_allclose(ours, jax.jit(model.apply)(variables, public.x), rtol=1e-5, atol=1e-5)
        passed = programs.activations(chain_of(blocks), public)
        assert [x.shape[1:] for x in passed] == [blocks[0].takes, *(block.returns for block in blocks)]
        np.testing.assert_allclose(passed[-1], ours, rtol=1e-5, atol=1e-5)


def test_pieces_of_equal_blocks_share_their_programs(zoo):
    model, variables, blocks = zoo[0]
    fresh = PiecePrograms()
    fresh.logits(chain_of(blocks), samples())
    traces = fresh.traces
    fresh.logits(chain_of(chains.decompose(model, jax.tree.map(lambda leaf: 2 * leaf, variables))), samples())
    assert fresh.traces == traces == 1 + len(blocks)  # the batch, and each block


def test_token_networks_cannot_be_client_blocks():
    model = models.build("lstm1", input_shape=(5,), num_classes=4, input_dtype=np.int32)
    with pytest.raises(UserError, match="cannot be decomposed"):
        chains.decompose(model, {})


# --- similarity


def direct_cka(a, b):
    a, b = (np.asarray(each, np.float64).reshape(len(each), -1) for each in (a, b))
    centre = np.eye(len(a)) - 1 / len(a)
    one, other = (centre @ (each @ each.T) @ centre for each in (a, b))
    return (one * other).sum() / np.sqrt((one * one).sum() * (other * other).sum())


def test_cka_is_the_direct_formula():
    rng = np.random.default_rng(0)
    activations = [rng.normal(size=(12, *shape)).astype(np.float32) for shape in ((3, 3, 2), (7,), (1,))]
    table = similarity.cka([jnp.asarray(each) for each in activations])
    expected = [[direct_cka(a, b) for b in activations] for a in activations]
    np.testing.assert_allclose(table, expected, atol=1e-6)


def test_cka_ignores_rotation_scale_and_shift():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(10, 4)).astype(np.float32)
    turn, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    other = (1e6 * x @ turn.astype(np.float32) + 3e6).astype(np.float32)
    table = similarity.cka([jnp.asarray(x), jnp.asarray(other), jnp.asarray(1e-20 * x), jnp.ones((10, 3))])
    np.testing.assert_allclose(table[:3, :3], 1.0, atol=1e-4)
    assert (table[3] == 0).all()  # a constant is like nothing, and no division by zero


def test_distances_are_pfedhrs():
    entering, leaving = np.array([[1.0, 0.25], [0.25, 1.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(similarity.distances(entering, leaving), [[0.5, 4.0], [4.0, 0.5]])
    assert np.isfinite(similarity.distances(0 * entering, leaving)).all()


# --- groups


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 10**6))
def test_k_medoids_leaves_no_group_empty_and_no_better_exchange(size, count, seed):
    table = np.random.default_rng(seed).uniform(0.5, 5.0, (size, size))
    table = (table + table.T) / 2
    np.fill_diagonal(table, 0.5)
    labels = groups.k_medoids(table, count)
    assert set(labels.tolist()) == set(range(min(count, size)))
    np.testing.assert_array_equal(labels, groups.k_medoids(table, count))


def test_k_medoids_swaps_the_medoids_that_were_best_one_by_one():
    """Of six points on a line, the best single medoid is 2, then 4. But 1 and 4 together are nearer to all."""
    points = np.arange(6.0)
    labels = groups.k_medoids(np.abs(points[:, None] - points), 2)
    assert labels[0] == labels[1] == labels[2] != labels[3] == labels[4] == labels[5]


def test_k_medoids_finds_clusters_and_keeps_twins_together():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(centre, 0.01, (4, 2)) for centre in ((0, 0), (5, 0), (0, 5))])
    points = np.concatenate([points, points])
    table = 0.5 + np.linalg.norm(points[:, None] - points[None], axis=-1)
    labels = groups.k_medoids(table, 3)
    assert len({tuple(labels[start : start + 4]) for start in (0, 4, 8)}) == 3
    np.testing.assert_array_equal(labels[:12], labels[12:])


def test_the_authors_k_means_puts_alike_activations_together():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 20, 5))
    maps = np.repeat(a[:, None, :], 4, axis=1).reshape(20, 2, 2, 5)  # the same after averaging
    entering = [groups.averaged(each.astype(np.float32)) for each in (a, b[:, :3], maps, 2 * b[:, :3])]
    labels = groups.averaged_k_means(entering, entering, 2, seed=3)
    assert labels[0] == labels[2] != labels[1] == labels[3]


def test_every_block_ends_in_the_group_of_the_nearest_centre():
    """The centres are the means of their groups. Inputs decide here as well as outputs."""
    rng = np.random.default_rng(0)
    entering, leaving = rng.normal(size=(2, 6, 12, 3)).astype(np.float32)
    labels = groups.averaged_k_means(list(entering), list(leaving), 3, seed=0)
    assert set(labels.tolist()) == {0, 1, 2}
    for block, label in enumerate(labels):
        distances = [
            1 / sum(direct_cka(side[block], side[labels == group].mean(axis=0)) for side in (entering, leaving))
            for group in (0, 1, 2)
        ]
        assert np.argmin(distances) == label


def test_an_empty_group_keeps_its_centre():
    """Four equal blocks: both centres are equal, so the second group is empty."""
    same = [np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)] * 4
    assert groups.averaged_k_means(same, same, 2, seed=0).tolist() == [0] * 4


# --- search


def made_up(kinds, groups_of):
    blocks = [
        Block(owner, index, kind, (), (), Piece(head(2, initialisation="torch"), {}))
        for owner, network in enumerate(kinds)
        for index, kind in enumerate(network)
    ]
    return blocks, np.array(groups_of[: len(blocks)])


networks = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3)).filter(any).map(lambda n: ["conv"] * n[0] + ["fc"] * n[1]),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("find", [search.one_per_group, search.all_allowed])
@settings(deadline=None, max_examples=100)
@given(networks, st.lists(st.integers(0, 3), min_size=40, max_size=40), st.integers(1, 6), st.integers(0, 99))
def test_every_candidate_obeys_the_rules(find, kinds, groups_of, most, seed):
    blocks, labels = made_up(kinds, groups_of)
    result = find(blocks, labels, most=most, rng=np.random.default_rng(seed))
    assert len(set(result)) == len(result) <= most
    everything = set(labels.tolist())
    diverse = [set(labels[list(each)].tolist()) == everything for each in result]
    assert all(diverse) or not any(diverse)  # R4 for all, or dropped for all
    for candidate in result:
        chosen = [blocks[i] for i in candidate]
        assert [b.index for b in chosen] == sorted({b.index for b in chosen})  # R1
        assert [b.kind for b in chosen] == sorted(b.kind for b in chosen)  # R2: "conv" < "fc"
        assert {b.kind for b in chosen} == {"conv", "fc"}  # R3
        if find is search.one_per_group:
            assert np.bincount(labels[list(candidate[1:])]).max() == 1 and len(candidate) <= len(everything) + 1
    again = find(blocks, labels, most=most, rng=np.random.default_rng(seed))
    assert result == again


def test_a_block_of_each_group_after_the_first():
    """Two clients, three groups: the earliest places, conv before fc, of two equal blocks a random one."""
    blocks, labels = made_up([["conv", "conv", "conv", "fc"], ["conv", "conv", "fc"]], [0, 0, 1, 2, 0, 0, 2])
    result = search.one_per_group(blocks, labels, most=99, rng=np.random.default_rng(0))
    # The first block; then at place 1 either client's; the one of group 1; the dense one behind it. From a block at
    # place 1 its own group has nothing more to give. The others reach no group 1.
    assert set(result) <= {(0, 1, 2, 3), (0, 5, 2, 3), (4, 1, 2, 3), (4, 5, 2, 3), (1, 2, 3), (5, 2, 3)}
    assert {each[0] for each in result} == {0, 1, 4, 5}
    drawn = set()
    for seed in range(20):
        drawn |= set(search.one_per_group(blocks, labels, most=99, rng=np.random.default_rng(seed)))
    assert len(drawn) == 6


def test_its_own_group_does_not_stand_in_the_way():
    """The second convolution of group 0 would leave group 1 without a later block."""
    blocks, labels = made_up([["conv", "conv", "fc"], ["conv", "conv", "fc"]], [0, 0, 2, 0, 1, 2])
    result = search.one_per_group(blocks, labels, most=99, rng=np.random.default_rng(0))
    assert set(result) == {(0, 4, 2), (0, 4, 5), (3, 4, 2), (3, 4, 5)} & set(result) and {0, 3} == {
        f[0] for f in result
    }


def test_every_block_that_the_rules_allow():
    blocks, labels = made_up([["conv", "conv", "conv", "fc"], ["conv", "conv", "fc"]], [0, 0, 1, 2, 0, 0, 2])
    result = search.all_allowed(blocks, labels, most=99, rng=np.random.default_rng(0))
    assert result == [(0, 1, 2, 3), (4, 1, 2, 3), (1, 2, 3), (5, 2, 3)]


@pytest.mark.parametrize("find", [search.one_per_group, search.all_allowed])
def test_rule_four_is_dropped_only_where_nothing_meets_it(find):
    blocks, labels = made_up([["conv", "fc"], ["conv", "fc"]], [0, 1, 2, 3])
    result = find(blocks, labels, most=9, rng=np.random.default_rng(0))
    assert {len(each) for each in result} == {2}
    blocks, labels = made_up([["conv", "fc"], ["conv", "conv", "fc", "fc"]], [0, 1, 0, 0, 1, 1])
    assert all(len(set(labels[list(each)])) == 2 for each in find(blocks, labels, most=9, rng=np.random.default_rng(0)))


@pytest.mark.parametrize("find", search.SEARCHES.values(), ids=search.SEARCHES)
def test_no_candidate_without_a_convolution(find):
    blocks, labels = made_up([["fc", "fc"]], [0, 1])
    assert find(blocks, labels, most=9, rng=np.random.default_rng(0)) == []


@settings(deadline=None, max_examples=30)
@given(networks, st.lists(st.integers(0, 3), min_size=40, max_size=40), st.integers(0, 99))
def test_the_authors_sampler(kinds, groups_of, seed):
    blocks, labels = made_up(kinds, groups_of)
    result = search.at_random(blocks, labels, most=9, rng=np.random.default_rng(seed))
    assert len(result) <= 4
    for candidate in result:
        assert set(labels[list(candidate)].tolist()) == set(labels.tolist())
        assert [blocks[i].kind for i in candidate] == sorted(blocks[i].kind for i in candidate)


def test_the_authors_candidates_have_four_five_six_and_four_blocks():
    blocks, labels = made_up([["conv"] * 5 + ["fc"] * 5], [0] * 10)
    result = search.at_random(blocks, labels, most=9, rng=np.random.default_rng(0))
    assert [len(candidate) for candidate in result] == [4, 5, 6, 4]


# --- stitches


def test_adaptive_averages_are_pytorchs():
    torch = pytest.importorskip("torch", reason="PyTorch is the reference: pip install 'fedjax_mr[parity]'")
    x = np.random.default_rng(0).normal(size=(2, 5, 7, 3)).astype(np.float32)
    for places in ((2, 3), (5, 7), (1, 1), (8, 4)):
        expected = torch.nn.functional.adaptive_avg_pool2d(torch.tensor(x).permute(0, 3, 1, 2), places)
        result = jax.jit(stitches.adaptive_average, static_argnums=1)(x, places)
        np.testing.assert_allclose(result, expected.permute(0, 2, 3, 1), atol=1e-6)


def test_a_stitch_is_relu_of_a_mixture_of_channels():
    """Channels (x, y) become (x, -y) + (0, 1/2); the mean of four positions, or copies of one."""
    variables = {"params": {"dense": {"kernel": np.diag([1.0, -1.0]), "bias": np.array([0.0, 0.5])}}}
    variables = jax.tree.map(np.float32, variables)
    apply = lambda stitch, x: np.asarray(jax.jit(stitch.apply)(variables, np.float32(x))).tolist()
    assert apply(stitches.ChannelStitch((2,)), [[2, 3], [-1, -3]]) == [[2, 0], [0, 3.5]]
    assert apply(stitches.ChannelStitch((2,), relu=False), [[2, 3], [-1, -3]]) == [[2, -2.5], [-1, 3.5]]
    maps = [[[[1, 1], [2, -1]], [[3, 0], [6, -4]]]]  # 2 x 2 positions with the mean (3, -1)
    assert apply(stitches.ChannelStitch((1, 1, 2)), maps) == [[[[3, 1.5]]]]
    assert apply(stitches.ChannelStitch((2,)), maps) == [[3, 1.5]]
    assert apply(stitches.ChannelStitch((1, 2, 2)), [[[[3, -1]]]]) == [[[[3, 1.5], [3, 1.5]]]]


def test_a_stitch_comes_before_each_block_and_all_but_the_first_have_relu(zoo, programs, monkeypatch):
    """Behind the last block there is a new classifier."""
    small = zoo[0][2]
    shapes = []

    def init(module, shape, key):
        shapes.append(shape)
        return Piece(module, {}, inherited=False)

    monkeypatch.setattr(programs, "init", init)
    options = dict(input_shape=SHAPE, num_classes=CLASSES, limit=10**5, programs=programs, key=jax.random.key(0))
    chain = stitches.stitch(small[1:3], kind="channel", **options)
    assert shapes == [SHAPE, (3, 3, 6), (12,)]  # of the images, and behind each block
    assert [chain[place].module for place in (0, 2)] == [
        stitches.ChannelStitch((6, 6, 4), relu=False),
        stitches.ChannelStitch((3, 3, 6), relu=True),
    ]
    assert [chain[place] for place in (1, 3)] == [small[1].piece, small[2].piece]
    assert chain[4].module == head(CLASSES, initialisation="torch")


@pytest.mark.parametrize("kind", ["channel", pytest.param("flat", marks=pytest.mark.slow)])
def test_any_order_of_blocks_can_be_stitched(zoo, programs, kind):
    (_, _, small), (_, _, tiny) = zoo
    for blocks in ((small[1], tiny[1]), (tiny[0], small[1], small[3]), (small[2], tiny[1])):
        chain = stitches.stitch(
            blocks,
            input_shape=SHAPE,
            num_classes=CLASSES,
            kind=kind,
            limit=10**5,
            programs=programs,
            key=jax.random.key(0),
        )
        assert len(chain) == 2 * len(blocks) + 1
        assert [piece.inherited for piece in chain] == [False, True] * len(blocks) + [False]
        assert programs.logits(chain, samples()).shape == (21, CLASSES)


def test_stitches_have_a_limit(zoo, programs):
    small = zoo[0][2]
    with pytest.raises(UserError, match=r"more than 1,000: pass hyper.stitch=channel"):
        stitches.stitch(
            small[1:3],
            input_shape=SHAPE,
            num_classes=3,
            kind="flat",
            limit=1000,
            programs=programs,
            key=jax.random.key(0),
        )


# --- training


def stitched(zoo, programs):
    (_, _, small), (_, _, tiny) = zoo
    return stitches.stitch(
        (tiny[0], small[1], small[2]),
        input_shape=SHAPE,
        num_classes=CLASSES,
        kind="channel",
        limit=10**5,
        programs=programs,
        key=jax.random.key(4),
    )


def test_training_in_pieces_is_training_of_the_whole(zoo):
    """Two epochs of Adam over a network without dropout, beside one gradient of the whole network."""
    model = models.Model(Tiny(num_classes=CLASSES), SHAPE)
    _, variables, blocks = zoo[1]
    public, programs = samples(21), PiecePrograms(lr=1e-2)
    trained = programs.train(chain_of(blocks), public, jax.random.key(3), epochs=2, batch_size=21, loss=CROSS_ENTROPY)

    adam = optax.adam(1e-2)
    params, moments = variables["params"], adam.init(variables["params"])

    @jax.jit
    def step(params, moments):
        entropy = optax.softmax_cross_entropy_with_integer_labels
        slope = jax.grad(lambda p: jnp.mean(entropy(model.apply({"params": p}, public.x), public.y)))(params)
        updates, moments = adam.update(slope, moments)
        return optax.apply_updates(params, updates), moments

    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            params, moments = step(params, moments)
    for piece, name in zip(trained, ("conv", "classifier"), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), piece.variables["params"], params[name])


def test_every_epoch_visits_every_sample_once_and_every_step_has_keys_of_its_own():
    """A spy in place of the compiled programs: five samples in batches of two, two epochs, two pieces."""
    programs, batches, dropouts = PiecePrograms(), [], []

    def batch(samples, rows, key, views, mask):
        batches.append((rows, mask, key))
        return None, None, mask

    def forward(module, params, state, x, mask, dropout):
        dropouts.append(dropout)
        return x, state, None

    programs._batch, programs._forward = batch, forward
    programs._loss_gradient = lambda *each: None
    programs._step = lambda pullback, gradient, params, moments, propagate: (gradient, params, moments)
    chain = (Piece(None, {"params": {"w": np.zeros(1, np.float32)}}),) * 2
    keys = []
    for seed in (0, 1):
        batches.clear(), dropouts.clear()
        programs.train(chain, samples(5), jax.random.key(seed), epochs=2, batch_size=2, loss=CROSS_ENTROPY)
        assert [mask.tolist() for _, mask, _ in batches] == [[1, 1], [1, 1], [1, 0]] * 2
        visited = [rows[mask > 0].tolist() for rows, mask, _ in batches]
        epochs = [[*a, *b, *c] for a, b, c in (visited[:3], visited[3:])]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(5)) and epochs[0] != epochs[1]
        assert [(int(step), int(place)) for _, step, place in dropouts] == [(n // 2, n % 2) for n in range(12)]
        assert [int(key[1]) for _, _, key in batches] == list(range(6))
        keys += [tuple(jax.random.key_data(key).tolist()) for key in (dropouts[0][0], batches[0][2][0])]
    assert len(set(keys)) == 4  # of dropout and of views, from the key of the training


@pytest.mark.slow  # quick: the tests of pieces by hand
def test_training_learns_and_changes_nothing_else(zoo, programs):
    public, chain = samples(), stitched(zoo, programs)
    before = jax.tree.map(np.array, [piece.variables for piece in chain])
    loss = lambda chain: float(
        CROSS_ENTROPY(jnp.asarray(programs.logits(chain, public)), public.y, jnp.ones(len(public.y)))
    )
    trained = programs.train(chain, public, jax.random.key(0), epochs=25, batch_size=8, loss=CROSS_ENTROPY)
    traces = programs.traces
    again = programs.train(chain, public, jax.random.key(0), epochs=25, batch_size=8, loss=CROSS_ENTROPY)
    assert programs.traces == traces
    assert loss(trained) < 0.8 * loss(chain)
    equal = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    equal(before, [piece.variables for piece in chain])
    equal([piece.variables for piece in trained], [piece.variables for piece in again])


def test_inherited_pieces_are_frozen_with_their_statistics_if_only_stitches_are_tuned():
    """An inherited normalisation, whose running mean otherwise moves by a tenth to the mean (4, 8), and a new head."""
    x = np.float32([[0, 8], [8, 8], [4, 8]])
    public = Samples(x, np.int32([0, 1, 1]), np.ones(1, np.float32), np.zeros(1, np.float32))
    programs = PiecePrograms(lr=0.1)
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    statistics, params = {"mean": zeros, "var": ones}, {"scale": ones, "bias": zeros}
    inherited = Piece(layers.BatchNorm(), {"params": params, "batch_stats": statistics})
    new = programs.init(head(2, initialisation="torch"), (2,), jax.random.key(0))

    def largest_step(old, new):
        pairs = zip(*(jax.tree.leaves(piece.variables["params"]) for piece in (old, new)), strict=True)
        return max(float(abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)

    for frozen in (True, False):
        options = {"epochs": 1, "batch_size": 3, "stitches_only": frozen}
        trained = programs.train((inherited, new), public, jax.random.key(1), **options, loss=CROSS_ENTROPY)
        assert largest_step(new, trained[1]) == pytest.approx(0.1, abs=1e-3)  # the first step of Adam is its rate
        assert largest_step(inherited, trained[0]) == pytest.approx(0.0 if frozen else 0.1, abs=1e-3)
        mean = trained[0].variables["batch_stats"]["mean"]
        np.testing.assert_allclose(mean, [0, 0] if frozen else [0.4, 0.8], rtol=1e-5)


@pytest.mark.slow
def test_stitches_alone(zoo, programs):
    public, chain = samples(), stitched(zoo, programs)
    trained = programs.train(
        chain, public, jax.random.key(0), epochs=2, batch_size=8, stitches_only=True, loss=CROSS_ENTROPY
    )
    for old, new in zip(chain, trained, strict=True):
        same = [
            np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (old.variables, new.variables)), strict=True)
        ]
        assert all(same) if old.inherited else not any(same)


def test_nt_xent_is_the_formula_and_ignores_padding():
    z = np.random.default_rng(0).normal(size=(6, 4))
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    alike = np.exp(unit @ unit.T / 0.5)
    np.fill_diagonal(alike, 0.0)
    expected = np.mean([-np.log(alike[i, (i + 3) % 6] / alike[i].sum()) for i in range(6)])
    nt_xent = jax.jit(functools.partial(contrastive.nt_xent, temperature=0.5))
    result = nt_xent(jnp.asarray(z, jnp.float32), jnp.ones(6))
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    padded = np.insert(z, (3, 6), 7.0, axis=0).astype(np.float32)
    mask = jnp.array([1, 1, 1, 0, 1, 1, 1, 0], jnp.float32)
    np.testing.assert_allclose(nt_xent(jnp.asarray(padded), mask), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_views_are_random_and_stay_in_range(channels):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 256, (32, 8, 8, channels)), jnp.uint8)
    view = jax.jit(functools.partial(contrastive.view, low=0.0, high=255.0))
    one, other = (view(jax.random.key(seed), x) for seed in (0, 1))
    assert one.shape == x.shape and one.dtype == jnp.float32
    assert float(one.min()) >= 0 and float(one.max()) <= 255
    assert not np.allclose(one, other)
    grey = np.isclose(one, one[..., :1], atol=1e-3).all(axis=(1, 2, 3)).mean()
    assert grey == 1 if channels == 1 else 0 < grey < 0.5


def test_a_view_without_change_is_the_image_and_otherwise_its_mirror_in_grey(monkeypatch):
    """The crop of everything, and the turn of the hue by nothing, with every choice made or not made."""
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(8, 8, 3)), jnp.float32)
    amount = lambda key, shape=(), minval=0.0, maxval=1.0: jnp.full(shape, 1.0 if minval == 0.8 else 0.0)
    monkeypatch.setattr(jax.random, "uniform", amount)

    @jax.jit
    def view(chosen):
        monkeypatch.setattr(jax.random, "bernoulli", lambda key, chance=0.5: chosen)
        return contrastive._view(jax.random.key(0), x), contrastive._jitter(jax.random.key(0), x)

    unchanged, jittered = view(False)
    np.testing.assert_allclose(unchanged, x, atol=1e-5)
    np.testing.assert_allclose(jittered, x, atol=2e-3)
    mirrored = np.asarray(x)[:, ::-1] @ np.array([0.299, 0.587, 0.114], np.float32)
    np.testing.assert_allclose(view(True)[0], np.repeat(mirrored[..., None], 3, axis=2), atol=3e-3)


def test_views_are_of_raw_pixels_and_have_their_range(monkeypatch):
    """Between, they are images of 0 to 1; each image has a key of its own."""
    x = np.array([[[[10], [30]]], [[[110], [20]]]], np.uint8)
    monkeypatch.setattr(contrastive, "_view", lambda key, image: image * 1.25)
    result = jax.jit(functools.partial(contrastive.view, low=10.0, high=110.0))(jax.random.key(0), x)
    assert result.tolist() == [[[[10], [35]]], [[[110], [22.5]]]]  # clipped to the range
    vectors = jnp.ones((2, 3))
    assert contrastive.view(jax.random.key(0), vectors, low=0.0, high=1.0) is vectors


@pytest.mark.slow
def test_training_without_labels(zoo, programs):
    public = samples()._replace(y=None)
    trained = programs.train(
        stitched(zoo, programs), public, jax.random.key(0), epochs=1, batch_size=8, loss=contrast, views=changed
    )
    assert all(np.isfinite(leaf).all() for piece in trained for leaf in jax.tree.leaves(piece.variables))


def contrast(logits, labels, mask):
    return contrastive.nt_xent(logits, mask, temperature=0.5)


def changed(key, x):
    return contrastive.view(key, x, low=-2.0, high=4.0)
