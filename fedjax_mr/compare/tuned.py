"""The settings that a tuning has chosen, and what it cost."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr import files, untrusted
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError


class Tuned(NamedTuple):
    """A finished tuning of some methods.

    Attributes:
      choices: the chosen flags of each method.
      trials: number of trials of each method.
      rounds: rounds that the trials of each method trained, over all seeds.
      seeds: seeds of the trials.
    """

    choices: Mapping[str, Mapping[str, str]]
    trials: Mapping[str, int]
    rounds: Mapping[str, int]
    seeds: Sequence[int]

    @classmethod
    def read(cls, folder: Path | str, strategies: Sequence[str]) -> "Tuned":
        """Read the folder of a tuning.

        Raises:
          UserError: it is not the folder of a tuning, or has not chosen a setting of some method.
        """
        folder = files.expand_home(folder)
        try:
            seeds = sorted({configuration.load(path.parent).seed for path in folder.glob("trials/*/config.json")})
            rows = list(csv.DictReader(untrusted.read_text(folder / "trials.csv").splitlines()))
            flags = {name: untrusted.read_text(folder / f"{name}.flags").splitlines() for name in strategies}
            own = {name: [int(row["rounds"]) for row in rows if row["strategy"] == name] for name in strategies}
        except OSError as error:
            raise UserError(
                f"--tuned={folder} is not a tuning of {', '.join(strategies)} ({error.filename}: {error.strerror})"
            ) from None
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"{folder / 'trials.csv'} is damaged ({error})") from None
        counts = {name: len(each) for name, each in own.items()}
        if not seeds or 0 in counts.values():
            raise UserError(f"--tuned={folder} has no trials of {', '.join(strategies)}: tune these methods together")
        pairs = {name: [line[2:].split("=", 1) for line in lines if line[:2] == "--"] for name, lines in flags.items()}
        rounds = {name: sum(each) * len(seeds) for name, each in own.items()}
        return cls({name: dict(each) for name, each in pairs.items()}, counts, rounds, seeds)

    def next_seed(self, seed: int) -> int:
        """The first seed from ``seed`` on after those of the trials, so that no seed of the verdict chose a setting."""
        return max(seed, max(self.seeds) + 1)

    def facts(self) -> dict[str, Any]:
        """The tuning as values for JSON."""
        return {
            "chosen": {name: dict(each) for name, each in self.choices.items()},
            "trials": dict(self.trials),
            "rounds": dict(self.rounds),
            "seeds": list(self.seeds),
        }
