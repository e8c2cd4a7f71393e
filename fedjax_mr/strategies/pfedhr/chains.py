"""A network as a chain of pieces, which is applied and trained piece by piece.

Candidates differ from round to round, so programs for whole candidates would be compiled in every round. Here a program
belongs to a piece (a block of a client's network, or a stitch). All chains with equal pieces share its forward program
and its backward program, which includes the optimizer step. So the number of compilations is bounded by the number of
different pieces. Chains are immutable: training returns a new chain.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples, gather
from fedjax_mr.errors import UserError
from fedjax_mr.models import calls
from fedjax_mr.models.base import BlockNet, Model, Variables
from fedjax_mr.tasks import Task


@dataclasses.dataclass(frozen=True)
class Piece:
    """A module with its variables.

    Attributes:
      module: called as ``module(x, train=..., mask=...)``; equal modules share their compiled programs.
      variables: its Flax collections.
      inherited: whether it comes from a client; False for a stitch.
    """

    module: nn.Module
    variables: Variables
    inherited: bool = True


Chain = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a client's network.

    Attributes:
      owner: the client.
      index: position in the network, from 0.
      kind: operation, ``conv`` (contains a convolution), ``fc`` (only dense layers) or "" (no tensors).
      takes: shape of one input sample.
      returns: shape of one output sample.
      piece: module and variables.
    """

    owner: int
    index: int
    kind: str
    takes: tuple[int, ...]
    returns: tuple[int, ...]
    piece: Piece


def decompose(model: Model, variables: Variables, *, owner: int = 0) -> tuple[Block, ...]:
    """Decompose a network into its blocks, in forward order. Variables are shared, not copied.

    Raises:
      UserError: as `require_blocks`.
    """
    require_blocks(model)
    bound = calls.bound(model.module, variables)
    shape, blocks = model.input_shape, []
    for index, name in enumerate(bound.block_names):
        module, block_variables = getattr(bound, name).unbind()
        piece = Piece(module.clone(name=None, parent=None), dict(block_variables))
        returns = output_shape(piece, shape)
        blocks.append(Block(owner, index, _kind(piece), tuple(shape), returns, piece))
        shape = returns
    return tuple(blocks)


def require_blocks(model: Model) -> None:
    """Check that a network can be decomposed.

    Raises:
      UserError: its class is not a `BlockNet`, or its input is neither images nor vectors.
    """
    if not isinstance(model.module, BlockNet):
        raise UserError(
            f"{model.name} cannot be decomposed into blocks: derive its class from fedjax_mr.BlockNet, whose blocks() "
            "returns the named blocks in forward order, with the head as the last one"
        )
    if model.frozen:
        raise UserError(f"{model.name} cannot be decomposed into blocks: it has frozen variables; leave out trainable=")
    if jnp.issubdtype(model.input_dtype, jnp.integer):
        raise UserError(f"{model.name} cannot be decomposed into blocks: its input must be images or vectors")


def _kind(piece: Piece) -> str:
    axes = [leaf.ndim for leaf in jax.tree.leaves(piece.variables.get("params", {}))]
    return "" if not axes else "conv" if max(axes) == 4 else "fc"


def output_shape(piece: Piece, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of one output sample of a piece, by abstract evaluation."""
    x = jax.ShapeDtypeStruct((1, *shape), np.float32)
    apply = lambda variables, x: piece.module.apply(variables, x, train=False, mask=None)
    return tuple(jax.eval_shape(apply, piece.variables, x).shape[1:])


def num_parameters(chain: Chain) -> int:
    """The number of trainable parameters of a chain."""
    return sum(leaf.size for piece in chain for leaf in jax.tree.leaves(piece.variables.get("params", {})))


Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(outputs [B, C], targets [B, ...], mask [B]) -> mean loss; the mask is 1 for true samples, 0 for padding."""


@functools.cache  # the same function in every round, because it is a key of compiled programs
def supervised(task: Task) -> Loss:
    """The mean loss of the task over the true samples, such as the cross-entropy."""
    return lambda outputs, targets, mask: local.masked_mean(task.objective(outputs, targets, mask), mask)


Views = Callable[[jax.Array, jax.Array], jax.Array]
"""(key, raw samples [B, ...]) -> a random view of each, as raw samples."""


class PiecePrograms:
    """Compiled programs of pieces, cached over the rounds of a run.

    Attributes:
      traces: number of programs compiled so far.
    """

    def __init__(self, *, lr: float = 1e-3) -> None:
        """Start with an empty cache; a program is compiled when it is first needed."""
        self.traces = 0
        self._adam = optax.adam(lr)
        self._apply = self._compiled(_apply, "module")
        self._forward = self._compiled(_forward, "module")
        self._pull = self._compiled(lambda pullback, gradient: pullback(gradient))
        self._step = self._compiled(self._pull_and_step, "propagate")
        self._batch = self._compiled(_batch, "views")
        self._loss_gradient = self._compiled(_loss_gradient, "loss")
        self._init = self._compiled(_init, "module", "shape")

    def init(self, module: nn.Module, shape: Sequence[int], key: jax.Array) -> Piece:
        """Initialise a piece for samples of ``shape``; consumes ``key``."""
        return Piece(module, self._init(module, tuple(shape), key), inherited=False)

    def activations(self, chain: Chain, samples: Samples) -> list[jax.Array]:
        """The input of the first piece of a chain and the outputs of all pieces, for all samples: [P, ...] each."""
        x, _, _ = self._batch(samples, np.arange(len(samples.x), dtype=np.int32), None, None)
        results = [x]
        for piece in chain:
            results.append(self._apply(piece.module, piece.variables, results[-1]))
        return results

    def logits(self, chain: Chain, samples: Samples, rows: np.ndarray | None = None) -> np.ndarray:
        """The logits [P, C] of the samples ``rows`` in evaluation mode. Default: all samples."""
        rows = np.arange(len(samples.x), dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
        size = min(local.evaluation_batch(), len(rows))
        batches = []
        for start in range(0, len(rows), size):
            batch = np.resize(rows[start : start + size], size)  # pads the last batch, so that one program serves all
            x, _, _ = self._batch(samples, batch, None, None)
            for piece in chain:
                x = self._apply(piece.module, piece.variables, x)
            batches.append(np.asarray(x))
        return np.concatenate(batches)[: len(rows)]

    def train(
        self,
        chain: Chain,
        samples: Samples,
        key: jax.Array,
        *,
        epochs: int,
        batch_size: int,
        loss: Loss,
        views: Views | None = None,
        stitches_only: bool = False,
    ) -> Chain:
        """Train a chain with Adam on shuffled samples; consumes ``key``.

        Args:
          chain: the chain to train.
          samples: the training samples, with labels if the loss needs them.
          key: randomness of the order, of dropout and of the views.
          epochs: passes over the samples.
          batch_size: samples per step; the last step of an epoch may have fewer.
          loss: loss of a batch.
          views: if set, a batch has two random views of each sample: first one view of all, then the other [2B, ...].
          stitches_only: whether inherited pieces are frozen, including their BatchNorm statistics.
        """
        count = len(samples.x)
        batch_size = min(batch_size, count)
        modules = [piece.module for piece in chain]
        trained = [not (stitches_only and piece.inherited) and "params" in piece.variables for piece in chain]
        params = [piece.variables.get("params", {}) for piece in chain]
        states = [{name: each for name, each in piece.variables.items() if name != "params"} for piece in chain]
        moments = [self._adam.init(own) if learns else None for own, learns in zip(params, trained, strict=True)]
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        dropout_key, views_key = jax.random.split(key)
        starts = [start for _ in range(epochs) for start in range(0, count, batch_size)]
        order = np.concatenate([rng.permutation(count) for _ in range(epochs)] or [np.zeros(0)]).astype(np.int32)
        for number, start in enumerate(starts):
            skipped = number // (-(-count // batch_size)) * count  # samples of the previous epochs
            rows = order[skipped + start : skipped + min(start + batch_size, count)]
            mask = (np.arange(batch_size) < len(rows)).astype(np.float32)
            x, labels, mask = self._batch(
                samples, np.resize(rows, batch_size), (views_key, np.int32(number)), views, mask
            )
            pullbacks = []
            for place, module in enumerate(modules):
                learns = trained[place]
                dropout = (dropout_key, np.int32(number), np.int32(place)) if learns else None
                x, state, pullback = self._forward(module, params[place], states[place], x, mask, dropout)
                states[place] = state if learns else states[place]
                pullbacks.append(pullback)
            gradient = self._loss_gradient(loss, x, labels, mask)
            first = trained.index(True)
            for place in reversed(range(first, len(chain))):
                if trained[place]:
                    results = self._step(pullbacks[place], gradient, params[place], moments[place], place > first)
                    gradient, params[place], moments[place] = results
                else:
                    _, gradient = self._pull(pullbacks[place], gradient)
        return tuple(
            dataclasses.replace(piece, variables={"params": own, **state} if own else piece.variables)
            for piece, own, state in zip(chain, params, states, strict=True)
        )

    def _pull_and_step(
        self, pullback: Any, output_gradient: jax.Array, params: Any, moments: Any, propagate: bool
    ) -> tuple:
        """The gradient of the piece's input (None unless ``propagate``), its new parameters and its new moments."""
        gradient, input_gradient = pullback(output_gradient)
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises floats to integer powers
            updates, moments = self._adam.update(gradient, moments, params)
        return input_gradient if propagate else None, optax.apply_updates(params, updates), moments

    def _compiled(self, function: Callable, *static: str) -> Callable:
        @functools.wraps(function)
        def traced(*args: Any) -> Any:
            self.traces += 1
            return function(*args)

        return jax.jit(traced, static_argnames=static)


def _init(module: nn.Module, shape: tuple[int, ...], key: jax.Array) -> Variables:
    return dict(module.init(key, jnp.zeros((1, *shape)), train=False, mask=None))


def _apply(module: nn.Module, variables: Variables, x: jax.Array) -> Any:
    return module.apply(variables, x, train=False, mask=None)


def _forward(
    module: nn.Module, params: Any, state: Variables, x: jax.Array, mask: jax.Array, dropout: Any
) -> tuple[jax.Array, Variables, Callable]:
    """The output, the new state and the pullback to (params, x). Without dropout keys, in evaluation mode."""

    def apply(params: Any, x: jax.Array) -> Any:
        if dropout is None:
            return module.apply({"params": params, **state}, x, train=False, mask=None), state
        key = functools.reduce(jax.random.fold_in, dropout)
        return module.apply(
            {"params": params, **state}, x, train=True, mask=mask, mutable=list(state), rngs={"dropout": key}
        )

    y, pullback, state = jax.vjp(apply, params, x, has_aux=True)
    return y, state, pullback


def _batch(
    samples: Samples, rows: jax.Array, key: Any, views: Views | None, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    labels = rows if samples.y is None else jnp.asarray(samples.y)[rows]
    if views is None:
        return gather(samples, rows), labels, mask
    one, other = jax.random.split(functools.reduce(jax.random.fold_in, key))
    x = [gather(samples, rows, change=functools.partial(views, each)) for each in (one, other)]
    return jnp.concatenate(x), jnp.tile(labels, 2), None if mask is None else jnp.tile(mask, 2)


def _loss_gradient(loss: Loss, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.grad(loss)(logits, labels, mask)
