"""Test of a model on a test set whose samples are divided over the devices."""

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_mr.client import local
from fedjax_mr.client.local import Score
from fedjax_mr.client.samples import Samples, Trigger, backdoored
from fedjax_mr.engine.clients import CLIENTS, ClientAxis
from fedjax_mr.engine.placement import place, shapes_at
from fedjax_mr.engine.program import Programs
from fedjax_mr.errors import UserError
from fedjax_mr.models import platforms
from fedjax_mr.models.base import Model, Variables


class Tested(NamedTuple):
    """Test results of one model, or with a leading axis [K] of K models."""

    metrics: dict[str, Any]  # the value of each metric of the task, by its name
    loss: np.ndarray  # mean loss of the task, such as the cross-entropy in nats

    @property
    def accuracy(self) -> np.ndarray:
        """The fraction of the test samples whose class is right.

        Raises:
          UserError: the task has no accuracy, or it was not asked for.
        """
        if "accuracy" not in self.metrics:
            raise UserError(f"this test has no accuracy: its metrics are {', '.join(self.metrics)}")
        return self.metrics["accuracy"]


@dataclasses.dataclass(frozen=True)
class TestPrograms:
    """The programs of an `Evaluation`. Each device returns the counts of its samples, with a leading axis [D].

    Attributes:
      axis: the layout.
      batch: samples per step of one device.
      code: equal for equal code of networks, see `Simulator.code`.
    """

    axis: ClientAxis
    batch: int
    code: Hashable

    def test(self, model: Model, variables: Variables, samples: Samples, mask: jax.Array) -> Score:
        """Test one model."""
        return self._on_devices(self._score, model, variables, samples, mask)

    def test_all(self, model: Model, models: Variables, samples: Samples, mask: jax.Array) -> Score:
        """Test K stacked models, one after another."""

        def score_all(model: Model, models: Variables, samples: Samples, mask: jax.Array) -> Score:
            return jax.lax.map(lambda variables: self._score(model, variables, samples, mask), models)

        return self._on_devices(score_all, model, models, samples, mask)

    def _score(self, model: Model, variables: Variables, samples: Samples, mask: jax.Array) -> Score:
        return local.evaluate(model, variables, samples, mask, batch_size=self.batch)

    def _on_devices(self, function: Any, model: Model, variables: Variables, samples: Samples, mask: Any) -> Score:
        def counts(*arguments: Any) -> Score:
            return jax.tree.map(lambda leaf: leaf[None], function(*arguments))

        everywhere, divided = PartitionSpec(), PartitionSpec(CLIENTS)
        specs = (everywhere, everywhere, _layout(samples, divided, everywhere), divided)
        divided_counts = jax.shard_map(counts, mesh=self.axis.mesh, in_specs=specs, out_specs=divided, check_vma=False)
        return divided_counts(model, variables, samples, mask)


class Evaluation:
    """The compiled test of one network on one test set.

    The host adds the counts of the devices. The programs contain no collective.
    """

    def __init__(
        self,
        model: Model,
        samples: Samples,
        axis: ClientAxis,
        *,
        counted: np.ndarray | None = None,
        code: Hashable = None,
    ) -> None:
        """Divide the test samples [M, ...] over the devices.

        Args:
          model: the network.
          samples: the test set.
          axis: the layout.
          counted: which samples count [M] bool. Default: all.
          code: equal for equal code of networks, see `Simulator.code`.
        """
        self.axis = axis
        count = len(samples.y)
        with platforms.tracing_for(axis.platform):
            batch = min(local.evaluation_batch(model), -(-count // axis.num_devices))
        padding = -count % (batch * axis.num_devices)
        counted = np.ones(count, bool) if counted is None else counted
        mask = np.concatenate([counted.astype(np.float32), np.zeros(padding, np.float32)])
        self._place = shapes_at if axis.described else place
        self._samples = self._place(_padded(samples, padding), _layout(samples, axis.sharded, axis.replicated))
        self._mask = self._place(mask, axis.sharded)
        self._model = self._place(model, axis.replicated)  # an argument, because it has the frozen variables
        self.programs = Programs(TestPrograms(axis, batch, code))

    def one(self, variables: Variables) -> Tested:
        """Test one model."""
        score = self._run("test", variables)
        return Tested(self._model.task.values(score.metrics), np.asarray(score.loss / score.count))

    def each(self, models: Variables) -> Tested:
        """Test K stacked models with leaves [K, ...]. The results have shape [K]."""
        score = self._run("test_all", models)
        return Tested(self._model.task.values_of_each(score.metrics), np.asarray(score.loss / score.count))

    def compile(self, variables: Variables) -> Programs:
        """Compile the test of one model for a machine that is not present. Nothing is executed."""
        self._per_device("test", variables)
        return self.programs

    def _per_device(self, name: str, variables: Variables) -> Score:
        """The sums of each device, leaves [D, ...]."""
        variables = self._place(variables, self.axis.replicated)
        return self.programs.call(name, self._model, variables, self._samples, self._mask)

    def _run(self, name: str, variables: Variables) -> Score:
        """The sums over all devices."""
        per_device = self._per_device(name, variables)
        if not self._mask.is_fully_addressable:
            per_device = jax.device_put(per_device, self.axis.replicated)
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64).sum(axis=0), per_device)


def backdoor_test(samples: Samples, target: int) -> tuple[Samples, np.ndarray]:
    """The test of a backdoor: -> (samples, which of them count [M] bool).

    Every image carries the trigger and has the label ``target``. Images that had this label before do not count, so the
    accuracy is the share of the other images that the trigger moves to ``target``: the success rate of the attack.

    Raises:
      UserError: the samples are no images, no sample has the label ``target``, or all of them have it.
    """
    if len(samples.shape or samples.x.shape[1:]) != 3:
        raise UserError("only images can carry the trigger of a backdoor: choose an attack other than replacement")
    others = np.asarray(samples.y) != target
    if others.all():
        raise UserError(f"attack_target={target} is the label of no test sample: choose one of 0..{np.max(samples.y)}")
    if not others.any():
        raise UserError(f"every test sample has label {target}, so a backdoor for it cannot be tested: choose another")
    return jax.device_get(backdoored(samples, np.ones(len(others), bool), target)), others


def _layout(samples: Samples, here: Any, everywhere: Any) -> Samples:
    """A tree like the samples, with ``here`` for what has a row per sample and ``everywhere`` for the rest."""
    trigger = samples.trigger and Trigger(here, everywhere, everywhere)
    return Samples(here, here, everywhere, everywhere, samples.shape, trigger)


def _padded(samples: Samples, count: int) -> Samples:
    """The samples with ``count`` copies of the first one appended."""
    trigger = samples.trigger and samples.trigger._replace(rows=_pad(samples.trigger.rows, count))
    return samples._replace(x=_pad(samples.x, count), y=_pad(samples.y, count), trigger=trigger)


def _pad(array: Any, count: int) -> np.ndarray:
    return np.concatenate([array, np.broadcast_to(array[:1], (count, *array.shape[1:]))])
