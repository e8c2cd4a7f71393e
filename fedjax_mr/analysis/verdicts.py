"""Verdicts in words: which of several methods is better, by the paired seeds of their runs."""

import itertools
import json
import math
from collections.abc import Hashable, Mapping, Sequence
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
    seeds = f"{verdict.count} seed{'s' * (verdict.count != 1)}"
    interval = f"[{unit.signed(verdict.low)}, {unit.signed(verdict.high)}], {seeds}"
    if not math.isfinite(verdict.low):
        interval = f"no interval yet, {seeds}"
    shown = f"{unit.signed(verdict.mean)}{unit.words} {interval}"
    if verdict.outcome in (BETTER, WORSE):
        better, worse = (first, second) if verdict.outcome == BETTER else (second, first)
        return f"{better} is better than {worse}: {shown if better == first else _mirrored(verdict, unit, seeds)}"
    if verdict.outcome == EQUAL:
        within = f"equal within {unit.plain(margin)}{unit.words}" if margin else "equal"
        return f"{first} and {second} are {within}: {shown}"
    return f"undecided: {first} against {second}: {shown}"


def _mirrored(verdict: Verdict, unit: Unit, seeds: str) -> str:
    ends = f"[{unit.signed(-verdict.high)}, {unit.signed(-verdict.low)}]"
    return f"{unit.signed(-verdict.mean)}{unit.words} {ends}, {seeds}"


# --- Below a table ---------------------------------------------------------------------------------------------------


class Judged(NamedTuple):
    """Two lines of a table and the verdict on the first, the better one by its mean."""

    first: str
    second: str
    verdict: Verdict


def of_lines(lines: Sequence[Line], names: Sequence[str] = ()) -> list[list[Judged]]:
    """The best line against each other one, for each problem with several lines that share at least three seeds.

    Two lines have the same problem if their data, division, evaluations and rounds are the same. The best line is
    chosen by the results, so the error probability is divided by the number of all pairs of lines.

    Args:
      lines: the lines.
      names: their names. Default: as in the table.
    """
    problems: dict[str, list[tuple[str, Line]]] = {}
    for name, line in zip(names or [groups.name(line.setting) for line in lines], lines, strict=True):
        if line.finished:
            key = [problem(line.runs[0].config), line.rounds, line.metric.name]
            problems.setdefault(json.dumps(key, sort_keys=True), []).append((name, line))
    return [judged for several in problems.values() if (judged := _best_against_others(several))]


def _best_against_others(named: Sequence[tuple[str, Line]]) -> list[Judged]:
    names, lines = zip(*named, strict=True)
    sign = 1.0 if lines[0].metric.higher_is_better else -1.0
    values = [_by_seed(line, sign) for line in lines]
    pairs = [pair for pair in itertools.combinations(range(len(lines)), 2) if _shared(values, *pair) >= FEWEST]
    if not pairs:
        return []
    means = [sum(each.values()) / max(1, len(each)) for each in values]
    best = max({place for pair in pairs for place in pair}, key=lambda place: means[place])
    alpha, margin = ALPHA / len(pairs), MARGIN if lines[0].metric.unit == "fraction" else 0.0
    return [
        Judged(names[best], names[other], _judge(values[best], values[other], margin, alpha))
        for other in sorted(range(len(lines)), key=lambda place: -means[place])
        if tuple(sorted((best, other))) in pairs
    ]


def _by_seed(line: Line, sign: float) -> dict[Hashable, float]:
    return {
        tuple(result["seeds"]): sign * result["last_10"] for result in line.results if result["last_10"] is not None
    }


def _shared(values: Sequence[Mapping[Hashable, float]], first: int, second: int) -> int:
    return len(values[first].keys() & values[second].keys())


def _judge(first: Mapping[Hashable, float], second: Mapping[Hashable, float], margin: float, alpha: float) -> Verdict:
    return paired.judge(paired.differences(first, second), margin=margin, alpha=alpha)


def line(judged: Sequence[Judged], unit: Unit) -> str:
    """One line about the best of several methods: against whom it is better, equal or undecided."""
    best = judged[0].first
    if len(judged) == 1:
        margin = MARGIN if unit.words else 0.0
        return sentence(best, judged[0].second, judged[0].verdict, unit, margin=margin)
    words = {
        BETTER: "better than",
        EQUAL: f"equal within {unit.plain(MARGIN)}{unit.words} to" if unit.words else "equal to",
        UNDECIDED: "undecided against",
        WORSE: "worse than",
    }
    parts = []
    for outcome, text in words.items():
        if others := [each.second for each in judged if each.verdict.outcome == outcome]:
            more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
            parts.append(f"{text} {', '.join(others[:NAMED])}{more}")
    return f"{best} has the best mean: {'; '.join(parts)}"


def below_table(lines: Sequence[Line], names: Sequence[str] = ()) -> list[str]:
    """The verdicts below a table of accuracies, one line per problem, and how they are meant. Empty without any.

    Args:
      lines: the lines of the table.
      names: their names. Default: as in the table.
    """
    found = of_lines(lines, names)
    if not found:
        return []
    metric = lines[0].metric
    unit = Unit.of(metric.name, metric)
    about = f"(paired seeds, error probability {ALPHA:g} however often you look; differences are taken to be normal)"
    return [f"verdict: {line(judged, unit)}" for judged in found] + [about]
