"""Tables as plain text, Markdown, CSV or LaTeX, and the table of accuracies with the papers' values.

A table is a sequence of rows of cells. The first row has the titles of the columns. (`tabulate` has these formats, too,
but its Markdown has other bytes, and its LaTeX no notes and no head of several lines.)
"""

import argparse
import csv
import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr.analysis import groups, papers
from fedjax_mr.analysis.groups import Statistic
from fedjax_mr.analysis.papers import Published
from fedjax_mr.analysis.runs import RunRecord, bytes_sent
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.report import LAST, last_evaluations, summarise
from fedjax_mr.results.rows import best_row, metric_of
from fedjax_mr.tasks import METRICS, Metric

USUAL_ROUNDS = 500  # of our flag files; the papers state none
NEEDED = ("loss", "bytes_down", "bytes_up")  # columns of every evaluation that the table reads

# --- Cells -----------------------------------------------------------------------------------------------------------


def shown(value: Statistic, metric: Metric) -> str:
    """A value of a metric over the seeds, such as ``58.47 ± 0.14``.

    Fractions are in percent, others as they are with four digits of the mean.
    """
    if metric.unit == "fraction":
        return plus_minus(*(None if part is None else 100 * part for part in value), digits=2)
    mean = abs(value.mean or 0.0)
    return plus_minus(*value, digits=max(0, 3 - math.floor(math.log10(mean))) if mean else 3)


def plus_minus(mean: float | None, deviation: float | None, *, digits: int) -> str:
    """A mean and its standard deviation as text. Unknown parts are left out."""
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table in aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()

    return "\n".join(map(line, rows))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *body = [[text.replace("|", r"\|") for text in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def comma_separated(rows: Sequence[Sequence[str]]) -> str:
    """A table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().removesuffix("\n")


def escaped(text: str) -> str:
    """A text with the special characters of LaTeX escaped."""
    signs = {sign: rf"\{sign}" for sign in "%_&#${}"} | {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"}
    return text.translate(str.maketrans(signs | {"±": r"$\pm$"}))


def latex(rows: Sequence[Sequence[str]]) -> str:
    """A table as a LaTeX ``tabular`` with rules of the package booktabs."""
    head, *body = [list(map(escaped, row)) for row in rows]
    return tabular("l" + "r" * (len(head) - 1), [" & ".join(head) + r" \\"], body)


def tabular(alignment: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A ``tabular`` from the lines of its head and the cells of its body."""
    rows = [" & ".join(row) + r" \\" for row in body]
    begin = rf"\begin{{tabular}}{{{alignment}}}"
    return "\n".join([begin, r"\toprule", *head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"])


def filled(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows without the columns that have only a title."""
    shown = [position for position, column in enumerate(zip(*rows, strict=True)) if any(column[1:])]
    return [[row[position] for position in shown] for row in rows]


FORMATS: dict[str, Callable[[Sequence[Sequence[str]]], str]] = {
    "text": aligned,
    "markdown": markdown,
    "csv": comma_separated,
    "latex": latex,
}


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a format in `FORMATS`."""
    parser.add_argument("--format", choices=FORMATS, default="text", help="format of the table. Default: text")


# --- Accuracies ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """One setting of the table of accuracies, over its seeds.

    Attributes:
      setting: the strategy, and the values by flag in which the line differs from others.
      runs: its runs, sorted by seed.
      results: what each finished run contributes, by the columns of `results_of`.
      diverged, unfinished: number of other runs.
      published: the paper's value for this setting, or None.
    """

    setting: dict[str, Any]
    runs: tuple[RunRecord, ...]
    results: tuple[dict[str, Any], ...]
    diverged: int
    unfinished: int
    published: Published | None

    def of(self, column: str) -> Statistic:
        """The statistic of a column over the finished runs; None if one of them lacks it."""
        return Statistic.of(result[column] for result in self.results)

    @property
    def metric(self) -> Metric:
        """The metric of its finished runs."""
        return self.results[0]["metric"] if self.results else METRICS["accuracy"]

    @property
    def finished(self) -> int:
        """Number of runs that enter the statistics."""
        return len(self.results)

    @property
    def rounds(self) -> int:
        """Rounds of the longest finished run."""
        return max((result["rounds"] for result in self.results), default=0)


def accuracy_lines(
    chosen: Sequence[RunRecord],
    *,
    target: float | None = None,
    until: int | None = None,
    published: Sequence[Mapping[str, str]] = (),
) -> list[Line]:
    """The lines of the table of accuracies.

    Args:
      chosen: runs, as `groups.find` returns them.
      target: accuracy to reach, a fraction; or value of the first metric.
      until: a round at which all runs are taken to end, whatever came after. Default: the end of each run.
      published: rows of the papers' tables, as `papers.rows` returns them.
    """
    lines = []
    for setting, members in groups.by_setting(chosen):
        members = sorted(members, key=lambda run: run.config.seed)
        states = [_state(run, until) for run in members]
        results = [
            results_of(run, target, until) for run, state in zip(members, states, strict=True) if state == "finished"
        ]
        diverged = states.count("diverged")
        unfinished = len(states) - len(results) - diverged
        number = papers.lookup(members[0].config, published)
        lines.append(Line(setting, tuple(members), tuple(results), diverged, unfinished, number))
    return lines


def results_of(run: RunRecord, target: float | None = None, until: int | None = None) -> dict[str, Any]:
    """The results of a run by column; None if unknown. Accuracies are fractions.

    Values of the first metric, such as the accuracy: of the ``last`` evaluation, of the ``best`` one, the mean of the
    ``last_10``, and of the ``checkpoint`` that ``keep_best`` keeps. ``personal`` and ``finetuned`` are means over the
    clients of the final value on their own test samples, before and after fine-tuning. The first evaluation that
    reaches the target decides ``rounds_to_target``, ``bytes_to_target`` (in all directions) and ``seconds_to_target``
    (simulated).

    Raises:
      UserError: an evaluation lacks a column that the table needs.
    """
    rows = [row for row in run.rows() if until is None or row["round"] <= until]
    metric = metric_of(rows)
    if missing := [name for row in rows for name in (metric.name, *NEEDED) if name not in row]:
        raise UserError(f"{run.path} is damaged (an evaluation has no {missing[0]})")
    summary = summarise(rows, target)
    best = best_row(rows) if run.config.keep_best else None
    reached = next((row for row in rows if row["round"] == summary["rounds_to_target"]), None)
    return {
        "seeds": groups.seeds(run.config),
        "rounds": summary["rounds"],
        "evaluations": len(rows),
        "metric": metric,
        "last": summary[f"{metric.name}_last"],
        "best": summary[f"{metric.name}_best"],
        "last_10": summary[f"{metric.name}_mean_last_10"],
        "checkpoint": best and best[metric.name],
        "personal": rows[-1].get(f"personal_{metric.name}"),
        "finetuned": run.summary().get(f"finetuned_{metric.name}") if until is None else None,
        "clock": rows[-1].get("clock"),
        "rounds_to_target": summary["rounds_to_target"],
        "bytes_to_target": reached and bytes_sent(reached),
        "seconds_to_target": reached and reached.get("clock"),
    }


def _state(run: RunRecord, until: int | None) -> str:
    """The state of a run, or what it was after a round."""
    if until is not None and any(row["round"] == until for row in run.rows_so_far()):
        return "finished"
    return "started" if until is not None and run.state == "finished" else run.state


def accuracy_cells(lines: Sequence[Line], *, target: float | None = None) -> list[list[str]]:
    """The table of accuracies as cells, its head first. Empty columns are left out.

    Runs that are judged by another metric have its name in a column. Fractions are in percent. The difference is in
    percentage points: the mean of the last ten evaluations minus the paper's value; the cell names a number of rounds
    below 500. If a run has at most ten evaluations, the cell says that the mean is of all.
    """
    fractions = all(line.metric.unit == "fraction" for line in lines)
    unit, of = " %" if fractions else "", lambda column: lambda line: shown(line.of(column), line.metric)
    columns: dict[str, Callable[[Line], str]] = {
        "setting": lambda line: groups.name(line.setting),
        "metric": lambda line: line.metric.title if line.metric.name != "accuracy" else "",
        "seeds": seeds,
        "rounds": lambda line: str(line.rounds) if line.finished else "",
        f"last{unit}": of("last"),
        f"best{unit}": of("best"),
        f"last 10{unit}": _last_10,
        f"best checkpoint{unit}": of("checkpoint"),
        f"clients' own{unit}": of("personal"),
        f"fine-tuned{unit}": of("finetuned"),
    }
    if target is not None:
        goal = 100 * target if fractions else target
        columns |= {
            f"rounds to {goal:g}{unit}": lambda line: _to_target(line, "rounds_to_target", 1, 0),
            "MB to it": lambda line: _to_target(line, "bytes_to_target", 1e6, 1),
            "simulated s to it": lambda line: _to_target(line, "seconds_to_target", 1, 0) if _is_clocked(line) else "",
        }
    columns |= {
        "paper %": lambda line: paper(line.published),
        "difference": _difference,
        "paper": lambda line: line.published.source if line.published else "",
    }
    return filled([list(columns), *([show(line) for show in columns.values()] for line in lines)])


def seeds(line: Line) -> str:
    """Number of finished seeds, if any, and of the others: ``3``, ``2, 1 diverged``, ``1 unfinished``."""
    others = {"diverged": line.diverged, "unfinished": line.unfinished}
    finished = [str(line.finished)] if line.finished else []
    return ", ".join([*finished, *(f"{count} {word}" for word, count in others.items() if count)])


def _last_10(line: Line) -> str:
    text, counts = shown(line.of("last_10"), line.metric), sorted(result["evaluations"] for result in line.results)
    if not text or counts[0] > LAST:
        return text
    return f"{text} ({' or '.join(dict.fromkeys(map(last_evaluations, (counts[0], counts[-1]))))})"


def _is_clocked(line: Line) -> bool:
    """Whether a run has simulated time."""
    return any(result["clock"] is not None for result in line.results)


def _to_target(line: Line, column: str, unit: float, digits: int) -> str:
    reached = sum(result["rounds_to_target"] is not None for result in line.results)
    if reached < line.finished:
        return f"{reached} of {line.finished} reach it"
    return plus_minus(*(None if part is None else part / unit for part in line.of(column)), digits=digits)


def paper(number: Published | None) -> str:
    """A paper's value in percent, or nothing."""
    return plus_minus(number.mean, number.deviation, digits=2) if number else ""


def _difference(line: Line) -> str:
    mean = line.of("last_10").mean
    if line.published is None or mean is None:
        return ""
    difference = f"{100 * mean - line.published.mean:+.2f}"
    return difference if line.rounds >= USUAL_ROUNDS else f"{difference} after {line.rounds} rounds"


def accuracy_table(
    paths: Iterable[Path | str],
    *,
    format: str = "text",
    target: float | None = None,
    until: int | None = None,
    notes: Callable[[Sequence[Line]], Sequence[str]] | None = None,
) -> str:
    """The table of accuracies of some runs as text.

    Args:
      paths: run folders, tables of kept runs, or folders that hold some.
      format: a key of `FORMATS`.
      target: accuracy to reach, a fraction; or value of the first metric.
      until: a round at which all runs are taken to end.
      notes: makes lines of text that follow a table as plain text from the lines of the table.

    Raises:
      UserError: a path holds no run, its files cannot be read, no run was evaluated after round ``until``, or the
        target is negative, NaN, or above 1 for a share.
    """
    chosen = groups.find(paths)
    lines = accuracy_lines(chosen, target=target, until=until, published=papers.rows())
    high = 1 if any(line.metric.unit == "fraction" for line in lines) else math.inf
    if target is not None and not 0 <= target <= high:  # also true for NaN
        raise UserError(f"--target={target} is out of range (allowed: >= 0{' and <= 1' if high == 1 else ''})")
    if until is not None and not any(line.finished for line in lines):
        rounds = sorted(
            {row["round"] for run in chosen for row in run.rows_so_far()}, key=lambda round: abs(round - until)
        )
        nearest = ", ".join(map(str, sorted(rounds[:3]))) or "none"
        raise UserError(f"no run was evaluated after round {until}: choose another --round (the nearest: {nearest})")
    table = FORMATS[format](accuracy_cells(lines, target=target))
    below = notes(lines) if notes is not None and format == "text" else ()
    return "\n".join([table, "", *below]) if below else table
