"""The papers' networks in PyTorch: opponents of ``benchmark.py`` and twins of ours in ``tests/models/test_parity.py``.

Without dropout, whose random numbers differ between the libraries, except in Transformers, whose speed it affects.

Sources: see the networks of the same names in ``fedjax_mr/models``.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn


def conv_block(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    *,
    padding: int = 0,
    norm: bool = False,
    relu: bool = True,
    pool: int = 0,
    pool_stride: int | None = None,
) -> Iterator[nn.Module]:
    """Convolution, normalisation, ReLU and max-pooling. All but the first are optional."""
    yield nn.Conv2d(inputs, outputs, kernel, padding=padding)
    if norm:
        yield nn.BatchNorm2d(outputs)
    if relu:
        yield nn.ReLU()
    if pool:
        yield nn.MaxPool2d(pool, pool_stride)


def dense(*widths: int) -> Iterator[nn.Module]:
    """Dense layers with ReLU between them."""
    yield nn.Flatten()
    for position, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        if position:
            yield nn.ReLU()
        yield nn.Linear(inputs, outputs)


def sequential(*parts: Iterable[nn.Module]) -> nn.Sequential:
    """The parts one after the other."""
    return nn.Sequential(*itertools.chain.from_iterable(parts))


def lenet5(classes: int = 10) -> nn.Module:
    """``lenet5`` for images of 32 x 32 x 3."""
    return sequential(conv_block(3, 6, 5, pool=2), conv_block(6, 16, 5, pool=2), dense(400, 120, 84, classes))


def cnn_mcmahan(classes: int = 10, *, channels: int = 3, edge: int = 32) -> nn.Module:
    """``cnn_mcmahan`` for images of edge x edge x channels."""
    return sequential(
        conv_block(channels, 32, 5, padding=2, pool=2),
        conv_block(32, 64, 5, padding=2, pool=2),
        dense(64 * (edge // 4) ** 2, 512, classes),
    )


def cnn_femnist(classes: int = 62) -> nn.Module:
    """``cnn_femnist`` for images of 28 x 28 x 1."""

    def pool_first(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(inputs, outputs, 5), nn.MaxPool2d(2), nn.ReLU()

    return sequential(pool_first(1, 16), pool_first(16, 32), dense(512, 256, classes))


class PreActivation(nn.Module):
    """A bottleneck of `ResNet20`."""

    def __init__(self, inputs: int, width: int, stride: int, *, project: bool) -> None:
        """Make the layers."""
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, width, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn3, self.conv3 = nn.BatchNorm2d(width), nn.Conv2d(width, 4 * width, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False) if project else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the block."""
        y = self.conv1(self.bn1(x).relu())
        y = self.conv2(self.bn2(y).relu())
        return self.conv3(self.bn3(y).relu()) + self.shortcut(x)


class ResNet20(nn.Module):
    """``resnet20``, with the normalisation that the authors' code has and does not use."""

    def __init__(self, classes: int = 10, *, channels: int = 3, width: int = 16) -> None:
        """Make the layers."""
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(3, 1, 1) if channels == 1 else nn.Identity()
        blocks, inputs = [], width
        for stage, index in itertools.product(range(3), range(2)):
            planes = width * 2**stage
            blocks.append(PreActivation(inputs, planes, 2 if stage and not index else 1, project=not index))
            inputs = 4 * planes
        self.blocks, self.unused, self.fc = nn.Sequential(*blocks), nn.BatchNorm2d(inputs), nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.fc(self.blocks(self.pool(self.stem(x))).mean((2, 3)))


VGG16_PLAN = [
    *[(1, False), (1, True), (2, False), (2, True), (4, False), (4, False), (4, True)],
    *[(8, False), (8, False), (8, True), (8, False), (8, False), (8, True)],
]


def vgg_stack(plan: Sequence[tuple[int, bool]], width: int, *, norm: bool = False) -> Iterator[nn.Module]:
    """The convolutions of a VGG: (channels in widths, whether pooling follows)."""
    inputs = 3
    for features, pooled in plan:
        yield from conv_block(inputs, features * width, padding=1, norm=norm, pool=2 if pooled else 0)
        inputs = features * width


def vgg16(classes: int = 10, *, width: int = 64, hidden: int = 4096) -> nn.Module:
    """``vgg16`` for images of 32 x 32 x 3."""
    return sequential(vgg_stack(VGG16_PLAN, width, norm=True), dense(8 * width, hidden, hidden, classes))


class CharacterLSTM(nn.Module):
    """``lstm1`` and its deeper sisters."""

    def __init__(self, classes: int = 90, *, depth: int = 1, hidden: int = 256) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(classes, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, hidden, depth, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of the next character."""
        return self.fc(self.lstm(self.embedding(x))[0][:, -1])


class TransformerLayer(nn.Module):
    """A layer of `ViT` and `CausalTransformer`: normalisation first, PyTorch's own attention, exact GELU."""

    def __init__(
        self, width: int, hidden: int, heads: int, head_width: int, dropout: float, *, causal: bool = False
    ) -> None:
        """Make the layers."""
        super().__init__()
        self.causal = causal
        self.heads, inner = heads, heads * head_width
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, inner) for _ in range(3))
        self.out, self.drop = nn.Linear(inner, width), nn.Dropout(dropout)
        self.perceptron = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The vectors [B, T, D] of the next layer."""
        y = self.attention_norm(x)
        heads = (each(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        return x + self.perceptron(self.perceptron_norm(x))


class ViT(nn.Module):
    """``vit_tiny`` for images of 32 x 32 x 3, with its dropout."""

    def __init__(
        self, classes: int = 10, *, patch: int = 4, width: int = 128, depth: int = 6, heads: int = 8,
        head_width: int = 64, hidden: int = 256, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        """Make the layers."""
        super().__init__()
        self.patch = patch
        self.dense, self.drop = nn.Linear(3 * patch**2, width), nn.Dropout(dropout)
        self.class_token = nn.Parameter(0.02 * torch.randn(width))
        self.position = nn.Parameter(0.02 * torch.randn(1 + (32 // patch) ** 2, width))
        self.layers = nn.Sequential(
            *(TransformerLayer(width, hidden, heads, head_width, dropout) for _ in range(depth))
        )
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of images [B, 3, 32, 32]."""
        x = nn.functional.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), 1, -1), self.dense(x)], dim=1)
        return self.fc(self.norm(self.layers(self.drop(x + self.position))[:, 0]))


class CausalTransformer(nn.Module):
    """``transformer_tiny`` for texts of 80 characters without padding, with its dropout."""

    def __init__(
        self, classes: int = 80, *, width: int = 128, depth: int = 2, heads: int = 8, hidden: int = 256,
        positions: int = 128, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        """Make the layers."""
        super().__init__()
        self.word, self.position = nn.Embedding(classes, width), nn.Parameter(0.02 * torch.randn(positions, width))
        self.drop = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            *(TransformerLayer(width, hidden, heads, width // heads, dropout, causal=True) for _ in range(depth))
        )
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of the next character."""
        x = self.drop(self.word(x) + self.position[: x.shape[1]])
        return self.fc(self.norm(self.layers(x)[:, -1]))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet20": ResNet20, "lstm1": CharacterLSTM, "vit_tiny": ViT, "vit_tiny_patch8": functools.partial(ViT, patch=8),
    "transformer_tiny": CausalTransformer,
}  # fmt: skip


def build(name: str) -> nn.Module:
    """A network by the name of its twin in this package."""
    return (NETWORKS | globals())[name]()
