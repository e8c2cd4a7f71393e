"""The ledger of a comparison (`fedjax_mr.compare`): all that was used and decided, and the verdicts in words."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_mr import files, untrusted
from fedjax_mr.analysis import paired, tables, verdicts
from fedjax_mr.analysis.groups import Statistic
from fedjax_mr.analysis.paired import UNDECIDED, Verdict
from fedjax_mr.errors import UserError

LEDGER = "ledger.json"
BUDGETS = {
    "rounds": "rounds",
    "images": "training samples that the clients process",
    "bytes": "bytes that are sent in all directions",
    "clock": "simulated seconds",
}
"""What two methods have the same amount of, when they are compared."""
ASSUMPTION = (
    "The test assumes that the differences of the seeds are independent and normal. Then a wrong verdict has "
    "probability at most {alpha:g} for all pairs together, however often one looks."
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Methods, their values by seed, and verdicts on all pairs.

    Attributes:
      ledger: all that was used and decided, as values for JSON: methods with their settings, seeds, values, the
        interval and the evidence at every look, versions.
    """

    ledger: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Comparison({'; '.join(self.sentences())})"

    @property
    def names(self) -> list[str]:
        """The names of the methods."""
        return [method["name"] for method in self.ledger["methods"]]

    @property
    def decided(self) -> bool:
        """Whether every pair is decided."""
        return all(verdict.outcome != UNDECIDED for verdict in self.verdicts().values())

    def verdicts(self) -> dict[tuple[int, int], Verdict]:
        """The verdict on the first method of each pair (i, j) of places in `names`, i < j."""
        return {tuple(pair["methods"]): _verdict(pair["looks"][-1]) for pair in self.ledger["pairs"] if pair["looks"]}

    def sentences(self) -> list[str]:
        """The verdict on each pair as a sentence."""
        unit, margin = verdicts.Unit.of(self.ledger["metric"]), self.ledger["margin"]
        return [
            verdicts.sentence(self.names[first], self.names[second], verdict, unit, margin=margin)
            for (first, second), verdict in self.verdicts().items()
        ]

    def table(self) -> str:
        """The verdicts, a table of the methods, what differs between them, and the assumption of the test."""
        metric, unit = self.ledger["metric"], verdicts.Unit.of(self.ledger["metric"])
        percent = " %" if unit.words else ""
        rows = [["method", "seeds", f"{metric.replace('_', ' ')}{percent}"]]
        for place, name in enumerate(self.names):
            values = [unit.factor * value for value in self.values(place).values()]
            rows.append([name, str(len(values)), tables.plus_minus(*Statistic.of(values), digits=unit.digits)])
        parts = "start and cohorts" if self.ledger["partition_seed"] is not None else "partition, start and cohorts"
        notes = [
            f"At equal {BUDGETS[self.ledger['equal']]}; {parts} vary with the seed, and are the same for all methods.",
            ASSUMPTION.format(alpha=self.ledger["error"]),
        ]
        return "\n".join([*self.sentences(), "", tables.aligned(rows), "", *self._differences(), *notes])

    def values(self, method: int) -> dict[int, float]:
        """The values of a method by seed, in the order of training."""
        found: dict[int, float] = {}
        for pair in self.ledger["pairs"]:
            if method in pair["methods"]:
                column = pair["methods"].index(method)
                found |= {seed: both[column] for seed, both in zip(pair["seeds"], pair["values"], strict=True)}
        return found

    def write(self, folder: Path) -> None:
        """Write the ledger into a folder, atomically."""
        with files.atomic_write(folder / LEDGER) as path:
            path.write_text(json.dumps(self.ledger, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def _differences(self) -> list[str]:
        shown = lambda value: "-" if value is None else json.dumps(value).strip('"')
        words = "; ".join(
            f"{flag} {', '.join(map(shown, values))}"
            for flag, values in self.ledger["different"].items()
            if flag != "strategy"
        )
        return [f"Different settings, in the order of the methods: {words}."] if words else []


def look(pair: Mapping[str, Any], count: int, ledger: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on the first ``count`` seeds of a pair, as values for JSON; infinite ends are None.

    Args:
      pair: a pair of the ledger.
      count: number of seeds n.
      ledger: the ledger, with its metric, margin, error probability and number of pairs.
    """
    sign = 1.0 if ledger["higher_is_better"] else -1.0
    values = [sign * (first - second) for first, second in pair["values"][:count]]
    alpha = ledger["error"] / math.comb(len(ledger["methods"]), 2)  # Bonferroni: the pairs share the error
    found = paired.judge(values, margin=ledger["margin"], alpha=alpha)._asdict()
    return found | {end: None for end in ("low", "high") if not math.isfinite(found[end])}


def _verdict(found: Mapping[str, Any]) -> Verdict:
    infinite = {"low": -math.inf, "high": math.inf}
    known: dict[str, Any] = {name: infinite[name] if value is None else value for name, value in found.items()}
    return Verdict(**known)


def replay(path: Path | str) -> Comparison:
    """Read a ledger, and compute all its verdicts again from its values.

    Raises:
      UserError: the file cannot be read, or a number of it does not follow from its values.
    """
    path = files.expand_home(path)
    path = path / LEDGER if path.is_dir() else path
    try:
        ledger = untrusted.parse_json(untrusted.read_text(path))
        pairs = [tuple(pair["methods"]) for pair in ledger["pairs"]]
        if pairs != list(itertools.combinations(range(len(ledger["methods"])), 2)):
            raise ValueError("its pairs are not those of its methods")
        for pair in ledger["pairs"]:
            for found in pair["looks"]:
                if (again := look(pair, found["count"], ledger)) != found:
                    name = next(name for name in again if again[name] != found.get(name))
                    raise ValueError(
                        f"{name} of methods {pair['methods']} after {found['count']} seeds is {found.get(name)}, but "
                        f"its values give {again[name]}"
                    )
        result = Comparison(ledger)
        result.table()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            f"{path} is no ledger of a comparison, or was changed ({' '.join(str(error).split())})"
        ) from None
    return result
