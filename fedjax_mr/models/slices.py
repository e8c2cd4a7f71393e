"""Slices of a network: the first channels of its layers, the part of a shared network that a weaker client holds.

A slice is stored as the full network with zeros outside the slice, so that one compiled program serves slices of all
levels, also in parallel lanes. It computes and trains like a network of its size: a channel whose incoming weights,
outgoing weights and normalisation are zero outputs zeros and has no gradient. Limitation: the simulation of a slice
costs the multiply-adds of the full network. `Slices.multiply_adds` counts those of the slice alone.

The inputs of a layer that belong to a slice are determined by running the network once with the other channels at zero.
So flattening in front of a dense layer, shortcuts and concatenations need no code for any particular network.
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
from fedjax_mr.models.nnx_module import NNXModule

Rounding = Callable[[float], int]
Loss = Callable[..., Any]
"""A function (params, ...) -> value."""


class Level(NamedTuple):
    """The size of a slice.

    Attributes:
      width: share of the channels that a layer keeps, 0 < width <= 1. The last layer keeps all of its outputs.
      full: share of the blocks before the last, counted from the input and rounded down, that keep all channels.
    """

    width: float
    full: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Slices:
    """The slices of one network at A levels, numbered 0 to A - 1.

    Attributes:
      axes: for each leaf of the variables, in the order of ``jax.tree.leaves``, pairs (axis, [A, size] bool): an axis
        that is cut, and the indices that each level keeps.
      head: positions of the leaves of the last layer, whose last axis is the classes.
      multiply_adds: multiply-adds of the forward pass of one sample in each slice alone [A].
      structure: tree structure of the variables.
      shapes: shapes of the leaves.
    """

    axes: tuple[tuple[tuple[int, np.ndarray], ...], ...]
    head: tuple[int, ...]
    multiply_adds: np.ndarray
    structure: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def masks(self, level: jax.Array, *, classes: jax.Array | None = None) -> Any:
        """Masks of a slice: for each leaf a bool array with the same number of axes, which broadcasts to the leaf.

        Args:
          level: scalar int32.
          classes: [C] bool, classes of the head that belong to the slice. Default: all.
        """
        masks = []
        for position, (cuts, leaf) in enumerate(zip(self.axes, self.shapes, strict=True)):
            kept = {axis: jnp.asarray(table)[level] for axis, table in cuts}
            if classes is not None and position in self.head:
                kept[len(leaf.shape) - 1] = classes
            mask = jnp.ones((1,) * len(leaf.shape), bool)
            for axis, indices in kept.items():
                mask &= indices.reshape(*(-1 if each == axis else 1 for each in range(len(leaf.shape))))
            masks.append(mask)
        return jax.tree.unflatten(self.structure, masks)

    def cut(self, variables: Variables, level: jax.Array) -> Variables:
        """The slice of a level: the variables with zeros outside the slice."""
        keep = lambda leaf, mask: jnp.where(mask, leaf, jnp.zeros_like(leaf))
        return jax.tree.map(keep, variables, self.masks(level))

    def confine(self, loss: Loss, level: jax.Array) -> Loss:
        """A loss of the parameters inside a slice: those outside have no gradient.

        This is needed where a shortcut is wider than the output that it is added to.
        """
        masks = self.masks(level)["params"]
        keep = lambda leaf, mask: jnp.where(mask, leaf, jnp.zeros_like(leaf))
        return lambda params, *rest: loss(jax.tree.map(keep, params, masks), *rest)

    def numbers(self, *, collections: tuple[str, ...] | None = None) -> np.ndarray:
        """Number of variables in each slice [A], in the named collections of Flax. Default: in all collections."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.structure.unflatten(self.shapes))]
        total = np.zeros(len(self.multiply_adds), np.int64)
        for path, cuts, leaf in zip(paths, self.axes, self.shapes, strict=True):
            if collections is None or path[0].key in collections:
                uncut = [size for axis, size in enumerate(leaf.shape) if axis not in dict(cuts)]
                total += math.prod(uncut) * math.prod((table.sum(axis=1) for _, table in cuts), start=1)
        return total

    def within(self) -> np.ndarray:
        """Whether slice i is part of slice j, at [i, j] of [A, A]."""
        count = len(self.multiply_adds)
        inside = np.ones((count, count), bool)
        for cuts in self.axes:
            for _, table in cuts:
                inside &= np.all(~table[:, None] | table[None, :], axis=2)
        return inside


def floor(channels: float) -> int:
    """A number of channels, rounded down, at least 1."""
    return max(math.floor(channels + 1e-9), 1)


def ceil(channels: float) -> int:
    """A number of channels, rounded up."""
    return math.ceil(channels - 1e-9)


def slices(model: Model, levels: tuple[Level, ...], *, rounding: Rounding = ceil) -> Slices:
    """The slices of a network, computed by one small program. Results are cached.

    Args:
      model: the network.
      levels: A levels.
      rounding: converts share x channels to a number of channels.

    Raises:
      UserError: a layer is not a convolution, dense layer or BatchNorm, or normalises over its channels; the network is
        an NNX module, whose calls cannot be observed; or it has frozen variables.
    """
    if model.frozen:
        raise UserError(
            f"{model.name} cannot be narrowed, because it has frozen variables: leave out trainable= and adapter=lora"
        )
    without_values = dataclasses.replace(model, start={})  # inside a program, they would be its arguments
    return _slices(without_values, levels, rounding)


@functools.lru_cache(maxsize=64)
def _slices(model: Model, levels: tuple[Level, ...], rounding: Rounding) -> Slices:
    if isinstance(model.module, NNXModule):
        raise UserError(f"{model.name} cannot be narrowed, because it is an NNX module: use a Linen module")
    shapes, structure = jax.tree.flatten(model.shapes())
    owners = {layer.name: layer for layer in model.layers()}
    kernels = [layer for layer in owners.values() if "kernel" in layer.names]
    for layer in owners.values():
        _require_cut(model, layer)
    widths = {layer.name: shapes[layer.leaves[layer.names.index("kernel")]].shape[-1] for layer in kernels}
    blocks = list(dict.fromkeys(name.partition("/")[0] for name in widths))[:-1]
    last = kernels[-1].name

    def outputs(name: str, level: Level) -> np.ndarray:
        full = name.partition("/")[0] in blocks[: math.floor(level.full * len(blocks) + 1e-9)]
        count = widths[name] if full or name == last else rounding(level.width * widths[name])
        return np.arange(widths[name]) < count

    kept = {name: np.stack([outputs(name, level) for level in levels]) for name in widths}
    inputs, positions = _inputs(model, owners, kept)

    axes: list[tuple[tuple[int, np.ndarray], ...]] = [()] * len(shapes)
    multiply_adds = np.zeros(len(levels), np.int64)
    for layer in owners.values():
        for leaf, name in zip(layer.leaves, layer.names, strict=True):
            rank = len(shapes[leaf].shape)
            if name == "kernel":
                axes[leaf] = ((rank - 2, inputs[layer.name]), (rank - 1, kept[layer.name]))
                each = inputs[layer.name].sum(axis=1) * kept[layer.name].sum(axis=1)
                multiply_adds += positions[layer.name] * math.prod(shapes[leaf].shape[:-2]) * each
            elif rank and layer.name in inputs:
                axes[leaf] = ((0, kept[layer.name] if layer.name in kept else inputs[layer.name]),)
    return Slices(tuple(axes), kernels[-1].leaves, multiply_adds, structure, tuple(shapes))


def _require_cut(model: Model, layer: Layer) -> None:
    """Check that a layer can be cut.

    Raises:
      UserError: the layer cannot be cut.
    """
    names = set(layer.names)
    if (names <= {"kernel", "bias"} and "kernel" in names) or {"mean", "var"} <= names:
        return
    reason = "it normalises over its channels: use norm=batch" if "scale" in names else "use another network"
    raise UserError(
        f"{model.name} cannot be narrowed: layer {layer.name} is not a convolution, dense layer or BatchNorm; {reason}"
    )


def _inputs(
    model: Model, owners: dict[str, Layer], kept: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Inputs of each layer that belong to a slice [A, I], and the number of positions where its kernel is applied.

    The network runs on ones. Inputs that are zero do not belong to the slice.
    """
    positions: dict[str, int] = {}

    def probe(kept: dict[str, jax.Array]) -> dict[str, jax.Array]:
        reached: dict[str, jax.Array] = {}

        def watch(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            name = "/".join(context.module.path)
            out = call(*args, **kwargs)
            if name in owners and context.method_name == "__call__" and name not in reached:
                x = args[0]
                reached[name] = jnp.any(x != 0, axis=tuple(range(x.ndim - 1)))
                if name in kept and context.module.get_variable("params", "kernel").shape[-2] != x.shape[-1]:
                    raise UserError(f"{model.name} cannot be narrowed: layer {name} mixes its channels in groups")
                if name in kept:
                    positions[name] = _num_positions(context.module, x, out)
            return out

        with nn.intercept_methods(watch):
            model.apply(_ones(model, owners, kept), jnp.ones((1, *model.input_shape), model.input_dtype))
        return reached

    # Compiled explicitly, because a strategy may be built while another program is traced.
    program = jax.jit(lambda kept: jax.lax.map(probe, kept)).lower(kept).compile()
    return jax.tree.map(np.asarray, program(kept)), positions


def _ones(model: Model, owners: dict[str, Layer], kept: dict[str, jax.Array]) -> Variables:
    """Variables with which channels of the slice output positive values, and all others output zero."""
    leaves, structure = jax.tree.flatten(model.shapes())
    for layer in owners.values():
        for leaf, name in zip(layer.leaves, layer.names, strict=True):
            shape = leaves[leaf].shape
            filled = jnp.full(shape, {"scale": 1.0, "var": 1.0}.get(name, 0.0), jnp.float32)
            if name == "kernel":
                row = kept[layer.name].astype(jnp.float32) / math.prod(shape[:-1])
                filled = jnp.broadcast_to(row.reshape(*(1,) * (len(shape) - 1), -1), shape)
            leaves[leaf] = filled
    return jax.tree.unflatten(structure, leaves)


def _num_positions(module: nn.Module, x: jax.Array, out: jax.Array) -> int:
    """Number of positions in one sample where a kernel is applied, before the pooling of `layers.Conv`."""
    if not isinstance(module, layers.Conv):
        return out.size // out.shape[-1]
    kernel = jax.ShapeDtypeStruct((*windows.pair(module.kernel_size), x.shape[-1], 1), x.dtype)
    convolve = functools.partial(windows.conv, strides=module.strides, padding=module.padding)
    return jax.eval_shape(convolve, jax.ShapeDtypeStruct(x.shape, x.dtype), kernel).size
