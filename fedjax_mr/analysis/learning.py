"""Learning curves of runs: the mean over the seeds by panel and name, as numbers and in Matplotlib axes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Curves(NamedTuple):
    """Curves by panel and name.

    Attributes:
      panels: the curves.
      methods: method of each name.
      crosses: points at the last evaluations of diverged seeds, by panel and name.
      x_label, y_label: the quantities, with their units.
      possible: lowest and highest possible value of y. Bands end there.
    """

    panels: Mapping[str, plots.Series]
    methods: Mapping[str, str]
    crosses: Mapping[str, plots.Series]
    x_label: str
    y_label: str
    possible: tuple[float, float]


def plot_curves(
    paths: Path | str | Iterable[Path | str],
    *,
    column: str | None = None,
    x: str = "rounds",
    colours: Mapping[str, str] | None = None,
    ax: Any = None,
) -> Any:
    """Draw learning curves: the mean over the seeds with a band of one standard deviation.

    Args:
      paths: a run folder, a table of kept runs or a folder that holds some, or several of these.
      column: column of the evaluations. Default: the first metric, such as the accuracy.
      x: ``rounds``, ``clock`` (simulated time) or ``bytes``.
      colours: colours by method or by name of the curve. Default: those of the methods.
      ax: Matplotlib axes. Default: those of a new figure of pyplot.

    Returns:
      The axes, with a legend. They can be changed as any other axes.

    Raises:
      UserError: a path holds no run, or a run has no such column or x.
    """
    if x not in plots.X_UNITS:
        raise UserError(f"x={x} is none of {', '.join(plots.X_UNITS)}")
    chosen = groups.find(paths)
    drawn = curves(chosen, column=column or chosen[0].metric().name, x=x)
    (series,) = drawn.panels.values()
    axis = plots.new_axes() if ax is None else ax
    names = plots.coloured(plots.looks(series, drawn.methods), drawn.methods, plots.Design(colours=colours or {}))
    artists = plots.draw(axis, series, names, possible=drawn.possible, styled=True)
    axis.set(xlabel=drawn.x_label, ylabel=drawn.y_label)
    axis.legend(artists.values(), artists)
    return axis


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
    columns, flags = column.split(","), panels.split(",") if panels else []
    by_panel: dict[str, list[RunRecord]] = {}
    for run in sorted(chosen, key=lambda run: _place(run, flags)):
        by_panel.setdefault(_panel(run, flags), []).append(run)
    found: list[_Curve] = []
    for panel, in_panel in by_panel.items():
        settings = groups.by_setting(in_panel)
        for title, (_, members) in zip(groups.titles_of(settings), settings, strict=True):
            for each in columns if len(columns) == 1 else _shared(members, columns):
                name = title if each == columns[0] else f"{title}, {each.replace('_', ' ')}"
                found.append(_curve(panel, name, members, each, x))
    unit, x_label = plots.unit_of(x, max((at for curve in found for at in curve.line[0]), default=0))
    lines: dict[str, dict[str, Line]] = {panel: {} for panel in by_panel}
    crosses: dict[str, dict[str, Line]] = {panel: {} for panel in by_panel}
    methods: dict[str, str] = {}
    for curve in found:
        name = _name(curve.name, [each for each in found if each.name == curve.name])
        methods[name] = curve.method
        lines[curve.panel][name] = _in_units(curve.line, unit)
        crosses[curve.panel][name] = _in_units(curve.crosses, unit)
    return Curves(lines, methods, crosses, x_label, _label(columns[0]), _possible(columns[0]))


def _label(column: str) -> str:
    """A column in words, with its unit."""
    return LABELS.get(column) or (f"test {METRICS[column].title}" if column in METRICS else column.replace("_", " "))


def _possible(column: str) -> tuple[float, float]:
    fraction = "accuracy" in column or (column in METRICS and METRICS[column].unit == "fraction")
    return (0.0, 1.0) if fraction else (0.0, math.inf) if "loss" in column else (-math.inf, math.inf)


def _in_units(line: Line, unit: float) -> Line:
    """A line with x divided by ``unit``. Rounds stay integers."""
    return line if unit == 1 else (np.divide(line[0], unit).tolist(), *line[1:])


def _shared(members: Sequence[RunRecord], columns: Sequence[str]) -> list[str]:
    """The columns that all of these runs have, such as those of single models."""
    rows = [row for run in members for row in run.rows_so_far()[:1]]
    return [column for column in columns if all(column in row for row in rows)]


def _place(run: RunRecord, flags: Sequence[str]) -> list[tuple]:
    """The sort key of a run's panel: numbers by size, then words."""
    facts = titles.facts(run.config)
    values = [facts.get(flag) for flag in flags]
    return [(0, value) if isinstance(value, int | float) else (1, str(value)) for value in values]


def _panel(run: RunRecord, flags: Sequence[str]) -> str:
    """The title of the panel of a run."""
    known = [flag for flag in configuration.flag_names([run.config.strategy]) if flag not in titles.SEEDS]
    if unknown := [flag for flag in flags if flag not in known]:
        raise unknown_name("flag in --panels", unknown[0], known)
    return ", ".join(titles.words(flags, titles.facts(run.config)))


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


def _value(run: RunRecord, row: dict, column: str) -> float:
    if column not in row:
        raise UserError(f"{run.path} has no column {column} (it has {', '.join(row)})")
    return math.nan if row[column] is None else float(row[column])
