"""Training of one client by local steps on the batches of its epochs, and the test of a model on samples."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import optimizers
from fedjax_mr.client.optimizers import OPTIMIZERS, make_optimizer
from fedjax_mr.client.samples import Array, ClientData, Samples, are_tokens, gather, normalised, raw, validation
from fedjax_mr.client.training import Training
from fedjax_mr.errors import UserError
from fedjax_mr.models import platforms
from fedjax_mr.models.base import Model, Variables
from fedjax_mr.settings import check
from fedjax_mr.tasks import Task


class Mixture(NamedTuple):
    """The targets of a batch in which another of its samples is mixed into each sample."""

    y: jax.Array  # [B, ...] targets of the samples themselves
    position: jax.Array | None  # [B] int32, their position among the client's samples
    other: jax.Array  # [B] int32, position in the batch of the sample that is mixed into each
    share: jax.Array  # [B] float32, share of each sample itself in 0..1


class Batch(NamedTuple):
    """B samples. ``mask`` is 1 for samples and 0 for the padding of a smaller last batch.

    With ``mixture``, ``x`` is mixed, and ``y`` and ``position`` are None, so that no loss forgets a half: see `mixed`.
    """

    x: jax.Array  # [B, ...]
    y: jax.Array  # [B, ...] targets, [B] int32 for a class per sample
    mask: jax.Array  # [B] float32
    position: jax.Array | None = None  # [B] int32, position among the client's samples: 0..size-1
    mixture: Mixture | None = None


class Order(NamedTuple):
    """The P positions of one epoch in random order, padded with the last one to complete batches."""

    position: jax.Array  # [P] int32, position among the client's samples: 0..size-1
    row: jax.Array  # [P] int32, row of all samples
    y: jax.Array | None  # [P]; None if a target is more than a number, and is looked up in its step


class Metrics(NamedTuple):
    """The report of the training of one client; scalars."""

    loss: jax.Array  # sum of the loss over all training samples, in nats
    images: jax.Array  # training samples processed (epochs x size, if the client trains in epochs)
    steps: jax.Array  # optimizer steps
    bad_step: jax.Array  # first step with a non-finite loss; `steps` if only the result is not finite; -1 if none
    # Further scalars by name, reported as means over the cohort.
    info: dict[str, jax.Array] = {}  # noqa: RUF012  # never changed in place, and JAX's trees need a dict


class Loss(Protocol):
    """The loss of one batch: (params, state, batch, key) -> (mean loss in nats, new state).

    ``state`` holds the collections that are not trained (BatchNorm statistics).
    """

    def __call__(self, params: Any, state: Any, batch: Batch, key: jax.Array, /) -> tuple[jax.Array, Any]: ...


class Gradient(Protocol):
    """The gradient of a loss: loss -> ((params, state, batch, key) -> ((loss, state), gradient)).

    ``jax.value_and_grad(loss, has_aux=True)`` has this form.
    """

    def __call__(self, loss: Loss, /) -> Callable[..., tuple[tuple[jax.Array, Variables], Any]]: ...


class LocalStep(NamedTuple):
    """The computation of a client on one batch, and the carry between two steps. The most common one is `sgd`."""

    init: Callable[[Any], Any]
    """start -> carry, a tree of arrays with constant shapes and dtypes"""
    step: Callable[[Any, Batch, jax.Array], tuple[Any, jax.Array]]
    """(carry, batch, key) -> (carry, mean loss of the batch in nats)"""
    result: Callable[[Any], Any]
    """carry -> the trained variables"""


Change = Callable[[jax.Array, jax.Array], jax.Array]
"""A function (key, raw images [B, ...]) -> raw images of the same shape."""
Mix = Callable[[jax.Array, jax.Array], jax.Array]
"""A function (key, raw samples x [B, ...]) -> how much of x is kept where another sample of the batch is mixed into it.

The result broadcasts to x, for images [B, H, W, 1] or [1, H, W, 1]. Truth values cut out pixels. Numbers in 0..1 blend.
"""

STATIC = {"static": True}  # metadata of the fields of a pytree that are part of the program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalSetting:
    """The settings of the clients' training.

    This dataclass is a pytree. Its numbers are arguments of the compiled programs; the other fields are static.

    Attributes:
      rule: a name of `OPTIMIZERS`, or any optax transformation, which ignores the four numbers below. Its state is
        initialised in every round.
      epochs: number of epochs E per round.
      batch_size: samples per step B. The last batch of an epoch may have fewer.
      max_size: upper bound of the number of samples of a client; set by the `Simulator`.
      steps: number of steps S per round of each client that has samples, in place of E epochs. Batches come from
        epochs in new random orders, of which the last may end early. None: E epochs.
      augment: changes the images of every batch before normalisation, see `Change`. Default: no augmentation.
      mix: mixes the samples of every batch after ``augment``, and their losses by the same shares, see `Mix`. Default:
        samples are not mixed.
      gradient: gradient of the loss in `sgd`. Default: `jax.value_and_grad`. Replace it to turn any method that trains
        with `train` into a sharpness-aware one.
      lr: learning rate.
      momentum: momentum of ``sgd`` and ``nesterov``. None: without.
      weight_decay: weight decay. None: without.
      clip_norm: largest L2 norm of the gradient of a batch. None: no limit.
      schedule: round (float32, from 0) -> factor of ``lr``, see `client.schedules`. A pytree. None: constant.
    """

    rule: str | optax.GradientTransformation = dataclasses.field(metadata=STATIC)
    epochs: int = dataclasses.field(metadata=STATIC)
    batch_size: int = dataclasses.field(metadata=STATIC)
    max_size: int = dataclasses.field(default=0, metadata=STATIC)
    steps: int | None = dataclasses.field(default=None, metadata=STATIC)
    augment: Change | None = dataclasses.field(default=None, metadata=STATIC)
    mix: Mix | None = dataclasses.field(default=None, metadata=STATIC)
    gradient: Gradient | None = dataclasses.field(default=None, metadata=STATIC)
    lr: Any = None
    momentum: Any = None
    weight_decay: Any = None
    clip_norm: Any = None
    schedule: Any = None

    def in_round(self, round: jax.Array | int) -> "LocalSetting":
        """The settings of one round, whose learning rate does not change any more.

        Raises:
          UserError: ``rule`` is an optax transformation, which has its own learning rate.
        """
        if self.schedule is None:
            return self
        if not isinstance(self.rule, str):
            raise UserError(f"schedule= needs one of the optimizers {', '.join(OPTIMIZERS)}, by name")
        factor = self.schedule(jnp.asarray(round).astype(jnp.float32))
        return dataclasses.replace(self, lr=self.lr * factor, schedule=None)

    @property
    def sgd_lr(self) -> Any:
        """Learning rate of ``sgd``, for strategies whose formulas contain it. None with other optimizers."""
        return self.lr if self.rule == "sgd" else None

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the clients. It contains the numbers, so it must not leave a traced function."""
        if not isinstance(self.rule, str):
            return self.rule
        return make_optimizer(
            self.rule,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
        )

    def num_steps(self, size: Any, work: jax.Array | None = None) -> jax.Array:
        """Number of steps of a client with ``size`` samples, int32: T = E ceil(size / B), or S (0 without samples).

        With ``work``, the number that it does if it stops after this share of them.
        """
        if self.steps is None:
            steps = self.epochs * ((size + self.batch_size - 1) // self.batch_size)
        else:
            steps = self.steps * (size > 0).astype(size.dtype)
        return steps if work is None else jnp.round(work * steps.astype(jnp.float32)).astype(jnp.int32)

    @property
    def most_epochs(self) -> int:
        """An upper bound of the epochs that a client begins in a round."""
        return self.epochs if self.steps is None else self.steps

    def in_epochs(self, epochs: Any) -> "LocalSetting":
        """The settings of a training of ``epochs`` epochs, which may be traced, whatever the steps per round are."""
        return dataclasses.replace(self, epochs=epochs, steps=None)


def setting(
    optimizer: str = Training.optimizer,
    *,
    lr: float = Training.lr,
    momentum: float = Training.momentum,
    weight_decay: float = Training.weight_decay,
    clip_norm: float | None = Training.clip_norm,
    epochs: int = Training.local_epochs,
    steps: int | None = Training.local_steps,
    batch_size: int = Training.batch_size,
    augment: Change | None = None,
    mix: Mix | None = None,
    schedule: Callable[[jax.Array], jax.Array] | None = None,
) -> LocalSetting:
    """The settings of the clients' training with a named optimizer. The defaults are those of `fmr.Config`.

    For an optax optimizer without a name, create a `LocalSetting`, or add a row to `OPTIMIZERS`.

    Args:
      optimizer: a name of `OPTIMIZERS`.
      lr: learning rate.
      momentum: momentum of ``sgd`` and ``nesterov``. With 0, the compiled programs have none. Optimizers without
        momentum ignore the default.
      weight_decay: weight decay, added to the gradient as ``weight_decay * weights``, or decoupled from it (``adamw``,
        ``lion``, ``muon``, ``prodigy``). With 0, the programs have none.
      clip_norm: largest L2 norm of the gradient of a batch. Default: no limit.
      epochs: number of epochs E per round.
      steps: number of steps S per round, in place of epochs, whatever the sizes of the clients are. Default: epochs.
      batch_size: samples per step B.
      augment: see `LocalSetting`.
      mix: see `LocalSetting`.
      schedule: factor of the learning rate by the number of the round, from 0: a function such as optax's schedules
        (``optax.cosine_decay_schedule(1.0, 300)``). Default: the learning rate is constant.

    Raises:
      UserError: the optimizer is unknown, a number is out of range, or the optimizer does not have it.
    """
    training = Training(
        local_epochs=epochs,
        local_steps=steps,
        batch_size=batch_size,
        optimizer=optimizer,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
    )
    return of_training(training, augment=augment, mix=mix, schedule=schedule)


def of_training(
    training: Training,
    *,
    augment: Change | None = None,
    mix: Mix | None = None,
    schedule: Callable[[jax.Array], jax.Array] | None = None,
) -> LocalSetting:
    """As `setting`, from the dataclass of a configuration, whose names of augmentations and schedules are not read."""
    check(training, "")
    optimizers.check(training.optimizer, momentum=training.momentum, weight_decay=training.weight_decay)
    if schedule is not None and not isinstance(schedule, jax.tree_util.Partial):  # a pytree whose leaves are numbers
        schedule = jax.tree_util.Partial(schedule)
    return LocalSetting(
        training.optimizer,
        training.local_epochs,
        training.batch_size,
        steps=training.local_steps,
        augment=augment,
        mix=mix,
        lr=training.lr,
        momentum=training.momentum if optimizers.has(training.optimizer, "momentum") and training.momentum else None,
        weight_decay=training.weight_decay or None,
        clip_norm=training.clip_norm,
        schedule=schedule,
    )


def with_schedule(
    optimizer: optax.GradientTransformation, share: Callable[[jax.Array], jax.Array], *, steps: jax.Array
) -> optax.GradientTransformation:
    """Change the learning rate of an optimizer during the round of one client.

    Args:
      optimizer: the optimizer. Its updates are multiplied; its momentum is not changed, as in PyTorch.
      share: (k / T, in 0..1) -> factor of the learning rate in step k = 0..T-1.
      steps: number of steps T of this client; may be traced.
    """
    length = jnp.maximum(steps, 1).astype(jnp.float32)
    over = lambda step: jnp.asarray(step).astype(jnp.float32) / length
    return optax.chain(optimizer, optax.scale_by_schedule(lambda step: share(over(step))))


def shuffle(key: jax.Array, size: jax.Array, max_size: int) -> jax.Array:
    """A random permutation of 0..size-1, followed by size..max_size-1: [max_size]. Consumes ``key``.

    ``size`` may be traced, so clients of all sizes share one compiled program.
    """
    position = jnp.arange(max_size, dtype=jnp.int32)
    draw = jax.random.uniform(key, (max_size,))
    return jnp.argsort(jnp.where(position < size, draw, 2.0 + position.astype(jnp.float32)))


def supervised(model: Model) -> Loss:
    """The loss of the task, such as the cross-entropy: its mean over the samples of a batch."""

    def loss(params: Any, state: Variables, batch: Batch, key: jax.Array) -> tuple[jax.Array, Variables]:
        outputs, state = model.train_apply(params, state, batch.x, mask=batch.mask, key=key)
        return task_loss(model, outputs, batch), state

    return loss


def task_loss(model: Model, outputs: jax.Array, batch: Batch) -> jax.Array:
    """The mean loss of the task over the samples of a batch, for outputs [B, ...] of the network in training."""
    return masked_mean(task_losses(model, outputs, batch), batch.mask)


def task_losses(model: Model, outputs: jax.Array, batch: Batch) -> jax.Array:
    """The loss of the task of each sample [B], for outputs [B, ...] of the network in training."""
    return mixed(batch, lambda each: model.task.objective(outputs, each.y, each.mask))


def mixed(batch: Batch, losses: Callable[[Batch], jax.Array]) -> jax.Array:
    """The losses [B] of a batch that may be mixed: those of its own targets and of the others', by their shares.

    The cross-entropy of a mixed target has the same value. A squared error has the same gradient.

    Args:
      batch: the batch.
      losses: batch -> the loss of each sample [B], a function of ``y`` and ``position``.
    """
    if batch.mixture is None:
        return losses(batch)
    y, position, other, share = batch.mixture
    of = lambda y, position: losses(batch._replace(y=y, position=position, mixture=None))
    return share * of(y, position) + (1 - share) * of(y[other], None if position is None else position[other])


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of values [B] where mask [B] is 1, or 0 if the mask is empty."""
    return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def sgd(
    loss: Loss,
    setting: LocalSetting,
    *,
    optimizer: optax.GradientTransformation | None = None,
    gradient: Gradient | None = None,
) -> LocalStep:
    """Mini-batch SGD: one optimizer step along the gradient of a loss.

    Args:
      loss: the loss of one batch.
      setting: optimizer and gradient, unless the next arguments replace them.
      optimizer: initialised in every round. Default: that of ``setting``. (SCAFFOLD chains its correction before it.)
      gradient: gradient of the loss. Default: that of ``setting``. (Sharpness-aware methods replace it.)
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
        params, state, optimizer_state = carry
        return {"params": optimizers.trained(params, optimizer_state), **state}

    return LocalStep(init, step, result)


def trained_and_state(variables: Variables) -> tuple[Any, Variables]:
    """Split variables into ``params``, which are trained, and the other collections (the state of a loss)."""
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
    """Train one client with `sgd` for E epochs over its shuffled samples, or for S steps. Consumes ``key``.

    Args:
      model: the network. With a `Zoo`, the network of this client is trained.
      setting: epochs or steps, batch size, optimizer.
      variables: initial variables.
      data: the client's data.
      key: the client's key of this round.
      loss: the loss of one batch. Default: `supervised`.
      optimizer: initialised in every round. Default: that of ``setting``.
      gradient: gradient of the loss. Default: that of ``setting``.

    Returns:
      The trained variables and the metrics.
    """

    def training(loss: Loss, variables: Variables) -> tuple[Variables, Metrics]:
        return run(sgd(loss, setting, optimizer=optimizer, gradient=gradient), setting, variables, data, key)

    return model.train_compact(variables, loss or supervised(model), training)


def run(
    local_step: LocalStep, setting: LocalSetting, start: Any, data: ClientData, key: jax.Array
) -> tuple[Any, Metrics]:
    """Run a local step on every batch of a client's E epochs, or on its first S batches. Consumes ``key``.

    The number of steps (`LocalSetting.num_steps`) is traced, so clients of all sizes share one program. A client of
    size 0 runs no step. A client with ``data.work`` stops after that share of its steps, rounded to whole steps.

    Args:
      local_step: the step.
      setting: epochs or steps, and batch size.
      start: argument of ``local_step.init``.
      data: the client's data.
      key: the client's key of this round.

    Returns:
      The result of ``local_step`` and the metrics.
    """
    steps_per_epoch = (data.size + setting.batch_size - 1) // setting.batch_size
    epochs, most = setting.epochs, None
    if data.work is not None or setting.steps is not None:
        most = setting.num_steps(data.size, data.work)
    if setting.steps is not None:
        epochs = -(-setting.num_steps(data.size) // jnp.maximum(steps_per_epoch, 1))

    def epoch(number: jax.Array, carry: tuple) -> tuple:
        order = _in_order(setting, data, jax.random.fold_in(key, 2 * number))
        step_key = jax.random.fold_in(key, 2 * number + 1)

        @jax.named_scope("local_step")  # a name to find in the compiled program
        def step(number_in_epoch: jax.Array, carry: tuple) -> tuple:
            inner, metrics = carry
            key = jax.random.fold_in(step_key, number_in_epoch)
            batch = _batch(setting, data, order, number_in_epoch, key)
            inner, value = local_step.step(inner, batch, key)
            return inner, _count(metrics, value, batch.mask)

        count = steps_per_epoch if most is None else jnp.clip(most - number * steps_per_epoch, 0, steps_per_epoch)
        return jax.lax.fori_loop(0, count, step, carry)

    zero = jnp.zeros((), jnp.int32)
    metrics = Metrics(jnp.zeros(()), zero, zero, zero - 1)
    carry, metrics = jax.lax.fori_loop(0, epochs, epoch, (local_step.init(start), metrics))

    trained = local_step.result(carry)
    broken = (metrics.bad_step < 0) & ~trees.all_finite(trained)
    return trained, metrics._replace(bad_step=jnp.where(broken, metrics.steps, metrics.bad_step))


def draw(setting: LocalSetting, data: ClientData, key: jax.Array) -> Batch:
    """Draw a batch of a client's training samples without replacement. Consumes ``key``."""
    return _batch(setting, data, _in_order(setting, data, jax.random.fold_in(key, 0)), 0, key)


def _in_order(setting: LocalSetting, data: ClientData, key: jax.Array) -> Order:
    """The samples of a client in random order, padded to complete batches. Consumes ``key``.

    Rows and labels of an epoch are looked up here at once, so a step gathers only images. On a TPU, each lookup of 50
    numbers inside a step costs as much as a small convolution.
    """
    order = shuffle(key, data.size, setting.max_size)
    length = -(-setting.max_size // setting.batch_size) * setting.batch_size
    position = order[jnp.minimum(jnp.arange(length, dtype=jnp.int32), data.size - 1)]
    row = jnp.asarray(data.index)[data.offset + position]
    y = jnp.asarray(data.samples.y)
    return Order(position, row, y[row] if y.ndim == 1 else None)


def _batch(setting: LocalSetting, data: ClientData, order: Order, number: jax.Array | int, key: jax.Array) -> Batch:
    """Batch ``number`` of a client's epoch."""
    start = number * setting.batch_size
    mine = jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, start, setting.batch_size), order)
    mask = (start + jnp.arange(setting.batch_size, dtype=jnp.int32) < data.size).astype(jnp.float32)
    y = jnp.asarray(data.samples.y)[mine.row] if mine.y is None else mine.y
    x = raw(data.samples, mine.row)
    if setting.augment is not None and not are_tokens(x):
        x = setting.augment(jax.random.fold_in(key, 1), x)
    batch = Batch(x, y, mask, mine.position)
    if setting.mix is not None:
        batch = _mix(setting.mix, batch, jax.random.fold_in(key, 3))  # Per-FedAvg uses 2
    return batch._replace(x=normalised(data.samples, batch.x, mine.row))


def _mix(mix: Mix, batch: Batch, key: jax.Array) -> Batch:
    """The batch with another of its samples mixed into each. Consumes ``key``.

    Raises:
      UserError: the samples are tokens.
    """
    if are_tokens(batch.x):
        raise UserError("mix= mixes pixels or numbers, but the samples are tokens: leave it out")
    order_key, key = jax.random.split(key)
    other = shuffle(order_key, jnp.sum(batch.mask).astype(jnp.int32), len(batch.mask))  # padding stays where it is
    kept = mix(key, batch.x)
    if kept.dtype == bool:
        x = jnp.where(kept, batch.x, batch.x[other])
    else:
        x = kept * batch.x.astype(kept.dtype) + (1 - kept) * batch.x[other].astype(kept.dtype)
    if kept.dtype == bool and batch.y.ndim > 2:  # a class per pixel is cut out with its pixel
        return batch._replace(x=x, y=jnp.where(kept[..., 0], batch.y, batch.y[other]))
    share = jnp.mean(kept.astype(jnp.float32), axis=tuple(range(1, kept.ndim)))
    mixture = Mixture(batch.y, batch.position, other, jnp.broadcast_to(share, other.shape))
    return Batch(x, None, batch.mask, mixture=mixture)  # type: ignore[arg-type]


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
    """Sums over test samples; with a leading axis [D] or [N] for several devices or clients."""

    metrics: dict[str, Any]  # the sums of each metric of the task, by its name
    loss: jax.Array  # scalar, sum of the task's loss
    count: jax.Array  # scalar, samples


MOST_OUTPUTS = 1 << 27
"""Numbers that a network may return for the samples of one forward pass in tests: 0.5 GiB in float32."""


def evaluation_batch(model: Model | None = None) -> int:
    """Number of samples per forward pass in tests.

    On CPUs, the activations of 64 samples fit into the cache. With 256 samples, LeNet-5 takes 1.6 times as long per
    image, ResNet-20 1.7 times and pFedHR's M3 2.4 times. Networks with large outputs, such as the logits of 49,152
    tokens at each position, take fewer samples.
    """
    most = 64 if platforms.current() == "cpu" else 256
    outputs = 1 if model is None else math.prod(model.task.outputs(model.input_shape))
    return max(1, min(most, MOST_OUTPUTS // max(1, outputs)))


def evaluate(model: Model, variables: Variables, samples: Samples, mask: jax.Array, *, batch_size: int) -> Score:
    """The sums over the test samples [M] where mask [M] is 1. M must be a multiple of ``batch_size``."""

    def step(total: Score, rows: jax.Array) -> tuple[Score, None]:
        return trees.add(total, score_batch(model, variables, samples, rows, mask[rows])), None

    rows = jnp.arange(samples.y.shape[0], dtype=jnp.int32).reshape(-1, batch_size)
    start = no_score(model, variables, samples, rows[0], mask[rows[0]])
    return jax.lax.scan(step, start, rows)[0]


def score(model: Model, variables: Variables, data: ClientData, *, batch_size: int) -> Score:
    """The sums over a client's samples. Their number is traced, so clients of all sizes share one program."""

    def step(number: jax.Array, total: Score) -> Score:
        position = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        rows = data.index[data.offset + jnp.minimum(position, data.size - 1)]
        return trees.add(total, score_batch(model, variables, data.samples, rows, position < data.size))

    rows = jnp.zeros(batch_size, jnp.int32)
    start = no_score(model, variables, data.samples, rows, rows > 0)
    return jax.lax.fori_loop(0, (data.size + batch_size - 1) // batch_size, step, start)


def held_out_loss(model: Model, variables: Variables, data: ClientData, *, batch_size: int) -> jax.Array:
    """The mean loss of the task on a client's validation samples, or on its training samples if it has none."""
    alone = dataclasses.replace(model, task=dataclasses.replace(model.task, metrics=()))  # no metric is needed
    total = score(alone, variables, validation(data), batch_size=batch_size)
    return total.loss / jnp.maximum(total.count, 1.0)


def outputs(model: Model, variables: Variables, samples: Samples, rows: Array) -> jax.Array:
    """The outputs [R, ...] of the network for the sample ``rows`` [R], in evaluation mode: [R, C] logits of classes."""
    count = rows.shape[0]
    size = min(evaluation_batch(model), count)
    batches = jnp.resize(rows, (-(-count // size), size))  # the last batch is padded
    made = jax.lax.map(lambda rows: model.apply(variables, gather(samples, rows)), batches)
    return made.reshape(-1, *made.shape[2:])[:count]


def client_outputs(model: Model, variables: Variables, data: ClientData, max_size: int) -> jax.Array:
    """The outputs for a client's training samples, in evaluation mode. Rows from its size on are zeros or repetitions.

    Only the batches with samples are computed: [max_size rounded up to complete batches, ...].
    """
    batch_size = min(evaluation_batch(model), max_size)
    shape = jax.eval_shape(lambda: model.apply(variables, gather(data.samples, jnp.zeros(batch_size, jnp.int32))))

    def step(number: jax.Array, logits: jax.Array) -> jax.Array:
        position = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        rows = jnp.asarray(data.index)[data.offset + jnp.minimum(position, data.size - 1)]
        own = model.apply(variables, gather(data.samples, rows))
        return jax.lax.dynamic_update_slice_in_dim(logits, own, number * batch_size, axis=0)

    blank = jnp.zeros((-(-max_size // batch_size) * batch_size, *shape.shape[1:]), shape.dtype)
    return jax.lax.fori_loop(0, (data.size + batch_size - 1) // batch_size, step, blank)


def score_batch(model: Model, variables: Variables, samples: Samples, rows: jax.Array, mask: jax.Array) -> Score:
    """The sums over the sample ``rows`` [B] where ``mask`` [B] is 1."""
    outputs = model.apply(variables, gather(samples, rows))
    return score_outputs(model.task, outputs, jnp.asarray(samples.y)[rows], mask.astype(jnp.float32))


def score_outputs(task: Task, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Score:
    """The sums over outputs [B, ...] and targets [B, ...] of the task where ``mask`` [B] is 1."""
    losses = task.loss(outputs, targets, mask)
    sums = {metric.name: metric.sums(task, outputs, targets, mask) for metric in task.metrics}
    return Score(sums, jnp.sum(losses * mask), jnp.sum(mask))


def no_score(model: Model, variables: Variables, samples: Samples, rows: jax.Array, mask: jax.Array) -> Score:
    """The sums over no samples: zeros in the form of `score_batch`. Nothing is computed."""
    shapes = jax.eval_shape(lambda: score_batch(model, variables, samples, rows, mask))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
