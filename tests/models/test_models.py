"""Networks by name: sizes, order of layers, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from fedjax_mr import models
from fedjax_mr.errors import UserError
from fedjax_mr.models import __main__, blocks, cnn, lstm, pfedhr, resnet, vgg
from fedjax_mr.testing.federations import numbers_like

CIFAR, GREY, TEXT = (32, 32, 3), (28, 28, 1), (80,)

# Parameters, tensors and bytes of the released state, counted on the authors' own classes in PyTorch.
PUBLISHED = [
    ("lenet5", CIFAR, 10, 62_006, 10, 248_024),
    ("lenet5", CIFAR, 20, 62_856, 10, 251_424),
    ("lenet5", CIFAR, 100, 69_656, 10, 278_624),
    ("cnn_femnist", GREY, 62, 160_510, 8, 642_040),
    ("resnet20", CIFAR, 10, 219_482, 119, 888_960),
    pytest.param(*("resnet20", CIFAR, 20, 222_052, 119, 899_240), marks=pytest.mark.slow),
    pytest.param(*("resnet20", CIFAR, 100, 242_612, 119, 981_480), marks=pytest.mark.slow),
    ("resnet20", GREY, 62, 232_558, 119, 941_264),
    ("vgg16", CIFAR, 10, 33_646_666, 97, 134_620_560),
    pytest.param(*("vgg16", CIFAR, 20, 33_687_636, 97, 134_784_440), marks=pytest.mark.slow),
    pytest.param(*("vgg16", CIFAR, 100, 34_015_396, 97, 136_095_480), marks=pytest.mark.slow),
    ("vgg_femnist", GREY, 62, 8_024_958, 14, 32_099_832),
]

# Parameters only.
SIZES = [
    ("cnn_digits", (8, 8, 1), 10, 13_706),
    ("lenet5", GREY, 10, 44_426),
    ("cnn_mcmahan", CIFAR, 10, 2_156_490),
    ("cnn_mcmahan", GREY, 62, 1_690_046),
    ("cnn_pfl", CIFAR, 10, 1_626_442),
    ("mlp", GREY, 10, 199_210),
    ("logistic", GREY, 10, 7_850),
    ("resnet20", CIFAR, 10, 219_482 - 512),  # without the BatchNorm that nothing uses
    ("resnet20_he", CIFAR, 10, 269_722),
    ("vgg11_fedma", CIFAR, 10, 9_750_922),
    ("vgg13_fedma", CIFAR, 10, 9_935_434),
    ("vgg16_fedma", CIFAR, 10, 15_245_130),
    ("vgg19_fedma", CIFAR, 10, 20_554_826),
    ("cnn1", GREY, 62, 700_670),
    ("cnn2", GREY, 62, 1_206_590),
    ("cnn3", GREY, 62, 2_083_262),
    ("cnn4", GREY, 62, 3_672_766),
    ("lstm1", TEXT, 90, 296_234),
    ("lstm2", TEXT, 90, 822_570),
    ("lstm3", TEXT, 90, 1_348_906),
    ("lstm4", TEXT, 90, 1_875_242),
    ("vit_tiny", CIFAR, 10, 1_997_706),
    ("vit_tiny_patch8", CIFAR, 10, 2_009_994),
    ("transformer_tiny", TEXT, 80, 302_160),
    ("minilm", (48,), 2, 22_566_146),
    ("llama_tiny", TEXT, 257, 257 * 64 + 2 * (64 * (2 + 64 + 32 + 32 + 64) + 3 * 64 * 128) + 64),
    pytest.param("smollm2_135m", TEXT, 49_152, 134_515_008, marks=pytest.mark.slow),
    ("unet", GREY, 2, 118_322),
    ("gru", (50, 6), 7, 3 * 64 * (6 + 64 + 2) + 65 * 7),
    ("lstm_numbers", (50, 6), 7, 4 * 64 * (6 + 64 + 2) + 65 * 7),
    ("mlp_table", (8,), 2, 9 * 64 + 65 * 64 + 65 * 2),
    ("pfedhr_m1", CIFAR, 10, 97_384),
    ("pfedhr_m2", CIFAR, 10, 251_240),
    ("pfedhr_m3", CIFAR, 10, 2_510_178),
    ("pfedhr_m4", CIFAR, 10, 5_852_170),
]


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
    """Cache the shapes of variables and the layers: many tests use them, and tracing a large network is slow."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("shapes", "layers"):
            patch.setattr(models.Model, name, functools.cache(getattr(models.Model, name)))
        yield


def make(name, shape=None, classes=None, **options):
    row = models.MODELS[name]
    shape, task = shape or row.input_shape, row.task(width=classes or row.num_classes)
    return models.build(name, input_shape=shape, input_dtype=row.input_dtype, task=task, **options)


@pytest.mark.parametrize(("name", "shape", "classes", "parameters", "leaves", "size"), PUBLISHED)
def test_the_authors_state(name, shape, classes, parameters, leaves, size):
    model = make(name, shape, classes, authors_state=name in ("resnet20", "vgg16"))
    variables = jax.tree_util.tree_leaves_with_path(model.shapes())
    counters = sum(path[-1].key == "count" for path, _ in variables)
    assert model.num_parameters() == parameters
    assert len(variables) == leaves
    # PyTorch's counters are integers of 8 bytes, ours floats of 4.
    assert sum(leaf.size * leaf.dtype.itemsize for _, leaf in variables) + 4 * counters == size


@pytest.mark.parametrize(("name", "shape", "classes", "parameters"), SIZES)
def test_number_of_parameters(name, shape, classes, parameters):
    assert make(name, shape, classes).num_parameters() == parameters


@pytest.mark.parametrize(("name", "features"), [("resnet20", 256), ("vgg16", 4096)])
def test_only_the_head_grows_with_the_classes_by_a_weight_per_feature_and_a_bias(name, features):
    """Sizes for 20 and 100 classes, without a trace of the whole network."""
    bodies = []
    for classes in (20, 100):
        module = make(name, CIFAR, classes).module
        z = jax.ShapeDtypeStruct((1, features), np.float32)
        shapes = jax.eval_shape(lambda key, z, module=module: module.init(key, z, method="head"), jax.random.key(0), z)
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == (features + 1) * classes
        bound = module.bind({})
        bodies.append([getattr(bound, block).clone(parent=None) for block in bound.block_names[:-1]])
    assert bodies[0] == bodies[1]


def test_mcmahan_s_network_without_padding():
    module = cnn.CNNMcMahan(10, padding="VALID")
    assert models.Model(module, CIFAR).num_parameters() == 878_538


OF_EACH_FAMILY = (
    "logistic", "lenet5", "cnn2", "resnet20", "vgg_femnist", "pfedhr_m3", "lstm1", "vit_tiny", "unet", "gru",
    "mlp_table", "llama_tiny",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in OF_EACH_FAMILY else pytest.param(name, marks=pytest.mark.slow) for name in models.MODELS]
)
def test_layers_hold_every_leaf_once_and_the_head_comes_last(name):
    model = make(name)
    leaves = [leaf for layer in model.layers() for leaf in layer.leaves]
    assert sorted(leaves) == list(range(len(jax.tree.leaves(model.shapes()))))
    assert model.layers()[-1].name == ("norm" if getattr(model.module, "tied", False) else "classifier/dense")


def test_forward_order_of_the_residual_network():
    names = [layer.name for layer in make("resnet20", authors_state=True).layers()]
    block = ["norm1", "conv1", "norm2", "conv2", "norm3", "conv3"]
    expected = ["stem/conv"]
    for stage in (1, 2, 3):
        expected += [f"stage{stage}_block1/{part}" for part in [*block, "shortcut"]]
        expected += [f"stage{stage}_block2/{part}" for part in block]
    assert names == [*expected, "mean/unused", "classifier/dense"]


DENSE = ["hidden1/dense", "hidden2/dense", "classifier/dense"]


@pytest.mark.parametrize(
    ("name", "normed", "dense"),
    [
        ("vgg16", [True] * 13, DENSE),
        ("vgg11_fedma", [False] * 8, DENSE),
        ("pfedhr_m4", [True, False] * 3, DENSE),
        ("cnn3", [False] * 3, ["hidden/dense", "classifier/dense"]),
    ],
)
def test_forward_order_of_convolutional_networks(name, normed, dense):
    parts = [f"conv{i}/{part}" for i, norm in enumerate(normed, 1) for part in ("conv", "norm")[: 1 + norm]]
    assert [layer.name for layer in make(name).layers()] == parts + dense


def test_forward_order_of_the_lstm():
    expected = ["embedding", *(f"lstm{i}" for i in (1, 2, 3, 4)), "classifier/dense"]
    assert [layer.name for layer in make("lstm4").layers()] == expected


def test_leaves_inside_a_layer_are_in_pytorch_s_order():
    layers = {layer.name: layer.names for layer in make("resnet20", authors_state=True).layers()}
    assert layers["stage1_block1/norm1"] == ("scale", "bias", "mean", "var", "count")
    assert layers["classifier/dense"] == ("kernel", "bias")
    layers = {layer.name: layer.names for layer in make("lstm1").layers()}
    assert layers["lstm1"] == ("kernel", "recurrent_kernel", "bias", "recurrent_bias")


def test_leaf_positions_are_those_of_the_flattened_variables():
    model = make("resnet20", authors_state=True)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model.shapes())]
    for layer in model.layers():
        for position, name in zip(layer.leaves, layer.names, strict=True):
            assert "/".join(entry.key for entry in paths[position][1:]) == f"{layer.name}/{name}"


@pytest.fixture(scope="module")
def lenet5():
    return models.build("lenet5", input_shape=(28, 28, 1), num_classes=10)


def test_head_of_features_is_the_network(lenet5):
    variables, mask = numbers_like(lenet5.shapes()), np.ones(3, np.float32)
    x = np.random.default_rng(1).standard_normal((3, 28, 28, 1)).astype(np.float32)
    z = jax.jit(lenet5.features)(variables, x)
    assert z.shape == (3, 84)
    logits = jax.jit(lenet5.apply)(variables, x)
    assert_allclose(jax.jit(lenet5.head)(variables, z), logits, rtol=1e-5)
    trained, state = jax.jit(lenet5.train_apply)(variables["params"], {}, x, mask=mask, key=jax.random.key(2))
    assert_allclose(trained, logits, rtol=1e-5)
    assert not state


@pytest.mark.parametrize("name", ["resnet20", "vgg16", "vgg_femnist", "cnn2", "pfedhr_m3", "lstm2", "logistic"])
def test_representation_feeds_the_head(name):
    width = {
        "resnet20": 256,
        "vgg16": 4096,
        "vgg_femnist": 256,
        "cnn2": 128,
        "pfedhr_m3": 64,
        "lstm2": 256,
        "logistic": 784,
    }
    model = make(name)
    x = jax.ShapeDtypeStruct((2, *model.input_shape), model.input_dtype)
    z = jax.eval_shape(model.features, model.shapes(), x)
    assert z.shape == (2, width[name])
    assert jax.eval_shape(model.head, model.shapes(), z).shape == (2, models.MODELS[name].num_classes)


# ---- Options


def test_group_norm_leaves_nothing_beside_the_parameters():
    assert set(make("resnet20", norm="group").shapes()) == {"params"}
    assert make("resnet20", norm="group").num_parameters() == make("resnet20").num_parameters()


def block_of(network, name):
    """Initialise the parameters of one block only."""
    init = jax.jit(lambda key: models.Model(network, CIFAR).init(key)["params"][name])
    return jax.device_get(init(jax.random.key(0)))


@pytest.mark.slow
def test_initialisation_of_the_residual_network():
    params = block_of(resnet.ResNet20(10), "stage2_block1")
    kernel = params["conv2"]["kernel"]
    assert_allclose(np.std(kernel), (2 / (9 * 32)) ** 0.5, rtol=0.05)  # by fan-out
    assert np.abs(kernel).max() > 2.5 * np.std(kernel)  # normal, not uniform
    assert_array_equal(params["norm1"]["scale"], 0.5)
    assert block_of(resnet.ResNet20(10), "classifier")["dense"]["bias"].any()

    params = block_of(resnet.ResNet20(10, initialisation="flax"), "stage2_block1")
    assert_allclose(np.std(params["conv3"]["kernel"]), (1 / 32) ** 0.5, rtol=0.05)  # by fan-in
    assert_array_equal(params["norm1"]["scale"], 1.0)


@pytest.mark.slow
def test_initialisation_of_fedme_s_networks():
    params = block_of(vgg.VGGFedMA(10, depth=11, width=16), "conv8")["conv"]
    assert_allclose(np.std(params["kernel"]), (2 / (9 * 128)) ** 0.5, rtol=0.05)
    assert not params["bias"].any()
    assert block_of(vgg.VGGFedMA(10), "hidden1")["dense"]["bias"].any()


def test_the_unused_norm_changes_nothing_but_the_state():
    x = np.random.default_rng(1).standard_normal((4, 2, 2, 3)).astype(np.float32)
    unused, bare = resnet.Mean(unused_norm=True), resnet.Mean()
    variables = numbers_like(jax.eval_shape(unused.init, jax.random.key(0), x))
    train = jax.jit(lambda variables: unused.apply(variables, x, train=True, mutable=["batch_stats"]))
    z, state = train(variables)
    assert_array_equal(z, jax.jit(bare.apply)({}, x))
    jax.tree.map(assert_array_equal, state["batch_stats"], variables["batch_stats"])
    assert set(state["batch_stats"]["unused"]) == {"mean", "var", "count"}


def test_dropout_follows_the_key_and_spares_evaluation():
    model = models.Model(pfedhr.M1(4), (16, 16, 1))
    variables = numbers_like(model.shapes(), scale=0.5)
    x = np.random.default_rng(1).standard_normal((2, 16, 16, 1)).astype(np.float32)

    @jax.jit
    @jax.vmap
    def trained(key):
        return model.train_apply(variables["params"], {}, x, mask=None, key=key)[0]

    keys = jax.random.split(jax.random.key(2), 2000)
    outputs = np.asarray(trained(keys))
    assert_array_equal(outputs, trained(keys))
    assert np.abs(outputs[0] - outputs[1]).max() > 0
    mean = outputs.mean(0)
    assert_allclose(mean, jax.jit(model.apply)(variables, x), atol=0.02)


def test_whole_channels_are_dropped():
    block = blocks.ConvBlock(8, 1, channel_dropout=0.5, relu=False)
    x = np.ones((3, 4, 4, 2), np.float32)

    @jax.jit
    def train(key):
        return block.apply(block.init(jax.random.key(0), x), x, train=True, rngs={"dropout": key})

    dropped = np.asarray(train(jax.random.key(1))) == 0
    assert 0 < dropped.mean() < 1
    assert_array_equal(dropped, np.broadcast_to(dropped[:, :1, :1], dropped.shape))


# ---- Tokens


def test_padding_has_no_vector_and_never_learns():
    module = lstm.Embedding(5, 3)
    x = np.array([[0, 1, 0, 4]], np.int32)
    variables = numbers_like(jax.eval_shape(module.init, jax.random.key(0), x))
    assert_array_equal(np.asarray(jax.jit(module.apply)(variables, x))[0, 0], 0)
    gradient = jax.jit(jax.grad(lambda v: module.apply(v, x).sum()))(variables)["params"]["embedding"]
    assert_array_equal(gradient[:, 0], [0, 1, 0, 0, 1])


def test_an_lstm_sees_the_words_of_a_text_that_is_padded_at_the_end():
    texts = np.array([[3, 1, 0, 0], [0, 0, 3, 1], [2, 0, 1, 0], [0, 2, 0, 1], [0, 0, 0, 0], [1, 2, 3, 4]], np.int32)
    model = lambda **options: models.Model(lstm.CharacterLSTM(2, hidden=3, depth=1, **options), (4,), np.int32)
    network = model(vocabulary=5)
    ours = np.asarray(jax.jit(network.apply)(numbers_like(network.shapes()), texts))
    assert_array_equal(ours[[0, 2]], ours[[1, 3]])
    assert len(np.unique(ours, axis=0)) == 4
    characters = texts % 2  # as many as classes: every step is a character, and the last one predicts
    ours = np.asarray(jax.jit(model().apply)(numbers_like(model().shapes()), characters))
    assert np.any(ours[0] != ours[1])


@pytest.mark.slow
def test_lstm_inside_shard_map():
    model = models.Model(lstm.CharacterLSTM(5, depth=2, hidden=3), (6,), np.int32)
    variables = jax.jit(model.init)(jax.random.key(0))
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("clients",))
    x = np.random.default_rng(1).integers(0, 5, (2 * len(devices), 6), np.int32)
    spec = PartitionSpec("clients")
    apply = jax.shard_map(model.apply, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)
    assert_allclose(jax.jit(apply)(variables, x), jax.jit(model.apply)(variables, x), rtol=1e-5, atol=1e-6)


# ---- The table


def test_multiply_adds_are_counted_by_hand():
    by_hand = 28 * 28 * 6 * 75 + 10 * 10 * 16 * 150 + 400 * 120 + 120 * 84 + 84 * 10
    assert __main__.multiply_adds(make("lenet5")) == by_hand
    recurrent = 80 * (8 * 1024 + 256 * 1024) + 256 * 90
    assert __main__.multiply_adds(make("lstm1")) == recurrent


@pytest.mark.parametrize(
    "names", [["lenet5", "logistic", "lstm1"], pytest.param(list(models.MODELS), marks=pytest.mark.slow)]
)
def test_the_table_has_a_row_for_every_network(capsys, monkeypatch, names):
    monkeypatch.setattr("sys.argv", ["models"])
    assert __main__.MODELS is models.MODELS
    monkeypatch.setattr(__main__, "MODELS", {name: models.MODELS[name] for name in names})
    __main__.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["model", "sample", "classes"]
    assert [row.split()[0] for row in rows[:-1]] == names
    assert "62,006" in next(row for row in rows if row.startswith("lenet5"))


# ---- Bad input


@pytest.fixture
def compiled():
    """Collect the names of the programs compiled during a test."""
    events = []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lenet", {}, "unknown model 'lenet'; did you mean 'lenet5'"),
        ("lenet5", {"input_shape": (8, 8, 1)}, "images of 8x8x1 of float32 are too small for lenet5"),
        ("vgg16", {"input_shape": (28, 28, 1)}, "images of 28x28x1 of float32 are too small for vgg16"),
        ("lenet5", {"input_shape": (3, 32, 32)}, "channels last, but the samples are 3x32x32"),
        ("lenet5", {"input_shape": (32, 32)}, "needs images"),
        ("lenet5", {"input_shape": (80,), "input_dtype": np.int32}, "are token sequences \\(80 of int32\\)"),
        (
            "mlp",
            {"input_shape": (9,), "input_dtype": np.int32},
            r"or x.astype\('float32'\) if the integers are measure",
        ),
        ("mlp", {"input_shape": (80,), "input_dtype": np.int32}, "needs numbers, but the samples are token sequences"),
        ("lstm2", {}, "lstm2 needs token sequences \\[T\\] of integers, but the samples are 32x32x3 of float32"),
        ("lenet5", {"init": "flux"}, "unknown init 'flux'; did you mean 'flax'"),
        ("lenet5", {"norm": "grop"}, "unknown norm 'grop'; did you mean 'group'"),
        ("lenet5", {"norm": "group"}, "norm=group does not apply to the model lenet5"),
        ("lenet5", {"authors_state": True}, "authors_state=True does not apply to the model lenet5"),
        ("resnet20", {"authors_state": True, "norm": "group"}, "authors_state=True needs batch normalisation"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_compiled(name, options, message, compiled):
    with pytest.raises(UserError, match=message) as caught:
        models.build(name, **({"input_shape": (32, 32, 3), "num_classes": 10} | options))
    assert "\n" not in str(caught.value)
    assert not compiled


def test_building_compiles_nothing(compiled):
    make("resnet20").layers()
    assert not compiled
    jax.jit(lambda x: x + 41)(1)  # the fixture does see what is compiled
    assert compiled


@pytest.mark.parametrize(("shape", "dtype"), [((2, 28, 28, 3), jnp.float32), ((2, 28, 28, 1), jnp.int32)])
def test_samples_of_another_kind_are_refused(lenet5, shape, dtype):
    variables, x = lenet5.shapes(), jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises(UserError, match="lenet5 was built for samples 28x28x1 of float32, but received 28x28x"):
        jax.eval_shape(lenet5.apply, variables, x)


def test_a_projection_head_stands_before_the_classifier():
    """MOON's projection head: a layer as wide as the representation, ReLU, 256 outputs; then the classifier."""
    model = models.build("lenet5", input_shape=(32, 32, 3), num_classes=10, projection=256)
    assert [layer.name for layer in model.layers()][-3:] == ["projector/hidden", "projector/dense", "classifier/dense"]
    plain = models.build("lenet5", input_shape=(32, 32, 3), num_classes=10).num_parameters()
    head = (84 * 84 + 84) + (84 * 256 + 256) + (256 * 10 + 10)
    assert model.num_parameters() == plain - (84 * 10 + 10) + head
    features = jax.eval_shape(model.features, model.shapes(), jax.ShapeDtypeStruct((2, 32, 32, 3), np.float32))
    assert features.shape == (2, 256)
