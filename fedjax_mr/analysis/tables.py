"""Tables as plain text, Markdown, CSV or LaTeX, and the table of accuracies with the papers' values.

A table is a sequence of rows of cells. The first row has the titles of the columns.
"""

import argparse
import csv
import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr.analysis import groups, papers
from fedjax_mr.analysis.groups import Statistic
from fedjax_mr.analysis.papers import Published
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import MetricsRow
from fedjax_mr.experiment.report import LAST, last_evaluations, summarise
from fedjax_mr.experiment.rows import best_row

USUAL_ROUNDS = 500  # of our flag files; the papers state none
NEEDED = ("accuracy", "loss", "bytes_down", "bytes_up")  # columns of every evaluation that the table reads

# --- Cells -----------------------------------------------------------------------------------------------------------


def percent(value: Statistic) -> str:
    """A fraction over the seeds in percent, such as ``58.47 ± 0.14``."""
    return plus_minus(*(None if part is None else 100 * part for part in value), digits=2)


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
    head, *body = [" & ".join(map(escaped, row)) + r" \\" for row in rows]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"])


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
    """One setting of the table of accuracies, over its seeds. Accuracies are fractions.

    Attributes:
      setting: the strategy, and the values by flag in which the line differs from others.
      runs: its runs, sorted by seed.
      finished, diverged, unfinished: number of runs. Only finished runs enter the statistics.
      last, best, last_10: accuracy of the last evaluation, of the best one, and mean of the last ten.
      checkpoint: accuracy of the checkpoint that ``keep_best`` keeps, known if all runs have this setting.
      evaluations: the smallest and the largest number of evaluations of a finished run. With at most ten, ``last_10``
        is the mean of all.
      personal, finetuned: mean over the clients of the final accuracy on their own test samples, before and after
        fine-tuning.
      rounds: rounds of the finished runs.
      reached: number of finished runs that reached the target accuracy.
      rounds_to_target, bytes_to_target, seconds_to_target: known if all finished runs reached it. Bytes of both
        directions; seconds of simulated time.
      clocked: whether the runs have simulated time.
      published: the paper's value for this setting, or None.
    """

    setting: dict[str, Any]
    runs: tuple[RunRecord, ...]
    finished: int
    diverged: int
    unfinished: int
    last: Statistic
    best: Statistic
    last_10: Statistic
    checkpoint: Statistic
    evaluations: tuple[int, int]
    personal: Statistic
    finetuned: Statistic
    rounds: int
    reached: int
    rounds_to_target: Statistic
    bytes_to_target: Statistic
    seconds_to_target: Statistic
    clocked: bool
    published: Published | None


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
      target: accuracy to reach, a fraction.
      until: a round at which all runs are taken to end, whatever came after. Default: the end of each run.
      published: rows of the papers' tables, as `papers.rows` returns them.
    """
    return [_line(setting, members, target, until, published) for setting, members in groups.by_setting(chosen)]


def _line(
    setting: dict,
    chosen: Sequence[RunRecord],
    target: float | None,
    until: int | None,
    published: Sequence[Mapping[str, str]],
) -> Line:
    chosen = sorted(chosen, key=lambda run: run.config.seed)
    states = [_state(run, until) for run in chosen]
    ended = [run for run, state in zip(chosen, states, strict=True) if state == "finished"]
    histories = [_history(run, until) for run in ended]
    summaries = [summarise(rows, target) for rows in histories]
    reached = [_first_at(rows, target) for rows in histories]
    return Line(
        setting=setting,
        runs=tuple(chosen),
        finished=len(histories),
        diverged=states.count("diverged"),
        unfinished=states.count("started") + states.count("new"),
        last=Statistic.of(each["accuracy_last"] for each in summaries),
        best=Statistic.of(each["accuracy_best"] for each in summaries),
        last_10=Statistic.of(each["accuracy_mean_last_10"] for each in summaries),
        checkpoint=Statistic.of(_of_best(run, rows) for run, rows in zip(ended, histories, strict=True)),
        evaluations=(min(map(len, histories), default=0), max(map(len, histories), default=0)),
        personal=Statistic.of(rows[-1].get("personal_accuracy") for rows in histories),
        finetuned=Statistic.of(run.summary().get("finetuned_accuracy") if until is None else None for run in ended),
        rounds=max((each["rounds"] for each in summaries), default=0),
        reached=sum(row is not None for row in reached),
        rounds_to_target=Statistic.of(row["round"] if row else None for row in reached),
        bytes_to_target=Statistic.of(_bytes(row) if row else None for row in reached),
        seconds_to_target=Statistic.of(row.get("clock") if row else None for row in reached),
        clocked=any("clock" in rows[-1] for rows in histories),
        published=papers.lookup(chosen[0].config, published),
    )


def _history(run: RunRecord, until: int | None) -> list[MetricsRow]:
    """The evaluations of a run up to a round.

    Raises:
      UserError: one lacks a column that the table needs.
    """
    rows = [row for row in run.rows() if until is None or row["round"] <= until]
    if missing := [name for row in rows for name in NEEDED if name not in row]:
        raise UserError(f"{run.path} is damaged (an evaluation has no {missing[0]})")
    return rows


def _state(run: RunRecord, until: int | None) -> str:
    """The state of a run, or what it was after a round."""
    if until is not None and any(row["round"] == until for row in run.rows_so_far()):
        return "finished"
    return "started" if until is not None and run.state == "finished" else run.state


def _of_best(run: RunRecord, rows: Sequence[MetricsRow]) -> float | None:
    """The accuracy of the best checkpoint of a run, or None if the run does not keep it."""
    best = best_row(rows) if run.config.keep_best else None
    return None if best is None else best["accuracy"]


def _first_at(rows: Iterable[MetricsRow], target: float | None) -> MetricsRow | None:
    """The first evaluation that reaches an accuracy, or None."""
    if target is None:
        return None
    return next((row for row in rows if (row["accuracy"] or 0.0) >= target), None)


def _bytes(row: MetricsRow) -> int:
    """Bytes sent in all directions up to an evaluation."""
    return row["bytes_down"] + row["bytes_up"] + row.get("bytes_peer", 0)


def accuracy_cells(lines: Sequence[Line], *, target: float | None = None) -> list[list[str]]:
    """The table of accuracies as cells, its head first. Empty columns are left out.

    Accuracies are in percent. The difference is in percentage points: the mean of the last ten evaluations minus the
    paper's value; the cell names a number of rounds below 500. If a run has at most ten evaluations, the cell says that
    the mean is of all.
    """
    columns: dict[str, Callable[[Line], str]] = {
        "setting": lambda line: groups.name(line.setting),
        "seeds": seeds,
        "rounds": lambda line: str(line.rounds) if line.finished else "",
        "last %": lambda line: percent(line.last),
        "best %": lambda line: percent(line.best),
        "last 10 %": _last_10,
        "best checkpoint %": lambda line: percent(line.checkpoint),
        "clients' own %": lambda line: percent(line.personal),
        "fine-tuned %": lambda line: percent(line.finetuned),
    }
    if target is not None:
        columns |= {
            f"rounds to {100 * target:g} %": lambda line: _to_target(line, line.rounds_to_target, 1, 0),
            "MB to it": lambda line: _to_target(line, line.bytes_to_target, 1e6, 1),
            "simulated s to it": lambda line: _to_target(line, line.seconds_to_target, 1, 0) if line.clocked else "",
        }
    columns |= {
        "paper %": lambda line: _paper(line.published),
        "difference": _difference,
        "paper": lambda line: line.published.source if line.published else "",
    }
    filled = {head: [show(line) for line in lines] for head, show in columns.items()}
    filled = {head: texts for head, texts in filled.items() if any(texts) or head == "setting"}
    return [list(filled), *map(list, zip(*filled.values(), strict=True))]


def seeds(line: Line) -> str:
    """Number of finished seeds, if any, and of the others: ``3``, ``2, 1 diverged``, ``1 unfinished``."""
    others = {"diverged": line.diverged, "unfinished": line.unfinished}
    finished = [str(line.finished)] if line.finished else []
    return ", ".join([*finished, *(f"{count} {word}" for word, count in others.items() if count)])


def _last_10(line: Line) -> str:
    shown, names = percent(line.last_10), dict.fromkeys(map(last_evaluations, line.evaluations))
    return f"{shown} ({' or '.join(names)})" if shown and line.evaluations[0] <= LAST else shown


def _to_target(line: Line, value: Statistic, unit: float, digits: int) -> str:
    if line.finished and line.reached < line.finished:
        return f"{line.reached} of {line.finished} reach it"
    return plus_minus(*(None if part is None else part / unit for part in value), digits=digits)


def _paper(number: Published | None) -> str:
    return plus_minus(number.mean, number.deviation, digits=2) if number else ""


def _difference(line: Line) -> str:
    if line.published is None or line.last_10.mean is None:
        return ""
    difference = f"{100 * line.last_10.mean - line.published.mean:+.2f}"
    return difference if line.rounds >= USUAL_ROUNDS else f"{difference} after {line.rounds} rounds"


def accuracy_table(
    paths: Iterable[Path | str], *, format: str = "text", target: float | None = None, until: int | None = None
) -> str:
    """The table of accuracies of some runs as text.

    Args:
      paths: run folders, tables of kept runs, or folders that hold some.
      format: a key of `FORMATS`.
      target: accuracy to reach, a fraction.
      until: a round at which all runs are taken to end.

    Raises:
      UserError: a path holds no run, its files cannot be read, or no run was evaluated after round ``until``.
    """
    chosen = groups.find(paths)
    lines = accuracy_lines(chosen, target=target, until=until, published=papers.rows())
    if until is not None and not any(line.finished for line in lines):
        rounds = sorted(
            {row["round"] for run in chosen for row in run.rows_so_far()}, key=lambda round: abs(round - until)
        )
        nearest = ", ".join(map(str, sorted(rounds[:3]))) or "none"
        raise UserError(f"no run was evaluated after round {until}: choose another --round (the nearest: {nearest})")
    return FORMATS[format](accuracy_cells(lines, target=target))
