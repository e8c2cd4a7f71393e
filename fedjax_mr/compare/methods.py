"""The methods of a comparison: one problem, different settings."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_mr.analysis import verdicts
from fedjax_mr.analysis.ledger import BUDGETS
from fedjax_mr.config import config as configuration
from fedjax_mr.config import titles
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.sweep import PlannedRun


@dataclasses.dataclass(frozen=True)
class Method:
    """One of the methods that are compared.

    Attributes:
      name: its title, with the settings in which it differs from the others.
      config: its resolved configuration, without a run folder. Its seed is that of the first run.
    """

    name: str
    config: Config

    def run(self, seed: int, folder: Path) -> PlannedRun:
        """The run of a seed, in a folder of its own."""
        config = dataclasses.replace(self.config, seed=seed)
        name = f"{config.strategy}-seed={seed}-{configuration.digest(config)}"
        return PlannedRun(config, {}, folder / "runs" / name)


def of_configs(configs: Sequence[Config], *, budget: str = "rounds") -> list[Method]:
    """Name the methods, and check that they can be compared.

    Args:
      configs: resolved configurations.
      budget: a key of `ledger.BUDGETS`.

    Raises:
      UserError: fewer than two methods, or another problem: other data, partition, evaluations or rounds.
    """
    if len(configs) < 2:
        raise UserError("a comparison needs at least two methods, such as --strategies=fedavg,fedmr")
    if budget not in BUDGETS:
        raise UserError(f"equal={budget} is none of {', '.join(BUDGETS)}")
    first = configs[0]
    for config in configs[1:]:
        ours, theirs = _problem(first, budget), _problem(config, budget)
        if different := [flag for flag in dict.fromkeys((*ours, *theirs)) if ours.get(flag) != theirs.get(flag)]:
            flag = different[0]
            raise UserError(
                f"methods are compared on one problem, but {flag} is {ours.get(flag)} for {first.strategy} and "
                f"{theirs.get(flag)} for {config.strategy}"
            )
    for config in configs:
        if config.stop_at_accuracy is not None or (config.patience is not None and not config.validation_share):
            raise UserError(
                "a comparison counts all rounds, and stopping by test results would change what is compared: leave out "
                "--stop_at_accuracy, and --patience without --validation_share"
            )
    return [Method(name, config) for name, config in zip(titles.runs(configs), configs, strict=True)]


def _problem(config: Config, budget: str) -> dict[str, Any]:
    known = verdicts.problem(config) | {"partition_seed": config.partition_seed}
    return known | ({"rounds": config.rounds} if budget == "rounds" else {})


def different(methods: Sequence[Method]) -> dict[str, list[Any]]:
    """The settings in which the methods that have them differ, by flag: the value of each method, None without one."""
    known = [configuration.decisive(configuration.portable(each.config)) for each in methods]
    return {flag: [each.get(flag) for each in known] for flag in titles.varied(known)}
