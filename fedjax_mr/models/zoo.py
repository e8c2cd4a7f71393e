"""Networks of different architectures behind the interface of one network. The choice of the network is data.

Clients of FedMe and pFedHR have different networks, and clients of FedMe change theirs during training. Here the
variables of every network are vectors as long as those of the largest network, plus the number of the network.
`jax.lax.switch` selects the network inside the compiled step. So one program serves every assignment of networks to
clients, even if it changes in every round, and code that trains or tests a `Model` also works with a `Zoo`. With one
client at a time (one lane, the default on CPU) only the selected network is computed; with several lanes, all are.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.models.base import STATIC, Layer, Model, Variables

EVEN = 256  # vectors of such multiples can be sharded evenly over the devices of a pod; others would be replicated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Zoo(Model):
    """A networks for the same samples and task.

    Their variables are ``{"params": {"vector": [P]}, "batch_stats": {"vector": [S]}, "architecture": []}``. P and S are
    the sizes of the largest network, rounded up to a multiple of `EVEN`; zeros pad smaller networks. ``batch_stats``
    exists if any network has BatchNorm.

    Attributes:
      members: the networks. ``module`` is that of the first one.
    """

    members: tuple[Model, ...] = dataclasses.field(default=(), metadata=STATIC)

    @classmethod
    def of(cls, models: Sequence[Model]) -> "Zoo":
        """The zoo of several networks.

        Raises:
          UserError: a network has variables that are not floats, or frozen ones; or the networks learn different tasks,
            or train in different precisions.
        """
        for model in models:
            if model.frozen:
                raise UserError(f"{model.name} has frozen variables, which several networks must not have")
            if any(not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(model.shapes())):
                raise UserError(f"{model.name} has variables that are not floats, which several networks must not have")
        first = models[0]
        if len({model.precision for model in models}) > 1:
            raise UserError("several networks must train in one precision: give it with precision=, once for all")
        other = next((each for each in models if each.task != first.task), first)
        if other is not first:
            raise UserError(
                f"several networks must learn one task, but {first.name} learns {first.task.facts()} and {other.name} "
                f"{other.task.facts()}"
            )
        facts: dict[str, Any] = {"members": tuple(models)}
        facts |= {name: getattr(first, name) for name in ("precision", "convolution", "task")}
        return cls(first.module, first.input_shape, first.input_dtype, ",".join(each.name for each in models), **facts)

    def init(self, key: jax.Array, architecture: jax.Array | int = 0) -> Variables:
        """Initialise the variables of one network; consumes ``key``."""
        branches = [
            lambda key, number=number: self.pack(self.members[number].init(key), number) for number in self._numbers
        ]
        return _switch(architecture, branches, key)

    @property
    def networks(self) -> tuple[Model, ...]:
        """The A networks, ordered by architecture number."""
        return self.members

    def architecture(self, variables: Variables) -> jax.Array:
        """Number (int32) of the network that the variables belong to; [R] for stacked variables [R, ...]."""
        return variables["architecture"]

    def pack(self, variables: Variables, architecture: int) -> Variables:
        """Convert the variables of one network, in Flax's form, to those of the zoo."""
        return self._fill({name: {"vector": _ravel(tree)} for name, tree in variables.items()}, architecture)

    def train_compact(self, variables: Variables, loss: Callable, train: Callable) -> tuple[Variables, Any]:
        """Train the network's own vectors, without padding and without its number, inside one switch."""

        def branch(number: int) -> Callable:
            def own_loss(params: Any, state: Variables, *rest: Any) -> tuple[jax.Array, Variables]:
                value, state = loss(params, {**state, "architecture": np.int32(number)}, *rest)
                return value, {name: tree for name, tree in state.items() if name != "architecture"}

            def run(variables: Variables) -> tuple[Variables, Any]:
                new, other = train(own_loss, self._cut(variables, number))
                return self._fill(new, number), other

            return run

        return _switch(variables["architecture"], [branch(number) for number in self._numbers], variables)

    @property
    def _numbers(self) -> range:
        return range(len(self.members))

    def _cut(self, variables: Variables, architecture: int) -> Variables:
        """Remove the padding of the vectors and the number of the network."""
        sizes = self._sizes(architecture)
        return {name: {"vector": variables[name]["vector"][:size]} for name, size in sizes.items()}

    def _fill(self, variables: Variables, architecture: int) -> Variables:
        """Add the padding and the number of the network: the inverse of `_cut`."""
        padded = {}
        for name, size in self._sizes().items():
            vector = variables[name]["vector"] if name in variables else jnp.zeros(0)
            padded[name] = {"vector": jnp.pad(vector, (0, size - vector.size))}
        return padded | {"architecture": jnp.asarray(architecture, jnp.int32)}

    def unpack(self, variables: Variables, architecture: int) -> Variables:
        """Convert the variables of network number ``architecture`` to Flax's form."""
        shapes = self.members[architecture].shapes()
        return {name: _unpack(variables[name]["vector"], shapes[name]) for name in shapes}

    def num_parameters(self) -> int:
        """Number of trainable parameters of the largest network."""
        return max(model.num_parameters() for model in self.members)

    def layers(self) -> tuple[Layer, ...]:
        """Empty: different networks have no layers in common."""
        return ()

    def features(self, variables: Variables, x: jax.Array) -> jax.Array:
        """Compute the representation [B, F] in evaluation mode, padded with zeros to the largest width."""
        widths = self.feature_widths()

        def padded(number: int, network: Model, unpacked: Variables, x: jax.Array) -> jax.Array:
            z = network.features(unpacked, x).reshape(x.shape[0], -1)
            return jnp.pad(z, ((0, 0), (0, max(widths) - widths[number])))

        return self.switch(variables, padded, x)

    def head(self, variables: Variables, z: jax.Array) -> jax.Array:
        """Compute the logits [B, C] of a representation [B, F] in evaluation mode, ignoring its padding."""
        shapes = self._feature_shapes()

        def cut(number: int, network: Model, unpacked: Variables, z: jax.Array) -> jax.Array:
            shape = shapes[number]
            return network.head(unpacked, z[:, : math.prod(shape)].reshape(-1, *shape))

        return self.switch(variables, cut, z)

    def feature_widths(self) -> tuple[int, ...]:
        """Width of the representation of each network [A]."""
        return tuple(map(math.prod, self._feature_shapes()))

    def _feature_shapes(self) -> tuple[tuple[int, ...], ...]:
        sample = jax.ShapeDtypeStruct((1, *self.input_shape), self.input_dtype)
        return tuple(jax.eval_shape(model.features, model.shapes(), sample).shape[1:] for model in self.members)

    def _apply(self, variables: Variables, x: jax.Array, *, mutable: Any = None, **options: Any) -> Any:
        def one(number: int, network: Model, unpacked: Variables, x: jax.Array) -> Any:
            if mutable is None:
                return network._apply(unpacked, x, **options)
            out, state = network._apply(unpacked, x, mutable=[name for name in unpacked if name != "params"], **options)
            new = {name: {"vector": _ravel(tree, variables[name]["vector"].size)} for name, tree in state.items()}
            return out, {name: new.get(name, variables[name]) for name in mutable}

        return self.switch(variables, one, x)

    def switch(self, variables: Variables, function: Callable, *operands: Any) -> Any:
        """Call ``function(number, network, variables in Flax's form, *operands)`` for the network of the variables."""

        def branch(number: int) -> Callable:
            return lambda variables, *operands: function(
                number, self.members[number], self.unpack(variables, number), *operands
            )

        return _switch(variables["architecture"], [branch(number) for number in self._numbers], variables, *operands)

    def _sizes(self, architecture: int | None = None) -> dict[str, int]:
        """Size of each collection of a network; without a network, P and S."""
        sizes: dict[str, int] = {}
        for model in self.members if architecture is None else (self.members[architecture],):
            for name, tree in model.shapes().items():
                sizes[name] = max(sizes.get(name, 0), sum(leaf.size for leaf in jax.tree.leaves(tree)))
        return sizes if architecture is not None else {name: -(-size // EVEN) * EVEN for name, size in sizes.items()}


def _switch(number: Any, branches: Sequence[Callable], *operands: Any) -> Any:
    if isinstance(number, int | np.integer):  # known during tracing
        return branches[int(number)](*operands)
    return jax.lax.switch(number, branches, *operands)


def _ravel(tree: Any, size: int | None = None) -> jax.Array:
    """Concatenate all leaves of a tree to one vector, padded with zeros to ``size``."""
    vector = jnp.concatenate([jnp.zeros(0), *(jnp.ravel(leaf) for leaf in jax.tree.leaves(tree))])
    return vector if size is None else jnp.pad(vector, (0, size - vector.size))


def _unpack(vector: jax.Array, shapes: Any) -> Any:
    leaves, structure = jax.tree.flatten(shapes)
    stops = np.cumsum([leaf.size for leaf in leaves])
    parts = [vector[stop - leaf.size : stop].reshape(leaf.shape) for leaf, stop in zip(leaves, stops, strict=True)]
    return jax.tree.unflatten(structure, parts)
