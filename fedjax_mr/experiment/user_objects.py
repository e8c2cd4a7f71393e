"""User-supplied samples and networks of a run, and their names in the configuration."""

import dataclasses
import inspect
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn

from fedjax_mr import registry
from fedjax_mr.config.config import Config
from fedjax_mr.data import Dataset, FederatedData
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import build_model, task
from fedjax_mr.models import Model, nnx_module, parts, user_module


class UserObjects(NamedTuple):
    """The Python objects that a user passes beside a configuration.

    Attributes:
      dataset: the samples, or None for those that the configuration names.
      modules: the networks, or () for those that the configuration names.
      variables: the variables of the network, or None if it is initialised from the seed.
    """

    dataset: Dataset | None = None
    modules: tuple[Any, ...] = ()
    variables: Any = None

    @classmethod
    def of(cls, dataset: Any, model: Any, variables: Any = None) -> "UserObjects":
        """Check the objects that a user passes.

        Args:
          dataset: a `Dataset` or None.
          model: a Flax module (`user_module.bind`), a `Model`, a list of several, or None.
          variables: the variables of the network, checked when it is built, or None.

        Raises:
          UserError: an object of another kind.
        """
        if isinstance(dataset, str | os.PathLike):
            name = os.fspath(dataset)
            raise UserError(f"dataset= takes samples; a dataset by name or file is fmr.Config(dataset={name!r})")
        if dataset is not None and not isinstance(dataset, Dataset):
            raise UserError(f"dataset= takes what fmr.from_arrays(x, y) returns, not a {type(dataset).__name__}")
        several = isinstance(model, Sequence) and not isinstance(model, str)
        modules = tuple(model) if several else () if model is None else (model,)
        if several and not modules:
            raise UserError("model= is an empty list: it takes one network or several")
        for module in modules:
            if isinstance(module, str):
                raise UserError(f"model= takes a Flax module; a network by name is fmr.Config(model={module!r})")
            if not (isinstance(module, nn.Module | Model) or nnx_module.is_nnx(module)):
                if inspect.isfunction(module):
                    raise UserError(
                        "model= takes a function only if its argument is rngs: "
                        "model=lambda rngs: MyNetwork(..., rngs=rngs)"
                    )
                kind = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
                raise UserError(
                    f"model= takes an instance of flax.linen.Module or flax.nnx.Module, such as MyNetwork(), not {kind}"
                )
        return cls(dataset, modules, variables)

    def dataset_name(self, recorded: str) -> str:
        """The name of the samples in the configuration, with a hash of user-supplied ones.

        Args:
          recorded: the name that the configuration has. If it is one of user-supplied samples, their contents must be
            the same.

        Raises:
          UserError: they are others.
        """
        return recorded if self.dataset is None else _same("dataset", self.dataset.recorded_name(), recorded)

    def build(self, config: Config, federated: FederatedData) -> tuple[Config, Model]:
        """Build the network, or the `Zoo` of several, and record user-supplied ones by name and hash.

        Raises:
          UserError: a network does not fit the samples, or the configuration records others.
        """
        learned = task(config, federated)
        model = build_model(config, federated.dataset, task=learned, modules=self.modules, variables=self.variables)
        if self.variables is not None:
            given = registry.supplied_name("base", parts.digest(parts.plain(self.variables)))
            config = dataclasses.replace(config, variables=_same("variables", given, config.variables or ""))
        if not self.modules:
            return config, model
        name = _same("model", ",".join(map(user_module.recorded_name, model.networks)), config.model)
        return dataclasses.replace(config, model=name), model


def _same(argument: str, name: str, recorded: str) -> str:
    """The name of a user-supplied object. If the configuration records one, the contents must be the same.

    Raises:
      UserError: they differ.
    """
    if not registry.is_supplied(recorded):
        return name
    if registry.digests(name) != registry.digests(recorded):
        raise UserError(
            f"{argument}= is {name.removeprefix(registry.PREFIX)}, but the configuration is of "
            f"{recorded.removeprefix(registry.PREFIX)}: pass the same object, or a configuration without it"
        )
    return recorded
