"""The settings of the clients' training: the one place of their defaults, ranges and sources."""

import dataclasses
import functools

from fedjax_mr.client.optimizers import MOMENTUM, OPTIMIZERS
from fedjax_mr.client.schedules import SCHEDULES
from fedjax_mr.settings import LARGEST_BATCH, field

_setting = functools.partial(field, group="Local training")


@dataclasses.dataclass(frozen=True)
class Training:
    """The settings of the clients' training."""

    # fmt: off
    local_epochs: int = _setting(
        5, "Epochs that a client trains in each round", argument="epochs", unit="epochs", low=1, source="KDD'24",
        short=True)
    local_steps: int | None = _setting(
        None, "Steps that each client trains in a round, in place of --local_epochs, whatever its number of samples. "
        "If omitted, epochs", argument="steps", unit="steps", low=1, short=True)
    batch_size: int = _setting(10, "Batch size B of a local step", unit="samples", low=1, high=LARGEST_BATCH,
        short=True)
    optimizer: str = _setting(
        "sgd", "Optimizer of the clients. Its state is reset in every round, unless --keep_optimizer is set",
        names=OPTIMIZERS, source="KDD'24", short=True)
    keep_optimizer: bool = _setting(
        False, "Clients keep the state of their optimizer between rounds, such as its momentum. For methods whose "
        "clients do nothing but train, such as fedavg, fedmr, fedcross and dpsgd")
    lr: float = _setting(0.05, "Learning rate of the clients", low=0, open_low=True, short=True)
    lr_schedule: str = _setting(
        "constant", "Learning rate over the rounds: constant, times --lr_decay in each round (exponential) or after "
        "every --lr_every rounds (step), or half a cosine that ends at 0 after --lr_over rounds (cosine)",
        choices=tuple(SCHEDULES))
    lr_decay: float = _setting(
        0.998, "Factor of the learning rate, see --lr_schedule", low=0, high=1, open_low=True,
        source="the codes of FedExP and FedDC", needs=("lr_schedule", "exponential", "step"))
    lr_every: float = _setting(
        100.0, "step: rounds after which the learning rate falls", unit="rounds", low=1,
        needs=("lr_schedule", "step"))
    lr_over: float | None = _setting(
        None, "cosine: rounds after which the learning rate is 0. If omitted, --rounds", unit="rounds", low=1,
        needs=("lr_schedule", "cosine"))
    lr_warmup: float = _setting(
        0.0, "Rounds W in which the learning rate rises from 1/W of its value. 0 disables it", unit="rounds", low=0)
    momentum: float = _setting(
        MOMENTUM, "Momentum of sgd and nesterov. Other optimizers have none", low=0, high=1,
        source="the FedMR authors' code (the paper prints 0.9)", short=True)
    weight_decay: float = _setting(
        0.0, "Weight decay: added to the gradient, or decoupled from it (adamw, lion, muon, prodigy)",
        low=0, source="the FedMR authors' code")
    clip_norm: float | None = _setting(
        None, "Maximum L2 norm of a batch's gradient. If omitted, gradients are not clipped",
        low=0, open_low=True, source="the FedMR authors' code", short=True)
    # fmt: on
