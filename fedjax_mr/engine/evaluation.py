"""Test of a model on a test set whose samples are divided over the devices."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_mr.engine import local
from fedjax_mr.engine.clients import CLIENTS, ClientAxis
from fedjax_mr.engine.local import Samples, Score
from fedjax_mr.engine.placement import place, shapes_at
from fedjax_mr.engine.program import Programs
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

    def __init__(self, model: Model, samples: Samples, axis: ClientAxis, *, shared: bool = False) -> None:
        """Divide the test samples [M, ...] over the devices.

        Args:
          model: the network.
          samples: the test set.
          axis: the layout.
          shared: whether equal networks share compiled programs. Safe only for the networks of this package.
        """
        self.axis = axis
        count = len(samples.y)
        with platforms.tracing_for(axis.platform):
            batch = min(local.evaluation_batch(), -(-count // axis.num_devices))
        padding = -count % (batch * axis.num_devices)
        mask = np.concatenate([np.ones(count, np.float32), np.zeros(padding, np.float32)])
        filled = samples._replace(x=_pad(samples.x, padding), y=_pad(samples.y, padding))
        here, everywhere = PartitionSpec(CLIENTS), PartitionSpec()
        self._spec = Samples._make([here, here, everywhere, everywhere, samples.shape])
        self._place = shapes_at if axis.described else place
        self._samples = Samples(
            *self._place(filled[:2], axis.sharded),
            *self._place(filled[2:], axis.replicated),
        )
        self._mask = self._place(mask, axis.sharded)

        def score(variables: Variables, samples: Samples, mask: jax.Array) -> Score:
            return local.evaluate(model, variables, samples, mask, batch_size=batch)

        def score_all(models: Variables, samples: Samples, mask: jax.Array) -> Score:
            return jax.lax.map(lambda variables: score(variables, samples, mask), models)

        self._functions = {"test": self._on_devices(score), "test_all": self._on_devices(score_all)}
        key = (model, axis, batch) if shared else None
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
        return self.programs.call(name, self._functions[name], variables, self._samples, self._mask)

    def _run(self, name: str, variables: Variables) -> Tested:
        per_device = self._per_device(name, variables)
        if not self._mask.is_fully_addressable:
            per_device = jax.device_put(per_device, self.axis.replicated)
        correct, loss, count = (np.asarray(leaf, np.float64).sum(axis=0) for leaf in per_device)
        return Tested(correct / count, loss / count)

    def _on_devices(self, function: Any) -> Any:
        def counts(variables: Variables, samples: Samples, mask: jax.Array) -> Score:
            return jax.tree.map(lambda leaf: leaf[None], function(variables, samples, mask))

        specs = (PartitionSpec(), self._spec, PartitionSpec(CLIENTS))
        return jax.shard_map(
            counts, mesh=self.axis.mesh, in_specs=specs, out_specs=PartitionSpec(CLIENTS), check_vma=False
        )


def _pad(array: Any, count: int) -> np.ndarray:
    return np.concatenate([array, np.broadcast_to(array[:1], (count, *array.shape[1:]))])
