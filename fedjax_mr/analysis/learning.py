"""Learning curves of runs as numbers: the mean over the seeds by panel and name, for the pictures."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_mr import plots
from fedjax_mr.analysis import groups, runs
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.config import config as configuration
from fedjax_mr.config import titles
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.tasks import METRICS

LABELS = {
    "accuracy": "test accuracy", "loss": "test loss (nats)", "train_loss": "training loss (nats)",
    "personal_accuracy": "clients' own test accuracy, mean",
    "validation_accuracy": "clients' validation accuracy, mean",
}  # fmt: skip
Line = tuple[Sequence[float], ...]  # x, y and, with several seeds, the standard deviation
CROSS = "\N{MULTIPLICATION SIGN}"  # as drawn where a seed diverged


def label_of(column: str) -> str:
    """A column in words, with its unit."""
    return LABELS.get(column) or (f"test {METRICS[column].title}" if column in METRICS else column.replace("_", " "))


class Curves(NamedTuple):
    """Curves by panel and name, the method of each name, and crosses at the last evaluations of diverged seeds."""

    panels: Mapping[str, plots.Series]
    methods: Mapping[str, str]
    crosses: Mapping[str, plots.Series]
    x_label: str


def curves(chosen: Sequence[RunRecord], *, column: str, panels: str | None = None, x: str = "rounds") -> Curves:
    """The curves of some runs.

    A curve has values of x, means and, with several seeds, standard deviations. Its name has the method, the settings
    in which the curves of a panel differ, and the number of seeds: ``FedMR (n = 3)``. Seeds that diverged are counted
    in the name. They are not part of the mean, unless all diverged.

    Args:
      chosen: runs, as `groups.find` returns them.
      column: column of the evaluations, or several, separated by commas.
      panels: the flags, separated by commas, that divide the curves into panels. Default: one panel.
      x: a key of `plots.X_UNITS`.

    Raises:
      UserError: a run has no such column, flag or x, or a run that has not diverged has no evaluation.
    """
    by_panel: dict[str, list[RunRecord]] = {}
    for run in sorted(chosen, key=lambda run: _place(run, panels)):
        by_panel.setdefault(_panel(run, panels), []).append(run)
    found: list[_Curve] = []
    for panel, in_panel in by_panel.items():
        settings = groups.by_setting(in_panel)
        for title, (_, members) in zip(groups.titles_of(settings), settings, strict=True):
            for each in _own(members, column):
                found.append(_curve(panel, _line_name(title, each, column), members, each, x))
    unit, x_label = plots.unit_of(x, max((at for curve in found for at in curve.line[0]), default=0))
    lines: dict[str, dict[str, Line]] = {panel: {} for panel in by_panel}
    crosses: dict[str, dict[str, Line]] = {panel: {} for panel in by_panel}
    methods: dict[str, str] = {}
    for curve in found:
        name = _name(curve.name, [each for each in found if each.name == curve.name])
        methods[name] = curve.method
        lines[curve.panel][name] = _in_units(curve.line, unit)
        crosses[curve.panel][name] = _in_units(curve.crosses, unit)
    return Curves(lines, methods, crosses, x_label)


def _in_units(line: Line, unit: float) -> Line:
    """A line with x divided by ``unit``. Rounds stay integers."""
    return line if unit == 1 else (np.divide(line[0], unit).tolist(), *line[1:])


def _own(members: Sequence[RunRecord], column: str) -> list[str]:
    """The columns to draw of these runs. Of several, those that all of them have, such as the number of each model."""
    columns = column.split(",")
    if len(columns) == 1:
        return columns
    rows = [row for run in members for row in run.rows_so_far()[:1]]
    return [each for each in columns if all(each in row for row in rows)]


def _line_name(name: str, column: str, columns: str) -> str:
    """The name of a line, with its column unless it is the first of several."""
    return name if column == columns.partition(",")[0] else f"{name}, {column.replace('_', ' ')}"


def _place(run: RunRecord, flags: str | None) -> list[tuple]:
    """The sort key of a run's panel: numbers by size, then words."""
    facts = titles.facts(run.config)
    values = [facts.get(name) for name in (flags.split(",") if flags else [])]
    return [(0, value) if isinstance(value, int | float) else (1, str(value)) for value in values]


def _panel(run: RunRecord, flags: str | None) -> str:
    """The title of the panel of a run."""
    names = flags.split(",") if flags else []
    known = [flag for flag in configuration.flag_names([run.config.strategy]) if flag not in titles.SEEDS]
    for name in names:
        if name not in known:
            raise unknown_name("flag in --panels", name, known)
    return ", ".join(titles.words(names, titles.facts(run.config)))


class _Curve(NamedTuple):
    """One curve of one panel: its line, the crosses of diverged seeds, and the number of seeds of each kind."""

    panel: str
    name: str
    method: str
    line: Line
    crosses: Line
    seeds: int
    diverged: int


def _curve(panel: str, name: str, members: Sequence[RunRecord], column: str, x: str) -> _Curve:
    diverged = [_history(run, column, x) for run in members if run.state == "diverged"]
    others = [_history(run, column, x) for run in members if run.state != "diverged"]
    finite = [[point for point in history.values() if math.isfinite(point[1])] for history in diverged]
    ends = [max(points) for points in finite if points]
    crosses = [at for at, _ in ends], [value for _, value in ends]
    line = _mean(others or [history for history in diverged if history])
    return _Curve(panel, name, members[0].method(), line, crosses, len(others), len(diverged))


def _history(run: RunRecord, column: str, x: str) -> dict[int, tuple[float, float]]:
    """The x and a column by round. It is empty for a run that diverged before its first evaluation."""
    rows = run.rows_so_far() if run.state == "diverged" else run.rows()
    return {row["round"]: (_place_of(run, row, x), _value(run, row, column)) for row in rows}


def _place_of(run: RunRecord, row: dict, x: str) -> float:
    if x == "rounds":
        return row["round"]
    if x == "bytes":
        return runs.bytes_sent(row)
    if row.get("clock") is None:
        raise UserError(f"{run.path} has no simulated time: train it with --fleet, or use --x=rounds")
    return row["clock"]


def _mean(histories: Sequence[dict[int, tuple[float, float]]]) -> Line:
    """The x at the rounds that all runs have, the mean and, for several runs, the sample standard deviation."""
    if not histories:
        return [], []
    rounds = sorted(set.intersection(*map(set, histories)))
    places = [[history[at][0] for history in histories] for at in rounds]
    where = [own[0] if len(set(own)) == 1 else float(np.mean(own)) for own in places]  # rounds stay integers
    values = np.array([[history[at][1] for at in rounds] for history in histories])
    if len(histories) == 1:
        return where, values[0].tolist()
    return where, values.mean(axis=0).tolist(), values.std(axis=0, ddof=1).tolist()


def _name(name: str, own: Sequence[_Curve]) -> str:
    """The name of a method's curves with the number of seeds, which may differ between panels."""
    fewest, most = min(each.seeds for each in own), max(each.seeds for each in own)
    counts = [f"n = {most}" if fewest == most else f"n = {fewest} to {most}"] if most else []
    if diverged := sum(each.diverged for each in own):
        counts.append(f"{CROSS} {diverged} diverged")
    return f"{name} ({'; '.join(counts)})"


def possible(column: str) -> tuple[float, float]:
    """The lowest and highest possible value of a column. Bands end there."""
    fraction = "accuracy" in column or (column in METRICS and METRICS[column].unit == "fraction")
    return (0.0, 1.0) if fraction else (0.0, math.inf) if "loss" in column else (-math.inf, math.inf)


def _value(run: RunRecord, row: dict, column: str) -> float:
    if column not in row:
        raise UserError(f"{run.path} has no column {column} (it has {', '.join(row)})")
    return math.nan if row[column] is None else float(row[column])
