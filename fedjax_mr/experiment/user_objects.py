"""User-supplied samples and networks of a run, and their names in the configuration."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn

from fedjax_mr import registry
from fedjax_mr.data import Dataset, FederatedData
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import build_model
from fedjax_mr.experiment.config import Config
from fedjax_mr.models import Model, user_module


class UserObjects(NamedTuple):
    """The Python objects that a user passes beside a configuration.

    Attributes:
      dataset: the samples, or None for those that the configuration names.
      modules: the networks, or () for those that the configuration names.
    """

    dataset: Dataset | None = None
    modules: tuple[Any, ...] = ()

    @classmethod
    def of(cls, dataset: Any, model: Any) -> "UserObjects":
        """Return what was given.

        Args:
          dataset: a `Dataset` or None.
          model: a Flax module, a `Model`, a list of several, or None.

        Raises:
          UserError: it is something else.
        """
        if dataset is not None and not isinstance(dataset, Dataset):
            raise UserError(f"dataset= takes what fmr.from_arrays(x, y) returns, not a {type(dataset).__name__}")
        several = isinstance(model, Sequence) and not isinstance(model, str)
        modules = tuple(model) if several else () if model is None else (model,)
        if several and not modules:
            raise UserError("model= is an empty list: it takes one network or several")
        for module in modules:
            if isinstance(module, str):
                raise UserError(f"model= takes a Flax module; a network by name is fmr.Config(model={module!r})")
            if not isinstance(module, nn.Module | Model):
                kind = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
                raise UserError(f"model= takes an instance of flax.linen.Module, such as MyNetwork(), not {kind}")
        return cls(dataset, modules)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that these take the place of."""
        return ("dataset",) * (self.dataset is not None) + ("model",) * bool(self.modules)

    def named(self, config: Config) -> Config:
        """Return the configuration with the samples by name and hash, and the networks by name alone so far.

        Raises:
          UserError: the configuration is of other samples that were given in Python.
        """
        changes = {}
        if self.dataset is not None:
            changes["dataset"] = _same("dataset", self.dataset.recorded_name(), config.dataset)
        if self.modules and not registry.is_supplied(config.model):
            names = (module.name if isinstance(module, Model) else type(module).__name__ for module in self.modules)
            changes["model"] = ",".join(map(registry.supplied_name, names))
        return dataclasses.replace(config, **changes)

    def build(self, config: Config, federated: FederatedData) -> tuple[Config, Model]:
        """Return the configuration with the networks by name and hash, and the network or `Zoo`.

        Raises:
          UserError: a network does not fit the samples, or the configuration is of others.
        """
        model = build_model(config, federated, modules=self.modules)
        if not self.modules:
            return config, model
        name = ",".join(map(user_module.recorded_name, model.networks))
        whole = all(each.count(":") == 2 for each in config.model.split(","))
        return dataclasses.replace(config, model=_same("model", name, config.model if whole else "")), model


def _same(argument: str, name: str, recorded: str) -> str:
    """Return the name of what was given: the recorded one if there is one, and its content must be the same.

    Raises:
      UserError: it is not.
    """
    if not registry.is_supplied(recorded):
        return name
    if registry.digests(name) != registry.digests(recorded):
        raise UserError(
            f"{argument}= is {name.removeprefix(registry.PREFIX)}, but the configuration is of "
            f"{recorded.removeprefix(registry.PREFIX)}: pass the same object, or a configuration without it"
        )
    return recorded
