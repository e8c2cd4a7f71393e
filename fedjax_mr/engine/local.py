"""One client's training: local steps on the batches of its epochs, and the evaluation of a model."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_mr import trees
from fedjax_mr.models import platforms
from fedjax_mr.models.base import Model, Variables

Array = jax.Array | np.ndarray


@jax.tree_util.register_static
class Shape(tuple[int, ...]):
    """The shape of one sample, such as (32, 32, 3); no array of a compiled program's but a part of it."""


class Samples(NamedTuple):
    """All samples of the federation; a batch is gathered and normalised inside the compiled step.

    ``x * scale + shift`` is what a network sees, unless x holds tokens.
    """

    x: Array  # [M, ...], or as `in_rows` arranged them; uint8, float32 or int32 (tokens)
    y: Array  # [M] int32
    scale: Array  # [channels] or [1]
    shift: Array  # [channels] or [1]
    shape: Shape | None = None  # of one sample, where x holds its numbers as rows

    def in_rows(self) -> "Samples":
        """Return the same samples, the numbers of each image in rows of at most 128: x [M, rows, row].

        A TPU reads whole rows of 128. Of images as they are, [40000, 32, 32, 3], every program that takes some would
        first copy all into another order: 4 ms and 0.5 GB.
        """
        shape = Shape(self.x.shape[1:])
        if len(shape) != 3:
            return self
        size = math.prod(shape)
        row = max(number for number in range(1, 129) if size % number == 0)
        return self._replace(x=self.x.reshape(len(self.x), size // row, row), shape=shape)


class ClientData(NamedTuple):
    """One client's data: ``index[offset : offset + size]`` are its rows of ``samples``.

    The rows that it keeps for validation follow them in ``index``; see `validation`.
    """

    samples: Samples
    index: Array  # [sum of all sizes] int32
    offset: jax.Array  # scalar int32
    size: jax.Array  # scalar int32
    client_id: jax.Array  # scalar int32
    validation_size: jax.Array | int = 0  # scalar int32


class Batch(NamedTuple):
    """B samples; ``mask`` is 1 for true samples and 0 for the padding of a smaller last batch."""

    x: jax.Array  # [B, ...]
    y: jax.Array  # [B] int32
    mask: jax.Array  # [B] float32
    position: jax.Array | None = None  # [B] int32, which of the client's samples: 0..size-1


class Order(NamedTuple):
    """A client's samples in the order of one epoch, filled up with the last one to whole batches: P of them."""

    position: jax.Array  # [P] int32, which of the client's samples: 0..size-1
    row: jax.Array  # [P] int32, which of all samples
    y: jax.Array  # [P] int32


class Metrics(NamedTuple):
    """The report of one client's training; scalars."""

    loss: jax.Array  # sum over all samples trained, in nats
    images: jax.Array  # samples trained (epochs x size)
    steps: jax.Array  # optimiser steps
    bad_step: jax.Array  # first step whose loss was not finite, `steps` if the result is not finite; -1 if none


class Loss(Protocol):
    """The loss of one batch: (params, state, batch, key) -> (mean loss in nats, new state).

    ``state`` holds the collections that are not trained (BatchNorm statistics).
    """

    def __call__(self, params: Any, state: Any, batch: Batch, key: jax.Array, /) -> tuple[jax.Array, Any]: ...


class Gradient(Protocol):
    """How a step takes the gradient of a loss: loss -> ((params, state, batch, key) -> ((loss, state), gradient)).

    ``jax.value_and_grad(loss, has_aux=True)`` is of this form.
    """

    def __call__(self, loss: Loss, /) -> Callable[..., tuple[tuple[jax.Array, Variables], Any]]: ...


class LocalStep(NamedTuple):
    """What a client does with one batch, and what it carries from step to step; `sgd` is the usual one."""

    init: Callable[[Any], Any]
    """start -> carry, a tree of arrays whose shapes and types the steps keep"""
    step: Callable[[Any, Batch, jax.Array], tuple[Any, jax.Array]]
    """(carry, batch, key) -> (carry, mean loss of the batch in nats)"""
    result: Callable[[Any], Any]
    """carry -> what the client has trained"""


@dataclasses.dataclass(frozen=True)
class LocalSetting:
    """The setting of every client's training.

    Attributes:
      optimizer: optax transformation; its state starts anew in every round.
      epochs: E, passes over the client's samples.
      batch_size: B; the last batch of an epoch may hold fewer.
      max_size: the largest number of samples that any client has; the `Simulator` sets it.
      augment: (key, raw images [B, ...]) -> raw images, applied to every batch before normalisation; None: nothing.
      lr: the learning rate of plain or momentum SGD, for methods that reason about its steps; None: another optimiser.
      momentum: of SGD.
      gradient: how `sgd` takes the gradient of its loss; defaults to `jax.value_and_grad`. Replace it to turn any
        method that trains with `train` into a sharpness-aware one.
    """

    optimizer: optax.GradientTransformation
    epochs: int
    batch_size: int
    max_size: int = 0
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    lr: float | None = None
    momentum: float = 0.0
    gradient: Gradient | None = None

    def num_steps(self, size: jax.Array) -> jax.Array:
        """Return T = E ceil(size / B), the steps of a client with ``size`` samples, int32."""
        return self.epochs * ((size + self.batch_size - 1) // self.batch_size)


def setting(
    optimizer: str = "sgd",
    *,
    lr: float = 0.05,
    momentum: float = 0.5,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    epochs: int = 5,
    batch_size: int = 10,
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> LocalSetting:
    """The clients' training by a named optimizer; the defaults are those of `fmr.Config`.

    For any other optax optimizer, make a `LocalSetting`.

    Args:
      optimizer: ``sgd``, ``adam`` or ``adamw``; see `make_optimizer` for it and the next four.
      lr: learning rate.
      momentum: of ``sgd``.
      weight_decay: factor of the weights that is added to the gradient.
      clip_norm: largest L2 norm of a batch's gradient. Default: no limit.
      epochs: E, passes over the client's samples per round.
      batch_size: B, samples per step.
      augment: see `LocalSetting`.
    """
    chosen = make_optimizer(optimizer, lr=lr, momentum=momentum, weight_decay=weight_decay, clip_norm=clip_norm)
    known_lr = lr if optimizer == "sgd" else None
    return LocalSetting(chosen, epochs, batch_size, augment=augment, lr=known_lr, momentum=momentum)


@functools.lru_cache(maxsize=64, typed=True)  # equal settings, the same functions: so programs know each other again
def make_optimizer(
    name: str, *, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, clip_norm: float | None = None
) -> optax.GradientTransformation:
    """Return the optimiser ``sgd``, ``adam`` or ``adamw``.

    In PyTorch's order: the gradient is clipped to the global norm ``clip_norm``, then the weight decay is added to it
    (``adamw``: to the update instead), then momentum.
    """
    steps = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    if name == "adamw":
        return optax.chain(*steps, optax.adamw(lr, weight_decay=weight_decay))
    if weight_decay:
        steps.append(optax.add_decayed_weights(weight_decay))
    return optax.chain(*steps, optax.adam(lr) if name == "adam" else optax.sgd(lr, momentum or None))


def with_schedule(
    optimizer: optax.GradientTransformation, share: Callable[[jax.Array], jax.Array], *, steps: jax.Array
) -> optax.GradientTransformation:
    """Return an optimiser whose learning rate changes within a client's own round.

    Args:
      optimizer: its updates are multiplied; a momentum of it goes on as it is, as in PyTorch.
      share: (k / T, in 0..1) -> the factor of the learning rate in step k = 0..T-1.
      steps: T, the steps of this client; may be traced.
    """
    length = jnp.maximum(steps, 1).astype(jnp.float32)
    over = lambda step: jnp.asarray(step).astype(jnp.float32) / length
    return optax.chain(optimizer, optax.scale_by_schedule(lambda step: share(over(step))))


def gather(samples: Samples, rows: jax.Array, *, change: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
    """Return the input for sample ``rows`` [B]: pixels changed if wanted, then normalised; tokens as they are."""
    x = jnp.asarray(samples.x)[rows]
    if samples.shape is not None:
        x = x.reshape(x.shape[:-2] + samples.shape)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        return x
    x = x if change is None else change(x)
    channels = (1,) * (x.ndim - 1) + samples.scale.shape
    return x.astype(jnp.float32) * samples.scale.reshape(channels) + samples.shift.reshape(channels)


def shuffle(key: jax.Array, size: jax.Array, max_size: int) -> jax.Array:
    """Return a random permutation of 0..size-1, filled up to [max_size] with the numbers from ``size`` on.

    ``size`` may be traced, so clients of all sizes share one compiled program; consumes ``key``.
    """
    position = jnp.arange(max_size, dtype=jnp.int32)
    draw = jax.random.uniform(key, (max_size,))
    return jnp.argsort(jnp.where(position < size, draw, 2.0 + position.astype(jnp.float32)))


def cross_entropy(model: Model) -> Loss:
    """Return the mean cross-entropy of a batch's true samples."""

    def loss(params: Any, state: Variables, batch: Batch, key: jax.Array) -> tuple[jax.Array, Variables]:
        logits, state = model.train_apply(params, state, batch.x, mask=batch.mask, key=key)
        return masked_mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch.y), batch.mask), state

    return loss


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the mean of values [B] where mask [B] is 1; 0 if it is nowhere 1."""
    return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def sgd(
    loss: Loss,
    setting: LocalSetting,
    *,
    optimizer: optax.GradientTransformation | None = None,
    gradient: Gradient | None = None,
) -> LocalStep:
    """Mini-batch SGD: a step of an optimiser along the gradient of a loss, from variables to variables.

    Args:
      loss: the loss of one batch.
      setting: its optimiser and gradient are the defaults of the other two.
      optimizer: starts anew in every round (SCAFFOLD puts its correction of the gradient in front of the setting's).
      gradient: how the gradient is taken (sharpness-aware methods).
    """
    optimizer, gradient = optimizer or setting.optimizer, gradient or setting.gradient
    value_and_grad = gradient(loss) if gradient else jax.value_and_grad(loss, has_aux=True)

    def init(variables: Variables) -> tuple:
        params, state = trained_and_state(variables)
        return params, state, optimizer.init(params)

    def step(carry: tuple, batch: Batch, key: jax.Array) -> tuple[tuple, jax.Array]:
        params, state, optimizer_state = carry
        (value, state), gradients = value_and_grad(params, state, batch, key)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), state, optimizer_state), value

    def result(carry: tuple) -> Variables:
        params, state, _ = carry
        return {"params": params, **state}

    return LocalStep(init, step, result)


def trained_and_state(variables: Variables) -> tuple[Any, Variables]:
    """Split variables into ``params``, which are trained, and the other collections, the state of a loss."""
    return variables["params"], {name: value for name, value in variables.items() if name != "params"}


def train(
    model: Model,
    setting: LocalSetting,
    variables: Variables,
    data: ClientData,
    key: jax.Array,
    *,
    loss: Loss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    gradient: Gradient | None = None,
) -> tuple[Variables, Metrics]:
    """Train one client by `sgd`: E epochs over its shuffled rows, the optimiser started anew; consumes ``key``.

    Args:
      model: the network; with a `Zoo` the client's own one trains.
      setting: epochs, batch size, optimiser.
      variables: where training starts.
      data: the client's data.
      key: the client's key of this round.
      loss: the loss of one batch (default: `cross_entropy`).
      optimizer: in place of the setting's.
      gradient: in place of the setting's.

    Returns:
      The trained variables and the metrics.
    """

    def training(loss: Loss, variables: Variables) -> tuple[Variables, Metrics]:
        return run(sgd(loss, setting, optimizer=optimizer, gradient=gradient), setting, variables, data, key)

    return model.train_compact(variables, loss or cross_entropy(model), training)


def run(
    local_step: LocalStep, setting: LocalSetting, start: Any, data: ClientData, key: jax.Array
) -> tuple[Any, Metrics]:
    """Take a local step on every batch of a client's E epochs, whatever it trains; consumes ``key``.

    The number of steps is a traced bound, T = E ceil(size / B): one program serves clients of all sizes, and a client
    of size 0 does no step.

    Args:
      local_step: what happens in a step.
      setting: epochs and batch size.
      start: where the steps start.
      data: the client's data.
      key: the client's key of this round.

    Returns:
      What the steps have trained, and the metrics.
    """
    steps_per_epoch = (data.size + setting.batch_size - 1) // setting.batch_size

    def epoch(number: jax.Array, carry: tuple) -> tuple:
        order = _in_order(setting, data, jax.random.fold_in(key, 2 * number))
        step_key = jax.random.fold_in(key, 2 * number + 1)

        @jax.named_scope("local_step")  # by which a reader of the compiled program finds it
        def step(number_in_epoch: jax.Array, carry: tuple) -> tuple:
            inner, metrics = carry
            key = jax.random.fold_in(step_key, number_in_epoch)
            batch = _batch(setting, data, order, number_in_epoch, key)
            inner, value = local_step.step(inner, batch, key)
            return inner, _count(metrics, value, batch.mask)

        return jax.lax.fori_loop(0, steps_per_epoch, step, carry)

    zero = jnp.zeros((), jnp.int32)
    metrics = Metrics(jnp.zeros(()), zero, zero, zero - 1)
    carry, metrics = jax.lax.fori_loop(0, setting.epochs, epoch, (local_step.init(start), metrics))

    trained = local_step.result(carry)
    broken = (metrics.bad_step < 0) & ~trees.all_finite(trained)
    return trained, metrics._replace(bad_step=jnp.where(broken, metrics.steps, metrics.bad_step))


def draw(setting: LocalSetting, data: ClientData, key: jax.Array) -> Batch:
    """Return a batch of a client's training samples, drawn without replacement; consumes ``key``."""
    return _batch(setting, data, _in_order(setting, data, jax.random.fold_in(key, 0)), 0, key)


def _in_order(setting: LocalSetting, data: ClientData, key: jax.Array) -> Order:
    """Return a client's samples in random order, filled up to whole batches; consumes ``key``.

    All that an epoch can look up at once is looked up here: a step takes its run of it, and gathers images alone. On a
    TPU every lookup of 50 numbers in a step would cost as much as a small convolution.
    """
    order = shuffle(key, data.size, setting.max_size)
    length = -(-setting.max_size // setting.batch_size) * setting.batch_size
    position = order[jnp.minimum(jnp.arange(length, dtype=jnp.int32), data.size - 1)]
    row = jnp.asarray(data.index)[data.offset + position]
    return Order(position, row, jnp.asarray(data.samples.y)[row])


def _batch(setting: LocalSetting, data: ClientData, order: Order, number: jax.Array | int, key: jax.Array) -> Batch:
    """Return batch ``number`` of a client's samples in an order."""
    start = number * setting.batch_size
    mine = jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, start, setting.batch_size), order)
    mask = (start + jnp.arange(setting.batch_size, dtype=jnp.int32) < data.size).astype(jnp.float32)
    change = None if setting.augment is None else functools.partial(setting.augment, jax.random.fold_in(key, 1))
    return Batch(gather(data.samples, mine.row, change=change), mine.y, mask, mine.position)


def _count(metrics: Metrics, loss: jax.Array, mask: jax.Array) -> Metrics:
    first_bad = (metrics.bad_step < 0) & ~jnp.isfinite(loss)
    samples = jnp.sum(mask)
    return Metrics(
        loss=metrics.loss + loss * samples,
        images=metrics.images + samples.astype(jnp.int32),
        steps=metrics.steps + 1,
        bad_step=jnp.where(first_bad, metrics.steps, metrics.bad_step),
    )


class Score(NamedTuple):
    """Sums over test samples; scalars or one row per device."""

    correct: jax.Array  # samples whose largest logit is the label's
    loss: jax.Array  # summed cross-entropy in nats
    count: jax.Array  # samples


def evaluation_batch() -> int:
    """Return how many samples pass through a network at a time when it is only applied.

    On CPUs few enough for their activations to stay in the cache: with 256 LeNet-5 and ResNet-20 take 1.6 and 1.7 times
    as long for an image, pFedHR's M3 2.4 times.
    """
    return 64 if platforms.current() == "cpu" else 256


def evaluate(model: Model, variables: Variables, samples: Samples, mask: jax.Array, *, batch_size: int) -> Score:
    """Return the sums over the test samples [M] where mask [M] is 1; M is a multiple of ``batch_size``."""

    def step(total: Score, rows: jax.Array) -> tuple[Score, None]:
        return trees.add(total, score_batch(model, variables, samples, rows, mask[rows])), None

    rows = jnp.arange(samples.y.shape[0], dtype=jnp.int32).reshape(-1, batch_size)
    start = Score(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))
    return jax.lax.scan(step, start, rows)[0]


def validation(data: ClientData) -> ClientData:
    """Return a client's validation rows as data of their own; the training rows of a client that keeps none."""
    some = jnp.asarray(data.validation_size) > 0
    return data._replace(
        offset=jnp.where(some, data.offset + data.size, data.offset),
        size=jnp.where(some, data.validation_size, data.size),
        validation_size=jnp.zeros((), jnp.int32),
    )


def one_client(
    samples: Samples,
    *,
    client_id: Array | int = 0,
    size: Array | int | None = None,
    validation_size: Array | int = 0,
) -> ClientData:
    """Samples that all belong to one client, such as the server's public set.

    Args:
      samples: M of them, the training samples first, then those for validation.
      client_id: its number.
      size: training samples. Default: all M.
      validation_size: samples for validation.
    """
    count = samples.y.shape[0]
    number = lambda value: jnp.asarray(value, jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    size = count if size is None else size
    return ClientData(samples, index, number(0), number(size), number(client_id), number(validation_size))


def score(model: Model, variables: Variables, data: ClientData, *, batch_size: int) -> Score:
    """Return the sums over a client's rows; their number is a traced bound, so clients of all sizes share a program."""

    def step(number: jax.Array, total: Score) -> Score:
        position = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        rows = data.index[data.offset + jnp.minimum(position, data.size - 1)]
        return trees.add(total, score_batch(model, variables, data.samples, rows, position < data.size))

    start = Score(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))
    return jax.lax.fori_loop(0, (data.size + batch_size - 1) // batch_size, step, start)


def held_out_loss(model: Model, variables: Variables, data: ClientData, *, batch_size: int) -> jax.Array:
    """Return the mean cross-entropy on a client's validation rows, on its training rows if it keeps none, in nats."""
    total = score(model, variables, validation(data), batch_size=batch_size)
    return total.loss / jnp.maximum(total.count, 1.0)


def outputs(model: Model, variables: Variables, samples: Samples, rows: Array) -> jax.Array:
    """Return the logits [R, C] of the sample ``rows`` [R], in evaluation mode."""
    count = rows.shape[0]
    size = min(evaluation_batch(), count)
    batches = jnp.resize(rows, (-(-count // size), size))  # the last one is filled up
    logits = jax.lax.map(lambda rows: model.apply(variables, gather(samples, rows)), batches)
    return logits.reshape(-1, logits.shape[-1])[:count]


def score_batch(model: Model, variables: Variables, samples: Samples, rows: jax.Array, mask: jax.Array) -> Score:
    """Return the sums over the sample ``rows`` [B] where ``mask`` [B] is 1."""
    logits = model.apply(variables, gather(samples, rows))
    labels, true = jnp.asarray(samples.y)[rows], mask.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    return Score(jnp.sum(correct * true), jnp.sum(losses * true), jnp.sum(true))
