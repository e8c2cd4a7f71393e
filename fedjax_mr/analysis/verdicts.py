"""Verdicts in words: which of several methods is better, by the paired seeds of their runs."""

import itertools
import json
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from fedjax_mr.analysis import groups, paired
from fedjax_mr.analysis.paired import ALPHA, BETTER, EQUAL, UNDECIDED, WORSE, Verdict
from fedjax_mr.analysis.tables import Line
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import settings_of
from fedjax_mr.errors import unknown_name
from fedjax_mr.tasks import METRICS, Metric

PROBLEM = tuple(
    setting.flag
    for setting in settings_of(Config)
    if setting.info.group in ("Data", "Partition", "Evaluation and records") and setting.flag != "partition_seed"
)  # settings that are the same for methods that are compared
LOSSES = ("loss", "train_loss")
MARGIN = 0.01  # of a fraction such as the accuracy: one percentage point
FEWEST = 3  # seeds of a verdict below a table
NAMED = 4  # methods in a line; others are counted


def problem(config: Config) -> dict[str, Any]:
    """The settings of a run by flag that describe the problem, which its method does not choose."""
    return {flag: value for flag, value in configuration.decisive(config).items() if flag in PROBLEM}


def lower_is_better(column: str) -> bool:
    """Whether lower values of a column of the evaluations are better, such as a loss.

    Raises:
      UserError: the column is no metric and no loss, so which values are better is not known.
    """
    base = column
    for prefix in ("validation_", "personal_", "finetuned_"):
        base = base.removeprefix(prefix)
    if base in METRICS:
        return not METRICS[base].higher_is_better
    if base in LOSSES:
        return True
    raise unknown_name("metric", column, [*METRICS, *LOSSES])


class Unit(NamedTuple):
    """How values of a metric are written: a factor, digits behind the point, and words behind it."""

    factor: float
    digits: int
    words: str

    @classmethod
    def of(cls, column: str, metric: Metric | None = None) -> "Unit":
        """The unit of a column. Fractions are written in percentage points."""
        metric = metric or METRICS.get(column)
        if "accuracy" in column or (metric is not None and metric.unit == "fraction"):
            return cls(100, 2, " points")
        return cls(1, 4, "")

    def signed(self, value: float) -> str:
        """A difference, such as ``+1.25``."""
        return f"{self.factor * value + 0.0:+.{self.digits}f}" if math.isfinite(value) else f"{value:+}"

    def plain(self, value: float) -> str:
        """A value without its sign."""
        return f"{self.factor * abs(value):.{self.digits}f}"


def sentence(first: str, second: str, verdict: Verdict, unit: Unit, *, margin: float = 0.0) -> str:
    """A verdict as a sentence: what holds, the interval of the difference, and the number of seeds.

    Args:
      first: the name of the first method.
      second: the name of the second method.
      verdict: the verdict on the first one.
      unit: how differences are written.
      margin: difference that does not matter.
    """
    if verdict.outcome == WORSE:
        return sentence(second, first, verdict.reversed(), unit)
    seeds = f"{verdict.count} seed{'s' * (verdict.count != 1)}"
    interval = f"[{unit.signed(verdict.low)}, {unit.signed(verdict.high)}], {seeds}"
    if not math.isfinite(verdict.low):
        interval = f"no interval yet, {seeds}"
    shown = f"{unit.signed(verdict.mean)}{unit.words} {interval}"
    if verdict.outcome == BETTER:
        return f"{first} is better than {second}: {shown}"
    if verdict.outcome == EQUAL:
        within = f"equal within {unit.plain(margin)}{unit.words}" if margin else "equal"
        return f"{first} and {second} are {within}: {shown}"
    return f"undecided: {first} against {second}: {shown}"


# --- Below a table ---------------------------------------------------------------------------------------------------


def below_table(lines: Sequence[Line], names: Sequence[str] = ()) -> list[str]:
    """The verdicts below a table of accuracies, one line per problem, and how they are meant. Empty without any.

    Two lines have the same problem if their data, division, evaluations and rounds are the same.

    Args:
      lines: the lines of the table.
      names: their names. Default: as in the table.
    """
    problems: dict[str, list[tuple[str, Line]]] = {}
    for name, line in zip(names or [groups.name(line.setting) for line in lines], lines, strict=True):
        if line.finished:
            key = [problem(line.runs[0].config), line.rounds, line.metric.name]
            problems.setdefault(json.dumps(key, sort_keys=True), []).append((name, line))
    found = [f"verdict: {text}" for several in problems.values() if (text := _best_against_others(several))]
    about = f"(paired seeds, error probability {ALPHA:g} however often you look; differences are taken to be normal)"
    return [*found, about] if found else []


def _best_against_others(named: Sequence[tuple[str, Line]]) -> str:
    """The verdict on the best line against each other one. "" if no two share `FEWEST` seeds.

    The best line is chosen by the results, so the error probability is divided by the number of all pairs of lines.
    """
    names, lines = zip(*named, strict=True)
    metric = lines[0].metric
    sign, unit = 1.0 if metric.higher_is_better else -1.0, Unit.of(metric.name, metric)
    margin = MARGIN if unit.words else 0.0
    values = [_by_seed(line, sign) for line in lines]
    pairs = [
        pair
        for pair in itertools.combinations(range(len(lines)), 2)
        if len(values[pair[0]].keys() & values[pair[1]].keys()) >= FEWEST
    ]
    if not pairs:
        return ""
    means = [sum(each.values()) / max(1, len(each)) for each in values]
    best, *others = sorted({place for pair in pairs for place in pair}, key=lambda place: -means[place])
    alpha = ALPHA / len(pairs)
    judged = [
        (names[other], paired.judge(paired.differences(values[best], values[other]), margin=margin, alpha=alpha))
        for other in others
        if (best, other) in pairs or (other, best) in pairs
    ]
    if len(judged) == 1:
        return sentence(names[best], *judged[0], unit, margin=margin)
    words = {
        BETTER: "better than",
        EQUAL: f"equal within {unit.plain(MARGIN)}{unit.words} to" if unit.words else "equal to",
        UNDECIDED: "undecided against",
        WORSE: "worse than",
    }
    parts = []
    for outcome, text in words.items():
        if same := [name for name, verdict in judged if verdict.outcome == outcome]:
            more = f" and {len(same) - NAMED} more" if len(same) > NAMED else ""
            parts.append(f"{text} {', '.join(same[:NAMED])}{more}")
    return f"{names[best]} has the best mean: {'; '.join(parts)}"


def _by_seed(line: Line, sign: float) -> dict[Hashable, float]:
    return {
        tuple(result["seeds"]): sign * result["last_10"] for result in line.results if result["last_10"] is not None
    }
