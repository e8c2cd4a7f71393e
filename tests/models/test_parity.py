"""Every network, compared with the same network in PyTorch: outputs, gradients, and three steps of SGD with momentum.

The two agree tensor by tensor: a network's leaves in forward order are the entries of PyTorch's ``state_dict``.
Training runs in float64, with tolerances to match: in float32 a value on the edge of a ReLU or of two maxima may fall
on either side of it, and a gradient jumps then. Outputs do not jump and are compared in float32.
"""

import functools
import itertools
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

from fedjax_mr.models import BlockNet, Model, cnn, layers, lstm, pfedhr, resnet, vgg

torch = pytest.importorskip("torch", reason="parity with PyTorch needs the extra: pip install 'fedjax-mr[parity]'")
t = torch.nn
torch.set_num_threads(1)

import torch_networks  # noqa: E402  (in experiments/lab/; needs PyTorch)
from torch_networks import conv_block, dense, sequential, vgg_stack  # noqa: E402

CLASSES, BATCH, LR, MOMENTUM = 5, 4, 0.02, 0.5


# ---- The networks in PyTorch, without dropout (its random numbers differ)


def digits():
    return sequential(
        conv_block(1, 16, padding=1, pool=2), conv_block(16, 32, padding=1, pool=2), dense(128, 64, CLASSES)
    )


def fedme_cnn(depth, flat):
    widths = (1, 32, 64, 128, 256)[: depth + 1]
    convs = [t.Conv2d(inputs, outputs, 3) for inputs, outputs in itertools.pairwise(widths)]
    return sequential(convs, [t.MaxPool2d(2)], dense(flat, 128, CLASSES))


class Basic(t.Module):
    def __init__(self, inputs, width, stride, norm):
        super().__init__()
        self.conv1, self.bn1 = t.Conv2d(inputs, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.bn2 = t.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        self.stride, self.missing = stride, width - inputs

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return (y + t.functional.pad(shortcut, (0, 0, 0, 0, 0, self.missing))).relu()


class Pooled(t.Module):
    def forward(self, x):
        return x.mean((2, 3))


def he_resnet(width, norm):
    blocks, inputs = [], width
    for stage, index in itertools.product(range(3), range(3)):
        blocks.append(Basic(inputs, width * 2**stage, 2 if stage and not index else 1, norm))
        inputs = width * 2**stage
    stem = [t.Conv2d(3, width, 3, padding=1, bias=False), norm(width), t.ReLU()]
    return t.Sequential(*stem, *blocks, Pooled(), t.Linear(inputs, CLASSES))


VGG11 = [(1, True), (2, True), (4, False), (4, True), (8, False), (8, True), (8, False), (8, True)]


def vgg_femnist(width):
    return sequential(
        [t.Conv2d(1, width, 1, padding=1), t.ReLU()],
        conv_block(width, width, padding=1, pool=2, pool_stride=1),
        conv_block(width, 2 * width, padding=1, pool=2, pool_stride=1),
        conv_block(2 * width, 4 * width, padding=1),
        conv_block(4 * width, 8 * width, padding=1, pool=2, pool_stride=2),
        [t.AdaptiveAvgPool2d(7), t.Flatten(), t.Linear(49 * 8 * width, 4 * width), t.Linear(4 * width, CLASSES)],
    )


def m1():
    return sequential(conv_block(3, 10, 5, pool=2), conv_block(10, 64, 5, pool=2), dense(1600, 50, CLASSES))


def m2():
    return sequential(
        conv_block(3, 10, 5, pool=2),
        conv_block(10, 64, 5, pool=2),
        conv_block(64, 128, padding=1),
        dense(3200, 50, CLASSES),
    )


def m3():
    return sequential(
        conv_block(3, 6, 5),
        conv_block(6, 16, 5),
        conv_block(16, 32, 5, relu=False),
        conv_block(32, 64, 5, pool=2),
        conv_block(64, 128, 5),
        dense(2048, 1024, 128, 64, CLASSES),
    )


def m4():
    return sequential(
        *(
            conv_block(inputs, outputs, padding=1, norm=not pool, pool=pool)
            for inputs, outputs, pool in [
                (3, 32, 0),
                (32, 64, 2),
                (64, 128, 0),
                (128, 128, 2),
                (128, 256, 0),
                (256, 256, 2),
            ]
        ),
        dense(4096, 1024, 512, CLASSES),
    )


# ---- The mapping


class Case(NamedTuple):
    """A network in both libraries.

    Attributes:
      network: ours.
      shape: one sample.
      twin: builds PyTorch's.
      grid: the feature maps [H, W, I] that the first dense layer flattens: PyTorch flattens [I, H, W].
    """

    network: BlockNet
    shape: tuple[int, ...]
    twin: object
    grid: tuple[int, int, int] | None = None


slow = pytest.mark.slow
CASES = [
    pytest.param(Case(cnn.CNNDigits(CLASSES), (8, 8, 1), digits, (2, 2, 32)), id="cnn_digits", marks=slow),
    pytest.param(
        Case(cnn.LeNet5(CLASSES), (32, 32, 3), functools.partial(torch_networks.lenet5, CLASSES), (5, 5, 16)),
        id="lenet5",
    ),
    pytest.param(
        Case(
            cnn.CNNMcMahan(CLASSES),
            (8, 8, 1),
            lambda: torch_networks.cnn_mcmahan(CLASSES, channels=1, edge=8),
            (2, 2, 64),
        ),
        id="cnn_mcmahan",
        marks=slow,
    ),
    pytest.param(
        Case(cnn.CNNFEMNIST(CLASSES), (28, 28, 1), functools.partial(torch_networks.cnn_femnist, CLASSES), (4, 4, 32)),
        id="cnn_femnist",
        marks=slow,
    ),
    pytest.param(Case(cnn.MLP(CLASSES), (4, 4, 1), lambda: sequential(dense(16, 200, 200, CLASSES))), id="mlp"),
    pytest.param(Case(cnn.Logistic(CLASSES), (9,), lambda: sequential(dense(9, CLASSES))), id="logistic"),
    *(
        pytest.param(
            Case(
                cnn.CNNFedMe(CLASSES, depth=depth),
                (12, 12, 1),
                functools.partial(fedme_cnn, depth, flat),
                (edge, edge, width),
            ),
            id=f"cnn{depth}",
            marks=() if depth == 2 else slow,
        )
        for depth, edge, width, flat in [(1, 5, 32, 800), (2, 4, 64, 1024), (3, 3, 128, 1152), (4, 2, 256, 1024)]
    ),
    *(
        pytest.param(
            Case(
                resnet.ResNet20(CLASSES, width=4, authors_state=True),
                (8, 8, channels),
                functools.partial(torch_networks.ResNet20, CLASSES, channels=channels, width=4),
            ),
            id=f"resnet20-{channels}",
            marks=slow,
        )
        for channels in (3, 1)
    ),
    pytest.param(
        Case(resnet.ResNet20He(CLASSES, width=4), (8, 8, 3), lambda: he_resnet(4, t.BatchNorm2d)),
        id="resnet20_he",
        marks=slow,
    ),
    pytest.param(
        Case(
            resnet.ResNet20He(CLASSES, width=4, norm="group"),
            (8, 8, 3),
            lambda: he_resnet(4, functools.partial(t.GroupNorm, 2)),
        ),
        id="resnet20_he-group",
        marks=slow,
    ),
    pytest.param(
        Case(
            vgg.VGG16(CLASSES, width=4, hidden=16, authors_state=True),
            (32, 32, 3),
            functools.partial(torch_networks.vgg16, CLASSES, width=4, hidden=16),
        ),
        id="vgg16",
        marks=slow,
    ),
    *(
        pytest.param(
            Case(
                vgg.VGGFedMA(CLASSES, depth=depth, width=4, hidden=16),
                (32, 32, 3),
                lambda plan=plan: sequential(vgg_stack(plan, 4), dense(32, 16, 16, CLASSES)),
            ),
            id=f"vgg{depth}_fedma",
            marks=slow,
        )
        for depth, plan in [(11, VGG11), (16, torch_networks.VGG16_PLAN)]
    ),
    pytest.param(
        Case(vgg.VGGFEMNIST(CLASSES, width=4), (28, 28, 1), lambda: vgg_femnist(4), (7, 7, 32)),
        id="vgg_femnist",
        marks=slow,
    ),
    *(
        pytest.param(
            Case(
                lstm.CharacterLSTM(CLASSES, depth=depth, hidden=6),
                (7,),
                functools.partial(torch_networks.CharacterLSTM, CLASSES, depth=depth, hidden=6),
            ),
            id=f"lstm{depth}",
            marks=() if depth == 2 else slow,
        )
        for depth in (1, 2, 3, 4)
    ),
    pytest.param(Case(pfedhr.M1(CLASSES), (32, 32, 3), m1, (5, 5, 64)), id="pfedhr_m1", marks=slow),
    pytest.param(Case(pfedhr.M2(CLASSES), (32, 32, 3), m2, (5, 5, 128)), id="pfedhr_m2", marks=slow),
    pytest.param(Case(pfedhr.M3(CLASSES), (32, 32, 3), m3, (4, 4, 128)), id="pfedhr_m3", marks=slow),
    pytest.param(
        Case(pfedhr.M4(CLASSES, authors_state=True), (32, 32, 3), m4, (4, 4, 256)), id="pfedhr_m4", marks=slow
    ),
]


def to_ours(value, name, grid):
    """Convert a PyTorch tensor to our layout; ``grid`` is for the first dense layer."""
    array = value.detach().double().numpy()
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)  # [O, I, h, w] -> [h, w, I, O]
    if array.ndim == 2 and name != "embedding":
        if grid is not None:
            height, width, channels = grid
            array = array.reshape(-1, channels, height, width).transpose(0, 2, 3, 1).reshape(len(array), -1)
        return array.T  # [O, I] -> [I, O]
    return array


def moved(model, case, tensors):
    """Convert PyTorch's ``tensors``, in the order of the state, to our variables."""
    flat, structure = jax.tree.flatten(model.shapes())
    positions = [pair for layer in model.layers() for pair in zip(layer.leaves, layer.names, strict=True)]
    first_dense = next(i for i, v in enumerate(tensors) if v.ndim == 2) if case.grid else None
    for index, ((position, name), tensor) in enumerate(zip(positions, tensors, strict=True)):
        array = to_ours(tensor, name, case.grid if index == first_dense else None)
        assert array.shape == flat[position].shape
        flat[position] = array
    return jax.tree.unflatten(structure, flat)


def close(ours, theirs, tolerance):
    """Compare leaf by leaf, with a tolerance relative to the largest value of the leaf (and slightly of all leaves)."""
    ours = jax.device_get(ours)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(theirs))

    def leaf_close(path, a, b):
        scale = max(np.abs(b).max(), 1e-2 * largest)
        assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(leaf_close, ours, theirs)


def without_dropout(call, args, kwargs, context):
    return args[0] if isinstance(context.module, nn.Dropout) else call(*args, **kwargs)


class Twin:
    """The entries of PyTorch's network in the order of the state, with counters only if our state has them."""

    def __init__(self, case):
        self.network = case.twin().double()
        counted = getattr(case.network, "authors_state", False)
        self.names = [name for name in self.network.state_dict() if counted or not name.endswith("num_batches_tracked")]
        self.optimizer = torch.optim.SGD(self.network.parameters(), LR, MOMENTUM)

    def state(self):
        state = self.network.state_dict()
        return [state[name].clone() for name in self.names]

    def gradients(self):
        parameters = dict(self.network.named_parameters())
        found = [getattr(parameters.get(name), "grad", None) for name in self.names]
        return [
            torch.zeros_like(value) if gradient is None else gradient.clone()
            for gradient, value in zip(found, self.state(), strict=True)
        ]

    def logits(self, x):
        x = torch.tensor(x)
        return self.network(x.permute(0, 3, 1, 2) if x.ndim == 4 else x)

    def step(self, x, y):
        self.optimizer.zero_grad()
        t.functional.cross_entropy(self.logits(x), torch.tensor(y)).backward()
        gradients = self.gradients()
        self.optimizer.step()
        return gradients


@pytest.mark.parametrize("case", CASES)
@jax.enable_x64(True)
@jax.numpy_dtype_promotion("standard")  # Flax's GroupNorm mixes float32 into float64
def test_network_trains_like_pytorch_s(case):
    torch.manual_seed(0)
    twin = Twin(case)
    tokens = case.network.takes == "tokens"
    model = Model(case.network, case.shape, np.int32 if tokens else np.float32)
    optimizer = optax.sgd(LR, MOMENTUM)
    rng = np.random.default_rng(0)

    def batch():
        shape = (BATCH, *case.shape)
        x = rng.integers(0, CLASSES, shape, np.int32) if tokens else rng.standard_normal(shape)
        return x, rng.integers(0, CLASSES, BATCH)

    @jax.jit
    def step(variables, memory, x, y):
        others = {name: value for name, value in variables.items() if name != "params"}

        def loss(params):
            with nn.intercept_methods(without_dropout):
                logits, new = model.train_apply(params, others, x, mask=None, key=jax.random.key(0))
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        gradient, new = jax.grad(loss, has_aux=True)(variables["params"])
        updates, memory = optimizer.update(gradient, memory)
        return {"params": optax.apply_updates(variables["params"], updates), **new}, memory, gradient

    variables = moved(model, case, twin.state())
    memory = jax.jit(optimizer.init)(variables["params"])
    for index in range(3):
        x, y = batch()
        variables, memory, gradient = step(variables, memory, x, y)
        expected = twin.step(x, y)
        if index == 0:
            close(gradient, moved(model, case, expected)["params"], 1e-8)
    expected = moved(model, case, twin.state())
    close(variables, expected, 1e-8)

    x, _ = batch()
    x = x if tokens else x.astype(np.float32)
    twin.network.eval().float()
    logits = twin.logits(x).detach().numpy()
    single = jax.tree.map(lambda leaf: leaf.astype(np.float32), expected)
    assert_allclose(jax.jit(model.apply)(single, x), logits, rtol=0, atol=1e-5 * np.abs(logits).max())


@jax.enable_x64(True)
def test_batchnorm_equals_pytorch_s_in_double_precision():
    """All numbers stay double: a detour through float32 would show from the eighth digit."""
    twin, rng = t.BatchNorm2d(3).double(), np.random.default_rng(0)
    layer, x = layers.BatchNorm(), rng.standard_normal((6, 4, 4, 3))
    variables = {
        "params": {"scale": np.ones(3), "bias": np.zeros(3)},
        "batch_stats": {"mean": np.zeros(3), "var": np.ones(3)},
    }
    out, new = jax.jit(lambda x: layer.apply(variables, x, train=True, mutable=["batch_stats"]))(x)
    expected = twin(torch.tensor(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).detach().numpy()
    assert_allclose(out, expected, rtol=0, atol=1e-13)
    assert_allclose(new["batch_stats"]["mean"], twin.running_mean.numpy(), rtol=0, atol=1e-14)
    assert_allclose(new["batch_stats"]["var"], twin.running_var.numpy(), rtol=0, atol=1e-14)
