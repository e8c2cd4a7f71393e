"""Slices of a network: the first channels of its layers, the part that a weaker client holds of one shared network.

A slice is written as the whole network with zeros outside, so that one compiled program serves slices of all levels,
side by side in lanes too. It computes and trains as a network of its own size would: a channel whose weights in and out
and normalisation are all zero gives zeros and gets no gradient. The price: on the machine that simulates it, a slice
takes the multiply-adds of the whole network; `Slices.multiply_adds` counts those that it would take by itself.

Which inputs of a layer are part of a slice is found by running the network once with the other channels at zero. So it
follows the flattening in front of a dense layer, shortcuts and concatenations without a word about any network.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.models import layers, windows
from fedjax_mr.models.base import Layer, Model, Variables

Rounding = Callable[[float], int]
Loss = Callable[..., Any]
"""(params, ...) -> anything."""


class Level(NamedTuple):
    """How much of a network a slice holds.

    Attributes:
      width: the share of its channels that every layer keeps, 0 < width <= 1; the last layer has all of its outputs.
      whole: the share of the blocks before the last, rounded down and counted from the input on, that keep all of
        theirs.
    """

    width: float
    whole: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Slices:
    """The slices of one network, by the number of their level; A levels.

    Attributes:
      axes: of each leaf of the variables, in the order of ``jax.tree.leaves``, its axes that are cut with the indices
        that a level holds: (axis, [A, size] truth values).
      head: the positions of the last layer's leaves, whose last axis are the classes.
      multiply_adds: of one sample's forward pass, which each slice takes by itself [A].
      structure: of the variables.
      shapes: the shapes of the leaves.
    """

    axes: tuple[tuple[tuple[int, np.ndarray], ...], ...]
    head: tuple[int, ...]
    multiply_adds: np.ndarray
    structure: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def masks(self, level: jax.Array, *, classes: jax.Array | None = None) -> Any:
        """Return where a slice holds numbers: truth values that broadcast to the leaves, with as many axes.

        Args:
          level: scalar int32.
          classes: the classes of which the head is part of the slice [C]; None: all.
        """
        masks = []
        for position, (cuts, leaf) in enumerate(zip(self.axes, self.shapes, strict=True)):
            held = {axis: jnp.asarray(table)[level] for axis, table in cuts}
            if classes is not None and position in self.head:
                held[len(leaf.shape) - 1] = classes
            mask = jnp.ones((1,) * len(leaf.shape), bool)
            for axis, indices in held.items():
                mask &= indices.reshape(*(-1 if each == axis else 1 for each in range(len(leaf.shape))))
            masks.append(mask)
        return jax.tree.unflatten(self.structure, masks)

    def cut(self, variables: Variables, level: jax.Array) -> Variables:
        """Return the slice of a level: the variables with zeros outside."""
        keep = lambda leaf, mask: jnp.where(mask, leaf, jnp.zeros_like(leaf))
        return jax.tree.map(keep, variables, self.masks(level))

    def confine(self, loss: Loss, level: jax.Array) -> Loss:
        """Return a loss of the parameters in a slice alone: those outside get no gradient.

        Where a shortcut is wider than what it is added to, some would.
        """
        masks = self.masks(level)["params"]
        keep = lambda leaf, mask: jnp.where(mask, leaf, jnp.zeros_like(leaf))
        return lambda params, *rest: loss(jax.tree.map(keep, params, masks), *rest)

    def numbers(self, *, collections: tuple[str, ...] | None = None) -> np.ndarray:
        """Return how many numbers each slice holds [A], in some of Flax's collections or in all."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.structure.unflatten(self.shapes))]
        total = np.zeros(len(self.multiply_adds), np.int64)
        for path, cuts, leaf in zip(paths, self.axes, self.shapes, strict=True):
            if collections is None or path[0].key in collections:
                uncut = [size for axis, size in enumerate(leaf.shape) if axis not in dict(cuts)]
                total += math.prod(uncut) * math.prod((table.sum(axis=1) for _, table in cuts), start=1)
        return total

    def within(self) -> np.ndarray:
        """Return whether each slice is part of each other one [A, A]."""
        count = len(self.multiply_adds)
        inside = np.ones((count, count), bool)
        for cuts in self.axes:
            for _, table in cuts:
                inside &= np.all(~table[:, None] | table[None, :], axis=2)
        return inside


def floor(channels: float) -> int:
    """Return a number of channels rounded down, 1 at least."""
    return max(math.floor(channels + 1e-9), 1)


def ceil(channels: float) -> int:
    """Return a number of channels rounded up."""
    return math.ceil(channels - 1e-9)


@functools.lru_cache(maxsize=64)
def slices(model: Model, levels: tuple[Level, ...], *, rounding: Rounding = ceil) -> Slices:
    """Return the slices of a network; found by one small program, for which later calls do not ask again.

    Args:
      model: the network.
      levels: A of them.
      rounding: (share x channels) -> channels.

    Raises:
      UserError: a layer is no convolution, dense layer or BatchNorm, or normalises over its channels.
    """
    shapes, structure = jax.tree.flatten(model.shapes())
    owners = {layer.name: layer for layer in model.layers()}
    kernels = [layer for layer in owners.values() if "kernel" in layer.names]
    for layer in owners.values():
        _require_cut(model, layer)
    widths = {layer.name: shapes[layer.leaves[layer.names.index("kernel")]].shape[-1] for layer in kernels}
    blocks = list(dict.fromkeys(name.partition("/")[0] for name in widths))[:-1]
    last = kernels[-1].name

    def outputs(name: str, level: Level) -> np.ndarray:
        whole = name.partition("/")[0] in blocks[: math.floor(level.whole * len(blocks) + 1e-9)]
        count = widths[name] if whole or name == last else rounding(level.width * widths[name])
        return np.arange(widths[name]) < count

    held = {name: np.stack([outputs(name, level) for level in levels]) for name in widths}
    inputs, positions = _inputs(model, owners, held)

    axes: list[tuple[tuple[int, np.ndarray], ...]] = [()] * len(shapes)
    multiply_adds = np.zeros(len(levels), np.int64)
    for layer in owners.values():
        for leaf, name in zip(layer.leaves, layer.names, strict=True):
            rank = len(shapes[leaf].shape)
            if name == "kernel":
                axes[leaf] = ((rank - 2, inputs[layer.name]), (rank - 1, held[layer.name]))
                each = inputs[layer.name].sum(axis=1) * held[layer.name].sum(axis=1)
                multiply_adds += positions[layer.name] * math.prod(shapes[leaf].shape[:-2]) * each
            elif rank and layer.name in inputs:
                axes[leaf] = ((0, held[layer.name] if layer.name in held else inputs[layer.name]),)
    return Slices(tuple(axes), kernels[-1].leaves, multiply_adds, structure, tuple(shapes))


def _require_cut(model: Model, layer: Layer) -> None:
    """Check that a layer can be cut.

    Raises:
      UserError: it cannot.
    """
    names = set(layer.names)
    if (names <= {"kernel", "bias"} and "kernel" in names) or {"mean", "var"} <= names:
        return
    reason = "it normalises over its channels: take --norm=batch" if "scale" in names else "take another network"
    raise UserError(
        f"{model.name} cannot be narrowed: its layer {layer.name} is no convolution, dense layer or BatchNorm; {reason}"
    )


def _inputs(
    model: Model, owners: dict[str, Layer], held: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Return which inputs of each layer are part of a slice [A, I], and at how many places its kernel is applied.

    The network is run on ones; what stays zero is no part.
    """
    positions: dict[str, int] = {}

    def probe(held: dict[str, jax.Array]) -> dict[str, jax.Array]:
        reached: dict[str, jax.Array] = {}

        def watch(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            name = "/".join(context.module.path)
            out = call(*args, **kwargs)
            if name in owners and context.method_name == "__call__" and name not in reached:
                x = args[0]
                reached[name] = jnp.any(x != 0, axis=tuple(range(x.ndim - 1)))
                if name in held:
                    positions[name] = _places(context.module, x, out)
            return out

        with nn.intercept_methods(watch):
            model.apply(_ones(model, owners, held), jnp.ones((1, *model.input_shape), model.input_dtype))
        return reached

    # Compiled before it is called, because a strategy may be built inside a program that is being traced.
    program = jax.jit(lambda held: jax.lax.map(probe, held)).lower(held).compile()
    return jax.tree.map(np.asarray, program(held)), positions


def _ones(model: Model, owners: dict[str, Layer], held: dict[str, jax.Array]) -> Variables:
    """Return variables of which a channel that a slice holds gives something positive, and any other gives zero."""
    leaves, structure = jax.tree.flatten(model.shapes())
    for layer in owners.values():
        for leaf, name in zip(layer.leaves, layer.names, strict=True):
            shape = leaves[leaf].shape
            filled = jnp.full(shape, {"scale": 1.0, "var": 1.0}.get(name, 0.0), jnp.float32)
            if name == "kernel":
                row = held[layer.name].astype(jnp.float32) / math.prod(shape[:-1])
                filled = jnp.broadcast_to(row.reshape(*(1,) * (len(shape) - 1), -1), shape)
            leaves[leaf] = filled
    return jax.tree.unflatten(structure, leaves)


def _places(module: nn.Module, x: jax.Array, out: jax.Array) -> int:
    """Return at how many places of one sample a kernel is applied; ours pools what it has convolved."""
    if not isinstance(module, layers.Conv):
        return out.size // out.shape[-1]
    kernel = jax.ShapeDtypeStruct((*windows.pair(module.kernel_size), x.shape[-1], 1), x.dtype)
    convolve = functools.partial(windows.conv, strides=module.strides, padding=module.padding)
    return jax.eval_shape(convolve, jax.ShapeDtypeStruct(x.shape, x.dtype), kernel).size
