"""Test of a model on a test set whose samples are divided over the devices."""

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
    """Test results: scalars for one model, [K] for K models."""

    accuracy: np.ndarray  # fraction of the test samples
    loss: np.ndarray  # mean cross-entropy in nats


class Evaluation:
    """The compiled test of one network on one test set.

    Each device returns the counts of its samples, and the host adds them. The programs contain no collective.
    """

    def __init__(
        self,
        model: Model,
        samples: Samples,
        axis: ClientAxis,
        *,
        counted: np.ndarray | None = None,
        shared: bool = False,
    ) -> None:
        """Divide the test samples [M, ...] over the devices.

        Args:
          model: the network.
          samples: the test set.
          axis: the layout.
          counted: which samples count [M] bool. Default: all.
          shared: whether equal networks share compiled programs. Safe only for the networks of this package.
        """
        self.axis = axis
        count = len(samples.y)
        with platforms.tracing_for(axis.platform):
            batch = min(local.evaluation_batch(), -(-count // axis.num_devices))
        padding = -count % (batch * axis.num_devices)
        counted = np.ones(count, bool) if counted is None else counted
        mask = np.concatenate([counted.astype(np.float32), np.zeros(padding, np.float32)])
        self._spec = _layout(samples, PartitionSpec(CLIENTS), PartitionSpec())
        self._place = shapes_at if axis.described else place
        self._samples = self._place(_padded(samples, padding), _layout(samples, axis.sharded, axis.replicated))
        self._mask = self._place(mask, axis.sharded)

        self._model = self._place(model, axis.replicated)  # an argument, because it has the frozen variables

        def score(model: Model, variables: Variables, samples: Samples, mask: jax.Array) -> Score:
            return local.evaluate(model, variables, samples, mask, batch_size=batch)

        def score_all(model: Model, models: Variables, samples: Samples, mask: jax.Array) -> Score:
            return jax.lax.map(lambda variables: score(model, variables, samples, mask), models)

        self._functions = {"test": self._on_devices(score), "test_all": self._on_devices(score_all)}
        key = (axis, batch, samples.trigger is not None) if shared else None
        self.programs = Programs(platform=axis.platform, only_compiled=axis.described, key=key)

    def one(self, variables: Variables) -> Tested:
        """Test one model."""
        return self._run("test", variables)

    def each(self, models: Variables) -> Tested:
        """Test K stacked models with leaves [K, ...]. The results have shape [K]."""
        return self._run("test_all", models)

    def compile(self, variables: Variables) -> Programs:
        """Compile the test of one model for a machine that is not present. Nothing is executed."""
        self._per_device("test", variables)
        return self.programs

    def _per_device(self, name: str, variables: Variables) -> Score:
        """The sums of each device, leaves [D, ...]."""
        variables = self._place(variables, self.axis.replicated)
        return self.programs.call(name, self._functions[name], self._model, variables, self._samples, self._mask)

    def _run(self, name: str, variables: Variables) -> Tested:
        per_device = self._per_device(name, variables)
        if not self._mask.is_fully_addressable:
            per_device = jax.device_put(per_device, self.axis.replicated)
        correct, loss, count = (np.asarray(leaf, np.float64).sum(axis=0) for leaf in per_device)
        return Tested(correct / count, loss / count)

    def _on_devices(self, function: Any) -> Any:
        def counts(model: Model, variables: Variables, samples: Samples, mask: jax.Array) -> Score:
            return jax.tree.map(lambda leaf: leaf[None], function(model, variables, samples, mask))

        specs = (PartitionSpec(), PartitionSpec(), self._spec, PartitionSpec(CLIENTS))
        return jax.shard_map(
            counts, mesh=self.axis.mesh, in_specs=specs, out_specs=PartitionSpec(CLIENTS), check_vma=False
        )


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
        raise UserError(f"target={target} is the label of no test sample: choose one of 0..{np.max(samples.y)}")
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
