"""Networks of different architectures behind the face of one: which of them a set of variables is, is data.

Clients of FedMe and pFedHR have different networks, and FedMe's change theirs while they train. Here the variables of
every network are vectors as long as the largest network's, with a number that says which one it is, and
`jax.lax.switch` picks the network inside the compiled step. So one program serves every assignment of networks to
clients, one that changes in every round included, and whatever trains or tests a `Model` takes a `Zoo` unchanged. With
one client at a time (one lane, the CPU's default) only the chosen network is computed; side by side, all of them are.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Layer, Model, Variables

EVEN = 256  # so that the devices of a pod share a vector evenly; otherwise each would hold all of every client's


@dataclasses.dataclass(frozen=True)
class Zoo(Model):
    """A networks for the same samples and classes.

    Their variables are ``{"params": {"vector": [P]}, "batch_stats": {"vector": [S]}, "architecture": []}``, P and S
    those of the largest network, rounded up to a multiple of `EVEN` and filled up with zeros; ``batch_stats`` is there
    if some network has BatchNorm.

    Attributes:
      members: the networks; ``module`` is the first one's.
    """

    members: tuple[Model, ...] = ()

    @classmethod
    def of(cls, models: Sequence[Model]) -> "Zoo":
        """Return the zoo of some networks.

        Raises:
          UserError: a network keeps numbers that are no floats.
        """
        for model in models:
            if any(not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(model.shapes())):
                raise UserError(f"{model.name} keeps numbers that are no floats; among several networks none may")
        first = models[0]
        name = ",".join(model.name for model in models)
        return cls(first.module, first.input_shape, first.input_dtype, name, tuple(models))

    def init(self, key: jax.Array, architecture: jax.Array | int = 0) -> Variables:
        """Return fresh variables of a network; consumes ``key``."""
        branches = [
            lambda key, number=number: self.pack(self.members[number].init(key), number) for number in self._numbers
        ]
        return _switch(architecture, branches, key)

    @property
    def networks(self) -> tuple[Model, ...]:
        """The networks."""
        return self.members

    def architecture(self, variables: Variables) -> jax.Array:
        """Return which network variables are of, int32; of stacked ones [R, ...] of each [R]."""
        return variables["architecture"]

    def pack(self, variables: Variables, architecture: int) -> Variables:
        """Return a network's own variables, as Flax has them, as those of the zoo."""
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
        """Return vectors without what fills them up, and without the number of the network."""
        sizes = self._sizes(architecture)
        return {name: {"vector": variables[name]["vector"][:size]} for name, size in sizes.items()}

    def _fill(self, variables: Variables, architecture: int) -> Variables:
        """Undo `_cut`."""
        filled = {}
        for name, size in self._sizes().items():
            vector = variables[name]["vector"] if name in variables else jnp.zeros(0)
            filled[name] = {"vector": jnp.pad(vector, (0, size - vector.size))}
        return filled | {"architecture": jnp.asarray(architecture, jnp.int32)}

    def unpack(self, variables: Variables, architecture: int) -> Variables:
        """Return the variables of network number ``architecture`` as Flax has them."""
        shapes = self.members[architecture].shapes()
        return {name: _unpack(variables[name]["vector"], shapes[name]) for name in shapes}

    def num_parameters(self) -> int:
        """Return the trainable numbers of the largest network."""
        return max(model.num_parameters() for model in self.members)

    def layers(self) -> tuple[Layer, ...]:
        """Return no layer: different networks have none in common."""
        return ()

    def features(self, variables: Variables, x: jax.Array) -> jax.Array:
        """Return the representation [B, F] in evaluation mode, F that of the widest network; zeros fill it up."""
        widths = self.feature_widths()

        def filled(number: int, network: Model, own: Variables, x: jax.Array) -> jax.Array:
            z = network.features(own, x).reshape(x.shape[0], -1)
            return jnp.pad(z, ((0, 0), (0, max(widths) - widths[number])))

        return self.switch(variables, filled, x)

    def head(self, variables: Variables, z: jax.Array) -> jax.Array:
        """Return the logits [B, C] of a representation [B, F] in evaluation mode; what fills it up is left out."""
        widths = self.feature_widths()
        return self.switch(variables, lambda number, network, own, z: network.head(own, z[:, : widths[number]]), z)

    def feature_widths(self) -> tuple[int, ...]:
        """Return the width of each network's representation [A]."""
        sample = jax.ShapeDtypeStruct((1, *self.input_shape), self.input_dtype)
        return tuple(
            math.prod(jax.eval_shape(model.features, model.shapes(), sample).shape[1:]) for model in self.members
        )

    def _apply(self, variables: Variables, x: jax.Array, *, mutable: Any = None, **options: Any) -> Any:
        def one(number: int, network: Model, own: Variables, x: jax.Array) -> Any:
            if mutable is None:
                return network._apply(own, x, **options)
            out, state = network._apply(own, x, mutable=[name for name in own if name != "params"], **options)
            new = {name: {"vector": _ravel(tree, variables[name]["vector"].size)} for name, tree in state.items()}
            return out, {name: new.get(name, variables[name]) for name in mutable}

        return self.switch(variables, one, x)

    def switch(self, variables: Variables, function: Callable, *operands: Any) -> Any:
        """Return ``function(number, network, own variables, *operands)`` for the network that the variables are of."""

        def branch(number: int) -> Callable:
            return lambda variables, *operands: function(
                number, self.members[number], self.unpack(variables, number), *operands
            )

        return _switch(variables["architecture"], [branch(number) for number in self._numbers], variables, *operands)

    def _sizes(self, architecture: int | None = None) -> dict[str, int]:
        """Return the numbers in each collection of a network, empty ones left out; without a network, P and S."""
        sizes: dict[str, int] = {}
        for model in self.members if architecture is None else (self.members[architecture],):
            for name, tree in model.shapes().items():
                sizes[name] = max(sizes.get(name, 0), sum(leaf.size for leaf in jax.tree.leaves(tree)))
        return sizes if architecture is not None else {name: -(-size // EVEN) * EVEN for name, size in sizes.items()}


def _switch(number: Any, branches: Sequence[Callable], *operands: Any) -> Any:
    if isinstance(number, int | np.integer):  # known while tracing
        return branches[int(number)](*operands)
    return jax.lax.switch(number, branches, *operands)


def _ravel(tree: Any, size: int | None = None) -> jax.Array:
    """Return all numbers of a tree as one vector, filled up with zeros to ``size``."""
    vector = jnp.concatenate([jnp.zeros(0), *(jnp.ravel(leaf) for leaf in jax.tree.leaves(tree))])
    return vector if size is None else jnp.pad(vector, (0, size - vector.size))


def _unpack(vector: jax.Array, shapes: Any) -> Any:
    leaves, structure = jax.tree.flatten(shapes)
    stops = np.cumsum([leaf.size for leaf in leaves])
    parts = [vector[stop - leaf.size : stop].reshape(leaf.shape) for leaf, stop in zip(leaves, stops, strict=True)]
    return jax.tree.unflatten(structure, parts)
