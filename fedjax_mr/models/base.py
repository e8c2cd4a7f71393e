"""The interface of a network: an ordered list of named blocks, used through pure functions of its variables.

A `Model` is also a zoo of one network, so that code for several networks (`models.zoo.Zoo`) works with every model. For
a single network ``pack``, ``unpack``, ``switch`` and ``train_compact`` change nothing.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import calls, parts, precision, windows
from fedjax_mr.models.blocks import Projection
from fedjax_mr.tasks import Classification, Task

Variables = dict[str, Any]
"""All Flax collections of a network: ``params`` and, with BatchNorm, ``batch_stats``."""

# PyTorch's order of the tensors of a layer. Papers and released code count leaves in this order.
LEAF_ORDER = ("embedding", "kernel", "recurrent_kernel", "bias", "recurrent_bias")
NORM_LEAF_ORDER = ("scale", "bias", "mean", "var", "count")
PAIR = ("lora_a", "lora_b")  # the two tensors of an adapter (`models.adapters`), which mean nothing apart


class BlockNet(nn.Module):
    """An ordered list of named blocks; the last one is the head (the classifier's dense layer).

    A family overrides ``blocks``. Every block is a module called as ``block(x, train=..., mask=...)``; ``train`` sets
    the mode of BatchNorm and dropout. ``mask`` [B] is 1 for samples and 0 for padding, or None without padding. Blocks
    that need more than one array of the blocks before them hand on a NamedTuple, such as `transformer.Tokens`.

    Attributes:
      num_classes: C, the size of the last axis of the output.
      initialisation: ``torch`` (PyTorch's defaults, or those of the network's source code) or ``flax``.
      projection: width of MOON's projection head (dense, ReLU, dense) in front of the classifier. 0 disables it.
      takes: the kind of samples: ``images`` [H, W, channels], ``tokens`` [T], ``sequences`` of numbers [T, F], ``rows``
        of a table [F] or ``numbers`` of any shape.
      has_representation: whether any layer precedes the head.
      tied: whether the head has the weights of the embedding. Adapters leave such a head frozen.
    """

    num_classes: int
    initialisation: str = "torch"
    projection: int = 0
    takes: ClassVar[str] = "images"
    has_representation: ClassVar[bool] = True
    tied: ClassVar[bool] = False

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        raise NotImplementedError

    def setup(self) -> None:
        """Register each block as a submodule under its name."""
        blocks = self.blocks()
        if self.projection:
            projector = ("projector", Projection(self.projection, self.initialisation))
            blocks = (*blocks[:-1], projector, blocks[-1])
        self.block_names = tuple(name for name, _ in blocks)
        for name, block in blocks:
            setattr(self, name, block)

    def features(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the representation [B, F] of a batch: all blocks before the head."""
        for name in self.block_names[:-1]:
            x = getattr(self, name)(x, train=train, mask=mask)
        return x

    def head(self, z: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the logits [B, C] of a representation [B, F]."""
        return getattr(self, self.block_names[-1])(z, train=train, mask=mask)

    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the logits [B, C] of a batch [B, ...]."""
        return self.head(self.features(x, train=train, mask=mask), train=train, mask=mask)


class _Shapes(dict):
    """Shapes that a model has computed. A program does not depend on them, so all such stores are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shapes)

    def __hash__(self) -> int:
        return 0


STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A network for samples of one shape: pure functions of ``Variables``.

    Any Flax module is accepted (`calls` says how it is called, `user_module.bind` what is checked). ``features`` and
    ``head`` need methods of these names, which every `BlockNet` has.

    The functions take and return the variables that train. The frozen ones are part of the model: it is a pytree whose
    leaves they are. So they are arguments of the compiled programs, exist once on a device, and are in no message and
    no checkpoint. Models with equal static fields are equal: their programs are the same.

    Attributes:
      module: the Flax module; one of NNX is split (`nnx_module.NNXModule`).
      input_shape: shape of one sample, without the batch axis.
      input_dtype: float32 for images and vectors, int32 for token sequences.
      name: name of the network in error messages.
      frozen: the variables that never change, see `partly`. {}: all train.
      start: initial values of variables that train, see `partly`. All others are initialised at random.
      precision: number type of forward and backward passes in training mode, see `precision.with_precision`.
      convolution: how convolutions are computed, see `windows.convolutions`.
      adapter: how adapters enter the network and its means (`adapters.Lora`). None: there are none.
      task: what its outputs mean, with the loss and the metrics by which it is trained and tested.

    All functions of samples raise a UserError during tracing if the samples have another shape or kind.
    """

    module: calls.Module = dataclasses.field(metadata=STATIC)
    input_shape: tuple[int, ...] = dataclasses.field(metadata=STATIC)
    input_dtype: Any = dataclasses.field(default=np.float32, metadata=STATIC)
    name: str = dataclasses.field(default="model", metadata=STATIC)
    frozen: Variables = dataclasses.field(default_factory=dict, compare=False, repr=False)
    start: Variables = dataclasses.field(default_factory=dict, compare=False, repr=False)
    adapter: Any = dataclasses.field(default=None, metadata=STATIC)
    precision: str = dataclasses.field(default="float32", metadata=STATIC)
    convolution: str = dataclasses.field(default="auto", metadata=STATIC)
    task: Task = dataclasses.field(default=Classification(width=0), metadata=STATIC)
    _known: _Shapes = dataclasses.field(default_factory=_Shapes, compare=False, repr=False, metadata=STATIC)

    @property
    def networks(self) -> tuple["Model", ...]:
        """The A networks, ordered by architecture number."""
        return (self,)

    def init(self, key: jax.Array, architecture: jax.Array | int = 0) -> Variables:
        """Initialise the variables of one network; consumes ``key``."""
        variables = self.init_all(key)
        trained = parts.without(variables, self.frozen) if self.frozen else variables
        return parts.joined(trained, self.start)

    def init_all(self, key: jax.Array) -> Variables:
        """Initialise the variables of the module at random, those that are frozen here included; consumes ``key``."""
        x = jnp.zeros((1, *self.input_shape), self.input_dtype)
        return calls.init(self.module, key, x)

    def whole(self, variables: Variables) -> Variables:
        """The variables of the module: the given ones, which train, and the frozen ones in their number type."""
        return parts.joined(precision.widened(self.frozen, variables), variables)

    def merged(self, variables: Variables) -> Variables:
        """The variables of the module for plain Flax: the `whole` ones, with adapters added to the kernels."""
        return self.whole(variables) if self.adapter is None else self.adapter.merged(self, variables)

    def bound(self, variables: Variables) -> Any:
        """The Flax module with its variables: a bound one of Linen, or one of NNX in evaluation mode."""
        return calls.bound(self.module, self.merged(variables))

    def apply(self, variables: Variables, x: jax.Array) -> jax.Array:
        """Compute the logits [B, C] in evaluation mode."""
        return self._apply(variables, x, train=False, mask=None)

    def train_apply(
        self,
        params: Any,
        state: Variables,
        x: jax.Array,
        *,
        mask: jax.Array | None,
        key: jax.Array,
        method: str = "__call__",
    ) -> tuple[jax.Array, Variables]:
        """Compute the output in training mode and the new non-trainable collections.

        Args:
          params: the trainable collection.
          state: the other collections ({} without BatchNorm).
          x: a batch [B, ...].
          mask: [B], 1 for samples, 0 for padding.
          key: consumed by dropout.
          method: the module's method to call: ``__call__``, ``features`` or ``head``.
        """
        options: dict[str, Any] = {
            "train": True,
            "mask": mask,
            "mutable": list(state),
            "rngs": {"dropout": key},
            "method": method,
        }
        if self.precision == "float32":
            return self._apply({"params": params, **state}, x, **options)
        rounded, x = precision.cast((params, x), self.precision)
        kept = {name: tree for name, tree in self.frozen.items() if name == "batch_stats"}
        model = dataclasses.replace(self, frozen=precision.cast(self.frozen, self.precision) | kept)
        return precision.cast(model._apply({"params": rounded, **state}, x, **options), jnp.float32)

    def features(self, variables: Variables, x: jax.Array) -> jax.Array:
        """Compute the representation [B, F] in evaluation mode."""
        return self._apply(variables, x, train=False, mask=None, method="features")

    def head(self, variables: Variables, z: jax.Array) -> jax.Array:
        """Compute the logits [B, C] of a representation [B, F] in evaluation mode."""
        return self._apply(variables, z, train=False, mask=None, method="head")

    def architecture(self, variables: Variables) -> jax.Array:
        """Number (int32) of the network that the variables belong to; [R] for stacked variables [R, ...]."""
        return jnp.zeros((), jnp.int32)

    def pack(self, variables: Variables, architecture: int) -> Variables:
        """Convert the variables of one network, in Flax's form, to the form that all networks share."""
        return variables

    def unpack(self, variables: Variables, architecture: int) -> Variables:
        """Convert variables back to Flax's form: the inverse of `pack`."""
        return variables

    def switch(self, variables: Variables, function: Callable, *operands: Any) -> Any:
        """Call ``function(number, network, variables in Flax's form, *operands)`` for the network of the variables.

        The results must have the same structure and shapes for all networks. `pack` gives variables such a form.
        """
        return function(0, self, variables, *operands)

    def train_compact(self, variables: Variables, loss: Callable, train: Callable) -> tuple[Variables, Any]:
        """Train variables in the form with the fewest and largest arrays.

        Args:
          variables: those of one network.
          loss: (params, state, ...) -> (value, state), for variables in the form that all networks share.
          train: called as ``train(loss, variables) -> (variables, ...)``, with the loss and the variables in the form
            that is trained.

        Returns:
          What ``train`` returns, its variables again in the form that all networks share.
        """
        return train(loss, variables)

    def num_bytes(self) -> np.ndarray:
        """Bytes of the variables of each network [A]."""
        leaves = [jax.tree.leaves(network.shapes()) for network in self.networks]
        return np.array([sum(leaf.size * leaf.dtype.itemsize for leaf in each) for each in leaves])

    def shapes(self) -> Variables:
        """Shapes and dtypes of the variables that train. Nothing is computed."""
        return self._shapes("trained", lambda: self.init(random_key(0)))

    def module_shapes(self) -> Variables:
        """Shapes and dtypes of the variables of the module, those that are frozen here included."""
        return self._shapes("all", lambda: self.init_all(random_key(0)))

    def output_shape(self) -> tuple[int, ...]:
        """The shape of the output for one sample: [C], or with positions [T, C] or [H, W, C]."""
        x = jax.ShapeDtypeStruct((1, *self.input_shape), self.input_dtype)
        return self._shapes("logits", lambda: jax.eval_shape(self.apply, self.shapes(), x)).shape[1:]

    def _shapes(self, name: str, function: Callable[[], Any]) -> Any:
        # Models that are derived from one another share what is known, and may differ in shapes, such as ranks.
        key = name, jax.tree.structure(self), tuple(map(np.shape, jax.tree.leaves(self)))
        if key not in self._known:
            self._known[key] = jax.eval_shape(function)
        return jax.tree.map(lambda leaf: leaf, self._known[key])  # a copy: the caller may change its dictionaries

    def mean(self, models: Variables, *, weights: jax.Array | None = None) -> Variables:
        """The mean of K models [K, ...] as a model to deploy. Adapters: that of their products, see `adapters.Lora`."""
        if self.adapter is not None:
            return self.adapter.mean(self, models, weights)
        return trees.mean(models, weights=weights)

    def gram(self, models: Variables) -> jax.Array:
        """Inner products of the parameters of K models [K, K]. Adapters: those of their products."""
        return trees.gram(models["params"]) if self.adapter is None else self.adapter.gram(self, models)

    def mean_cosine(self, models: Variables) -> jax.Array:
        """The mean cosine of the parameters of all pairs of K models. Adapters: that of their products."""
        if self.adapter is None:
            return trees.mean_pairwise_cosine(models["params"])
        cosines = trees.cosines_of(self.gram(models))
        count = cosines.shape[0]
        return (jnp.sum(cosines) - jnp.trace(cosines)) / (count * (count - 1)) if count > 1 else jnp.ones(())

    def layers(self) -> tuple["Layer", ...]:
        """The layers in forward order, determined by tracing one forward pass."""
        return forward_layers(self.module, self.shapes(), self.input_shape, self.input_dtype, frozen=self.frozen)

    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes()["params"]))

    def head_name(self) -> str:
        """Name of the submodule that is the head.

        Raises:
          UserError: the module has no ``head``, or its head consists of several submodules.
        """
        z = jax.eval_shape(self.features, self.shapes(), jax.ShapeDtypeStruct((1, *self.input_shape), self.input_dtype))
        owners = calls.modules_called(self.module, self.head, self.shapes(), z)
        names = list(dict.fromkeys(path[0] for path in owners if path and path[0] in self.shapes()["params"]))
        if len(names) != 1:
            raise UserError(
                f"the head of {self.name} is not one submodule ({', '.join(names) or 'none trains'}): its "
                "method head must call exactly one submodule"
            )
        return names[0]

    def _apply(self, variables: Variables, x: jax.Array, *, method: str = "__call__", **options: Any) -> Any:
        if method != "head":
            self._check(x)
        if not calls.has(self.module, method):
            raise UserError(
                f"{self.name} has no method {method!r}, which is needed here: define features(x) (all layers before "
                "the last one, [B, F]) and head(z) (the logits of the last layer, [B, C]), and let __call__ return "
                "head(features(x))"
            )
        if self.adapter is not None:
            with nn.intercept_methods(self.adapter.intercept):
                return dataclasses.replace(self, adapter=None)._apply(variables, x, method=method, **options)
        with windows.convolutions(self.convolution):
            if not self.frozen:
                return calls.apply(self.module, variables, x, method=method, **options)
            fixed = parts.modules_of(self.frozen, "batch_stats")
            result = calls.apply(self.module, self.whole(variables), x, method=method, fixed=fixed, **options)
        if "mutable" not in options:
            return result
        out, state = result
        return out, parts.without(state, self.frozen)

    def _check(self, x: jax.Array) -> None:
        same_kind = jnp.issubdtype(x.dtype, jnp.integer) == jnp.issubdtype(self.input_dtype, jnp.integer)
        if tuple(x.shape[1:]) != tuple(self.input_shape) or not same_kind:
            raise UserError(
                f"{self.name} was built for samples {describe(self.input_shape, self.input_dtype)}, "
                f"but received {describe(x.shape[1:], x.dtype)}; build it for the shape of the data"
            )


def describe(shape: tuple[int, ...], dtype: Any) -> str:
    """Shape and type of a sample in words, such as ``28x28x1 of float32``."""
    return f"{'x'.join(map(str, shape)) or 'scalars'} of {np.dtype(dtype).name}"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A module that owns tensors.

    Attributes:
      name: path of the module, such as ``conv1/conv``.
      leaves: positions of its tensors in ``jax.tree.leaves(variables)``, in PyTorch's order inside the layer.
      names: names of the tensors in the same order.
    """

    name: str
    leaves: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The tensors of the layer, each alone but the two of an adapter together: the smallest units to exchange."""
        place = {name: leaf for name, leaf in zip(self.names, self.leaves, strict=True)}
        pair = tuple(place[name] for name in PAIR if name in place)
        singles = tuple((leaf,) for leaf in self.leaves if leaf not in pair)
        return (*singles, pair) if pair else singles


def forward_layers(
    module: calls.Module,
    shapes: Variables,
    input_shape: tuple[int, ...],
    input_dtype: Any,
    *,
    frozen: Variables | None = None,
) -> tuple[Layer, ...]:
    """The layers of ``module`` in the order in which a forward pass first calls them, without ``frozen`` variables.

    JAX flattens dictionaries alphabetically, so the forward order must be recorded: segments (FedMR-p) and the
    similarity of the released FedCross code depend on it.
    """
    leaves: dict[tuple[str, ...], dict[str, int]] = {}
    for position, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(shapes)):
        keys = tuple(str(entry.key) for entry in path)  # `nnx.bridge` numbers the modules of a list by integers
        leaves.setdefault(keys[1:-1], {})[keys[-1]] = position

    x = jax.ShapeDtypeStruct((1, *input_shape), input_dtype)

    def forward(variables: Variables, x: jax.Array) -> Any:
        rest = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), frozen or {})  # values do not matter
        whole = parts.joined(precision.widened(rest, variables), variables)
        return calls.apply(module, whole, x, train=False, mask=None, method="__call__")

    order = [path for path in calls.modules_called(module, forward, shapes, x) if path in leaves]
    order += [path for path in leaves if path not in order]  # tensors that the forward pass does not read come last

    def layer(path: tuple[str, ...]) -> Layer:
        names = sorted(leaves[path], key=lambda name: _leaf_rank(name, leaves[path]))
        return Layer("/".join(path), tuple(leaves[path][name] for name in names), tuple(names))

    return tuple(layer(path) for path in order)


def _leaf_rank(name: str, names: dict[str, int]) -> tuple[int, str]:
    order = NORM_LEAF_ORDER if "scale" in names else LEAF_ORDER
    return (order.index(name) if name in order else len(order), name)


def with_fields(model: "Model", **changes: Any) -> "Model":
    """The network, or each of several, with other fields: another ``task``, another ``convolution``."""
    if len(model.networks) > 1:
        changes["members"] = tuple(with_fields(member, **changes) for member in model.networks)
    return dataclasses.replace(model, **changes)
