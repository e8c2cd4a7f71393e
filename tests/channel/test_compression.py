"""Compression: each kind against NumPy and its formulas, error feedback and EF21, bytes, downloads, refusals."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.channel import Context, Link, Sent, channel, links
from fedjax_mr.channel.compression import KINDS, Compressed, compression, decode, encode, make_codec, pack, unpack
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.strategies import STRATEGIES, fedavg, fedme
from fedjax_mr.testing.federations import SIZES, default_hyper, simulator

SIZE = 23
LOSSY = [kind for kind in KINDS if kind != "none"]


def numbers(seed=0, size=SIZE):
    """Normal numbers with a zero among them."""
    x = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    x[size // 2] = 0
    return x


@functools.cache
def compiled(kind, size=SIZE, **options):
    """Compress and decode: (x, key) -> (message, C(x))."""
    codec = make_codec(kind, size, **options)

    @jax.jit
    def both(x, key):
        message = codec.encode(x, key)
        return message, codec.decode(message)

    return both


def result(kind, x, key=0, **options):
    """C(x)."""
    return np.asarray(compiled(kind, len(x), **options)(x, jax.random.key(key))[1])


# --- Each kind against NumPy and its formulas -------------------------------------------------------------------------


def by_hand(kind, x, message, key, *, ratio, levels):
    """C(x) in float64. Random draws are those of the message."""
    size, kept = len(x), max(1, round(ratio * len(x)))
    x = x.astype(np.float64)
    signs = np.where(x < 0, -1, 1)
    if kind == "qsgd":
        norm = np.sqrt((x**2).sum())
        exact = levels * np.abs(x) / norm
        drawn = np.asarray(jax.jit(jax.random.uniform, static_argnums=1)(key, (size,)))
        return signs * norm / levels * (np.floor(exact) + (drawn < exact % 1))
    if kind == "int8":
        scale = np.abs(x).max() / 127
        return scale * np.rint(x / scale)
    if kind == "sign":
        return signs * np.abs(x).mean()
    if kind == "topk":
        positions = sorted(range(size), key=lambda i: -abs(x[i]))[:kept]
        return np.where(np.isin(np.arange(size), positions), x, 0)
    words = np.asarray(jax.jit(lambda seed: jax.random.bits(jax.random.key(seed), (size,)))(message["seed"]))
    return np.where(np.isin(np.arange(size), np.argsort(words)[:kept]), x * size / kept, 0)


@pytest.mark.parametrize("kind", LOSSY)
def test_every_kind_equals_numpy(kind):
    options = {"ratio": 0.3, "levels": 5}
    for seed in range(3):
        x, key = numbers(seed), jax.random.key(seed)
        message, decoded = compiled(kind, **options)(x, key)
        np.testing.assert_allclose(decoded, by_hand(kind, x, message, key, **options), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", LOSSY)
def test_a_zero_tensor_stays_zero_and_undefined_numbers_do_not_vanish(kind):
    zeros = result(kind, np.zeros(SIZE, np.float32), ratio=0.3, levels=5)
    np.testing.assert_array_equal(zeros, 0)
    for bad in (np.nan, np.inf):
        for key in range(4):  # randk keeps 7 of 23 numbers
            undefined = numbers()
            undefined[3] = bad
            assert not np.isfinite(result(kind, undefined, key=key, ratio=0.3, levels=5)).all()


@pytest.mark.parametrize("size", [1e30, 3e38])
@pytest.mark.parametrize("kind", LOSSY)
def test_an_outlier_whose_square_is_too_large_for_float32_stays_a_number(kind, size):
    """The norm of the two numbers is 5 / 4 of ``size``: for 3e38 more than the largest float, which is then sent."""
    x, key = np.zeros(SIZE, np.float32), jax.random.key(1)
    x[[3, 8]] = 0.75 * size, -size
    message, decoded = compiled(kind, ratio=0.3, levels=5)(x, key)
    capped = np.float64(np.finfo(np.float32).max) / (1.25 * size) if (kind, size) == ("qsgd", 3e38) else 1.0
    expected = capped * by_hand(kind, x, message, key, ratio=0.3, levels=5)
    np.testing.assert_allclose(np.asarray(decoded, np.float64), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", LOSSY)
def test_equal_keys_give_equal_messages(kind, equal):
    x, run = numbers(), compiled(kind, ratio=0.3, levels=5)
    first, again, other = (run(x, jax.random.key(key)) for key in (1, 1, 2))
    equal(first, again)
    assert np.array_equal(first[1], other[1]) == (kind not in ("qsgd", "randk"))


@pytest.mark.parametrize(("kind", "options"), [("qsgd", {"levels": 2}), ("randk", {"ratio": 0.3})])
def test_random_kinds_are_unbiased_with_their_variance(kind, options):
    x, count = numbers(size=7), 20_000
    codec = make_codec(kind, len(x), **options)
    run = jax.jit(jax.vmap(lambda key: codec.decode(codec.encode(jnp.asarray(x), key))))
    errors = np.asarray(run(jax.random.split(jax.random.key(0), count)), np.float64) - x
    if kind == "qsgd":
        norm = np.sqrt((x.astype(np.float64) ** 2).sum())
        fractions = 2 * np.abs(x) / norm % 1
        variances = (norm / 2) ** 2 * fractions * (1 - fractions)
    else:
        variances = x.astype(np.float64) ** 2 * (len(x) / 2 - 1)
    assert np.all(np.abs(errors.mean(0)) <= 4 * np.sqrt(variances / count) + 1e-6)
    squares = errors**2
    assert np.all(np.abs(squares.mean(0) - variances) <= 4 * squares.std(0) / math.sqrt(count) + 1e-6)


def test_biased_kinds_contract():
    for seed in range(5):
        x = numbers(seed)
        square = lambda x: float((x.astype(np.float64) ** 2).sum())
        norm, one_norm = square(x), float(np.abs(x.astype(np.float64)).sum())
        assert square(result("topk", x, ratio=0.3) - x) <= (1 - 7 / SIZE) * norm
        error = square(result("sign", x) - x)
        assert error == pytest.approx(norm - one_norm**2 / SIZE, rel=1e-5)
        assert np.abs(result("int8", x) - x).max() <= np.abs(x).max() / 254 * (1 + 1e-5)


def test_topk_of_a_sparse_tensor_is_exact():
    sparse = np.zeros(SIZE, np.float32)
    sparse[[2, 11, 22]] = [-1e-20, 3.0, 1e20]
    np.testing.assert_array_equal(result("topk", sparse, ratio=3 / SIZE), sparse)


def test_qsgd_keeps_a_single_number():
    """Its norm is the number itself, so it has the highest level, which rounding must not exceed."""
    values = np.random.default_rng(0).normal(size=2000).astype(np.float32)
    codec = make_codec("qsgd", 2, levels=65_535)
    run = jax.jit(jax.vmap(lambda x, key: codec.decode(codec.encode(x, key))))
    x = np.stack([values, np.zeros_like(values)], axis=1)
    np.testing.assert_allclose(run(x, jax.random.split(jax.random.key(0), 2000)), x, rtol=1e-4)


@pytest.mark.parametrize("bits", [1, 5, 17, 32])
def test_integers_of_any_width_are_packed(bits):
    integers = np.random.default_rng(bits).integers(0, 2**bits, 13, dtype=np.uint32)
    packed = jax.jit(pack, static_argnums=1)(integers, bits)
    assert packed.dtype == np.uint8 and packed.shape == (math.ceil(13 * bits / 8),)
    np.testing.assert_array_equal(jax.jit(unpack, static_argnums=(1, 2))(packed, 13, bits), integers)


# --- Trees and bytes --------------------------------------------------------------------------------------------------


def bytes_by_formula(kind, size, *, ratio, levels):
    """Bytes of a tensor with d numbers: the formulas of the module's docstring, array by array."""
    kept = max(1, round(ratio * size))
    if size == 1 or (kind in ("topk", "randk") and kept == size):
        return 4 * size
    return {
        "none": lambda: 4 * size,
        "qsgd": lambda: 4 + math.ceil(size * (1 + math.ceil(math.log2(levels + 1))) / 8),
        "int8": lambda: 4 + size,
        "sign": lambda: 4 + math.ceil(size / 8),
        "topk": lambda: 4 * kept + math.ceil(kept * math.ceil(math.log2(size)) / 8),
        "randk": lambda: 4 + 4 * kept,
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "levels", "ratio"), [("qsgd", 1, 1), ("qsgd", 7, 1), ("qsgd", 8, 1), *((kind, 8, 0.2) for kind in LOSSY)]
)
def test_messages_have_as_many_bytes_as_the_formula(kind, levels, ratio):
    codec_of = functools.partial(make_codec, kind, ratio=ratio, levels=levels)
    for shape in ((), (2,), (3, 3), (64,), (5, 5, 13), (512, 10)):
        message = jax.eval_shape(lambda key, shape=shape: encode(codec_of, jnp.zeros(shape), key), jax.random.key(0))
        assert trees.num_bytes(message) == bytes_by_formula(kind, math.prod(shape), ratio=ratio, levels=levels)


def test_trees_keep_shapes_and_types_and_small_tensors(equal):
    tree = {
        "kernel": numbers(1, 12).reshape(3, 4),
        "half": numbers(2, 8).astype(jnp.bfloat16),
        "one": np.full((1, 1), 0.7, np.float32),
        "both": np.float32([1, 2]),
    }
    codec_of = functools.partial(make_codec, "topk", ratio=0.75)
    message = jax.jit(functools.partial(encode, codec_of))(tree, jax.random.key(0))
    decoded = jax.jit(functools.partial(decode, codec_of))(message)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), decoded) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), tree
    )
    equal((message["one"], message["both"]), (tree["one"], tree["both"]))  # 0.75 of two numbers are two
    assert isinstance(message["kernel"], Compressed) and int((np.asarray(decoded["kernel"]) == 0).sum()) == 3


def test_every_tensor_draws_its_own_numbers():
    codec_of = functools.partial(make_codec, "randk", ratio=0.25)
    tree = [np.ones(40, np.float32)] * 2
    first, second = jax.jit(lambda *args: decode(codec_of, encode(codec_of, *args)))(tree, jax.random.key(0))
    assert not np.array_equal(first, second)


def test_only_models_are_compressed_for_the_download():
    """Control variates and other arrays of a payload keep their bits."""
    link = compression(None, "none", download="int8")
    numbers = np.float32([0.1, 0.23, 1.0])
    payload = {"model": {"params": {"w": numbers}, "batch_stats": {"mean": numbers}}, "control": {"w": numbers}}
    received = jax.jit(lambda *args: link.open(link.down(*args)))(payload, jax.random.key(0))
    np.testing.assert_array_equal(received["control"]["w"], numbers)
    np.testing.assert_array_equal(received["model"]["batch_stats"]["mean"], numbers)
    np.testing.assert_allclose(received["model"]["params"]["w"], np.round(numbers * 127) / 127, rtol=1e-6)
    assert not np.array_equal(received["model"]["params"]["w"], numbers)


# --- EF21, without training -------------------------------------------------------------------------------------------


@functools.cache
def linear(cohort=3):
    """The problem of the small federation with a linear network, and the shapes of an upload."""
    problem = engine_of("fedavg", cohort=cohort).constants.problem
    return problem, {"model": jax.eval_shape(problem.model.init, jax.random.key(0))["params"]}


@functools.lru_cache(maxsize=16)
def engine_of(strategy, network="linear", *, cohort=3, hyper=None, recorded=False, devices=1, lanes=1, **options):
    """The rounds of a strategy with compression; without options there is none."""

    def build(hyper, problem):
        links = [compression(problem, **options)] if options else []
        return channel(STRATEGIES[strategy].build(hyper, problem), problem, links + [recorder(problem)] * recorded)

    hyper = default_hyper(strategy) if hyper is None else hyper
    return simulator((build, hyper), network, devices=devices, lanes=lanes, cohort=cohort, seed=0).rounds


def random_changes(shapes, count, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=(count, *leaf.shape)).astype(leaf.dtype), shapes)


def repeated(tree, count):
    return jax.tree.map(lambda leaf: np.repeat(leaf[None], count, axis=0), tree)


def mean_of(models):
    return jax.tree.map(lambda leaf: np.mean(leaf, axis=0), models)


def sides(link):
    """The compiled sides of a link for the K clients."""
    in_axes = (0, None, 0, Context(0, None, 0))
    client = jax.jit(
        jax.vmap(
            lambda values, reference, memory, context: link.client(values, reference, memory, context), in_axes=in_axes
        )
    )
    return client, jax.jit(link.server)


def context_of(ids, round):
    return Context(jax.random.split(jax.random.key(round), len(ids)), np.int32(round), np.int32(ids))


def test_ef21_keeps_the_mean_of_the_estimates_also_with_absent_and_repeated_clients(close):
    problem, shapes = linear()
    link = compression(problem, "topk", ratio=0.3, feedback="ef21")
    client, server = sides(link)
    g, zeros = jax.device_get((link.init(jax.random.key(0)), link.init_memory(shapes)))
    memory, reference = (repeated(zeros, count) for count in (len(SIZES), 3))
    put = jax.jit(trees.put)
    for round, ids in enumerate(np.int32([[0, 2, 3], [5, 1, 2], [4, 4, 0]])):
        changes, context = random_changes(shapes, 3, round), context_of(ids, round)
        sent = client(changes, zeros, trees.take(memory, ids), context)
        memory = jax.device_get(put(memory, ids, sent.memory))
        g, values, _ = server(g, sent.values, reference, context)
        close(g, mean_of(memory), atol=1e-6)
        close(values, repeated(jax.device_get(g), 3))


def test_exact_ef21_with_all_clients_sends_the_uniform_mean(close):
    problem, shapes = linear()
    link = compression(problem, "topk", ratio=1, feedback="ef21")
    client, server = sides(link)
    ids, reference = range(len(SIZES)), trees.take(random_changes(shapes, 1, 9), 0)
    g, memory = jax.device_get((link.init(jax.random.key(0)), link.init_memory(shapes)))
    memory = repeated(memory, len(SIZES))
    for round in range(3):
        values = random_changes(shapes, len(SIZES), round)
        sent = client(values, reference, memory, context_of(ids, round))
        memory = sent.memory
        g, result, _ = server(g, sent.values, repeated(reference, len(SIZES)), context_of(ids, round))
        close(result, repeated(mean_of(values), len(SIZES)), atol=1e-5)


# --- In rounds --------------------------------------------------------------------------------------------------------


def recorder(problem):
    """A link that sums up what clients want to send, in their memory, and what arrives, in the server's state."""
    shapes = {"model": jax.eval_shape(problem.model.init, jax.random.key(0))["params"]}
    zeros = lambda shapes: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def client(values, reference, memory, context):
        return Sent(values, jax.tree.map(lambda total, new, old: total + (new - old), memory, values, reference))

    def server(state, values, reference, context):
        arrived = jax.tree.map(jnp.subtract, values, reference)
        return jax.tree.map(lambda total, new: total.at[context.client].add(new), state, arrived), values, {}

    return Link(
        "privacy",
        client=client,
        server=server,
        init=lambda key: trees.broadcast(zeros(shapes), problem.num_clients),
        init_memory=zeros,
    )


def recorded_fedmr():
    return engine_of("fedmr", kind="topk", ratio=0.1, feedback="ef", recorded=True)


def test_fedmr_trains_and_loses_nothing_but_the_clients_last_errors(close, tmp_path, equal):
    """Sum of arrived changes + last error = sum of changes, for each client; the mean model takes the sum of all."""
    engine = recorded_fedmr()
    start = jax.device_get(engine.init())
    progress, report = engine.run(engine.place(start), 1)
    first_loss = float(report.train_loss)
    for _ in range(3):
        progress, report = engine.run(progress, 4)
    end = jax.device_get(progress)
    wanted, errors = end.memory.links
    arrived = end.server.links[0]
    close(jax.tree.map(np.add, arrived, errors), wanted, rtol=0, atol=1e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(errors))
    means = (mean_of(each.server.inner.models)["params"] for each in (end, start))
    moved = jax.tree.map(np.subtract, *means)
    total = jax.tree.map(lambda wanted, error: np.sum(wanted - error, axis=0) / 3, wanted, errors)
    close(moved, total["model"], rtol=0, atol=1e-5)
    assert float(report.train_loss) < 0.8 * first_loss

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(13, progress, {})
    restored, _ = checkpoints.restore(engine.shapes())
    equal(engine.run(engine.place(restored), 1)[0], engine.run(progress, 1)[0])


@pytest.mark.parametrize(
    "kind", [kind if kind == "topk" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_traffic_is_the_formula_and_statistics_are_sent_whole(kind, sent):
    options = {"kind": kind, "ratio": 0.1, "levels": 8}
    engine = engine_of("fedavg", "normed", **options, download="int8")
    model = jax.eval_shape(engine.constants.problem.model.init, jax.random.key(0))
    whole = trees.num_bytes(model) - trees.num_bytes(model["params"])
    assert whole > 0
    size = lambda kind: (
        whole + sum(bytes_by_formula(kind, leaf.size, ratio=0.1, levels=8) for leaf in jax.tree.leaves(model["params"]))
    )
    assert sent(engine) == (3 * size("int8"), 3 * size(kind), 0)


def test_a_run_counts_these_bytes(sent):
    engine = recorded_fedmr()
    report = engine.run(engine.init(), 1)[1]
    down, up, peer = sent(engine)
    assert report.traffic.num_bytes() == (down, up, peer) and up < down / 4


def test_clients_train_the_model_that_they_decode(close):
    """A round with compressed downloads is FedAvg's round from the decoded model."""
    lossy, plain = engine_of("fedavg", kind="none", download="int8"), engine_of("fedavg")
    start = jax.device_get(lossy.init())
    model = start.server.inner.model
    rounded = lambda x: by_hand("int8", x.ravel(), None, None, ratio=1, levels=1).reshape(x.shape).astype(x.dtype)
    decoded = jax.tree.map(lambda leaf: rounded(leaf) if leaf.any() else leaf, model)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(decoded), strict=True))
    expected = jax.device_get(plain.init())
    expected, _ = plain.run(plain.place(expected._replace(server=expected.server._replace(model=decoded))), 1)
    close(lossy.run(lossy.place(start), 1)[0].server.inner, expected.server)


def test_ratio_one_passes_bit_for_bit():
    problem, _ = linear()
    for kind in ("topk", "randk", "none"):
        link = compression(problem, kind, ratio=1)
        assert link == Link("compression")


def trains(strategy, **options):
    engine = engine_of(strategy, **options)
    progress, report = engine.run(engine.init(), 1)
    first = float(report.train_loss)
    for _ in range(3):
        progress, report = engine.run(progress, 4)
    assert float(report.train_loss) < 0.8 * first
    assert bool(trees.all_finite(progress.memory))


SLOW = [pytest.param(strategy, marks=pytest.mark.slow) for strategy in ("scaffold", "fedme")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", *SLOW])  # FedMR: see above
def test_methods_train_with_a_tenth_of_the_numbers(strategy):
    trains(strategy, kind="topk", ratio=0.1, feedback="ef")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "fedmr", "scaffold", "fedme"])
@pytest.mark.parametrize("kind", LOSSY)
def test_methods_train_with_every_kind(strategy, kind):
    feedback = "none" if kind in ("qsgd", "randk") else "ef"
    engine = engine_of(strategy, kind=kind, ratio=0.5, feedback=feedback, download="int8")
    progress, report = engine.run(engine.init(), 1)
    first = float(report.train_loss)
    for _ in range(3):
        progress, report = engine.run(progress, 4)
    assert float(report.train_loss) < 0.9 * first


@pytest.mark.slow
def test_exact_ef21_with_all_clients_is_uniform_fedavg(close):
    uniform = fedavg.Hyper(weights="uniform")
    ef21 = engine_of("fedavg", cohort=6, hyper=uniform, kind="topk", ratio=1, feedback="ef21")
    plain = engine_of("fedavg", cohort=6, hyper=uniform)
    close(ef21.run(ef21.init(), 4)[0].server.inner, plain.run(plain.init(), 4)[0].server)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["topk", "qsgd"])
def test_layouts_agree(kind, close):
    options = {"kind": kind, "feedback": "ef" if kind == "topk" else "none", "ratio": 0.3, "download": "int8"}
    one, two = (engine_of("fedmr", devices=devices, lanes=devices, **options) for devices in (1, 2))
    close(one.run(one.init(), 3)[0].server, two.run(two.init(), 3)[0].server)


# --- Refusals ---------------------------------------------------------------------------------------------------------

WRONG = {
    "unknown compression 'zip'": {"kind": "zip"},
    "unknown feedback 'ef22'": {"kind": "topk", "feedback": "ef22"},
    "unknown download 'topk'": {"kind": "topk", "download": "topk"},
    "ratio is 0,": {"kind": "topk", "ratio": 0},
    "ratio is 1.5,": {"kind": "randk", "ratio": 1.5},
    "ratio is nan,": {"kind": "randk", "ratio": math.nan},
    "0 levels": {"kind": "qsgd", "levels": 0},
    "2.5 levels": {"kind": "qsgd", "levels": 2.5},
    "100000 levels": {"kind": "qsgd", "levels": 100_000},
    "qsgd is unbiased": {"kind": "qsgd", "feedback": "ef"},
    "randk is unbiased": {"kind": "randk", "feedback": "ef21"},
    "needs compressed uploads": {"kind": "none", "feedback": "ef", "download": "int8"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_refused_in_one_line(message):
    with pytest.raises(UserError, match=message) as caught:
        compression(linear()[0], **WRONG[message])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "hyper", "feedback", "message"),
    [
        ("fedgen", None, "none", "counts its own messages"),
        ("fedme", fedme.Hyper(upload_first=True, clustering=False), "ef", "counts its own messages"),
        ("fedmr", None, "ef21", "a single server model"),
        ("scaffold", None, "ef21", "not control, model"),
    ],
)
def test_unsuitable_strategies_are_refused_in_one_line(strategy, hyper, feedback, message, sent):
    with pytest.raises(UserError, match=message) as caught:
        sent(engine_of(strategy, hyper=hyper, kind="topk", feedback=feedback))
    assert "\n" not in str(caught.value)


def test_ef21_hides_single_messages_from_attacks_and_robust_rules(federation):
    problem = federation("linear").problem
    ef21 = compression(problem, "topk", feedback="ef21")
    others = (
        links.attack(problem, "sign_flip", attackers=0.2, seed=0),
        links.robust(problem, "median", outliers=1, stacked=False),
    )
    for other in others:
        with pytest.raises(UserError, match="ef21 hides single messages"):
            channel(STRATEGIES["fedavg"].build(fedavg.Hyper(), problem), problem, [ef21, other])
