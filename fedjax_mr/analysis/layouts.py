"""The table of accuracies in two layouts: one line per setting, or methods by settings as in a paper."""

import argparse
import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr.analysis import groups, papers, tables
from fedjax_mr.analysis.groups import Statistic
from fedjax_mr.analysis.tables import Line
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import titles
from fedjax_mr.experiment.report import last_evaluations

VALUES: dict[str, tuple[str, Callable[[Line], Statistic]]] = {
    "last_10": ("mean of {} evaluations", lambda line: line.last_10),
    "last": ("last evaluation", lambda line: line.last),
    "best": ("best evaluation", lambda line: line.best),
    "checkpoint": ("best checkpoint", lambda line: line.checkpoint),
    "personal": ("mean over the clients' own models", lambda line: line.personal),
    "finetuned": ("mean over the clients' fine-tuned models", lambda line: line.finetuned),
}
DIVISION = ("partition", "partition_file", *titles.DIVISIONS)
DATA = ("dataset", "label_mode", *DIVISION, "clients")  # never a matter of the method, so always columns
LEVELS = (("dataset", "label_mode"), ("model",), DIVISION)  # of the head; every other flag is one of its own
SAID = ("dataset", "model", "partition", "clients", "cohort", "rounds")  # in the notes if all have one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table of accuracies."""
    groups.add_arguments(parser)
    tables.add_format_argument(parser)
    parser.add_argument(
        "--target",
        type=float,
        metavar="FRACTION",
        help="list the rounds, bytes and simulated seconds until this test accuracy is reached",
    )
    parser.add_argument(
        "--round",
        type=int,
        metavar="R",
        help="compare runs after round R, whatever came after. R must be a round after which they were evaluated",
    )
    parser.add_argument(
        "--layout",
        choices=("lines", "paper"),
        default="lines",
        help="lines: one line per setting. paper: methods by settings, best in bold, second underlined. Default: lines",
    )
    parser.add_argument("--value", choices=VALUES, help="accuracy in the layout paper. Default: last_10")
    parser.add_argument(
        "--papers", action="store_true", help="print the papers' values in brackets in the layout paper"
    )


def accuracy_text(arguments: argparse.Namespace) -> str:
    """The table that the arguments of the command describe.

    Raises:
      UserError: a path holds no run, its files cannot be read, --target is out of range, or an option belongs to the
        other layout.
    """
    if arguments.target is not None and not 0 <= arguments.target <= 1:  # also true for NaN
        raise UserError(f"--target={arguments.target} is out of range (allowed: >= 0 and <= 1)")
    if arguments.layout == "lines":
        if options := [name for name in ("value", "papers") if getattr(arguments, name)]:
            raise UserError(f"--{options[0]} needs --layout=paper")
        return tables.accuracy_table(
            arguments.runs, format=arguments.format, target=arguments.target, until=arguments.round
        )
    if options := [name for name in ("target", "round") if getattr(arguments, name) is not None]:
        raise UserError(f"--{options[0]} needs --layout=lines")
    value = arguments.value or "last_10"
    return paper_table(arguments.runs, format=arguments.format, value=value, with_papers=arguments.papers)


def paper_table(
    paths: Sequence[Path | str], *, format: str = "text", value: str = "last_10", with_papers: bool = False
) -> str:
    """Accuracies in percent, with a row per method, a column per setting, and notes below.

    The best mean of a column is bold and the second underlined (``*best*`` and ``_second_`` in plain text, no marks in
    CSV). A cell states its number of seeds if that differs from the usual one, or if seeds diverged or are unfinished;
    such seeds are not part of the mean. A setting that differs between methods but has one value for each method, such
    as a learning rate, has no column. The notes state it.

    Args:
      paths: run folders, tables of kept runs, or folders that hold some.
      format: a key of `tables.FORMATS`.
      value: a key of `VALUES`.
      with_papers: print the papers' values in brackets.

    Raises:
      UserError: a path holds no run, its files cannot be read, or no run is finished.
    """
    lines = tables.accuracy_lines(groups.find(paths), published=papers.rows() if with_papers else ())
    if not any(line.finished for line in lines):
        raise UserError("no run is finished")
    grid = _arranged(lines)
    ((count, _),) = collections.Counter(line.finished for line in lines if line.finished).most_common(1)
    words, of = VALUES[value]
    numbers = [number for line in lines for number in line.evaluations if number]
    evaluations = dict.fromkeys(last_evaluations(number).replace("last", "the last") for number in sorted(numbers))
    words = words.format(" or ".join(evaluations))
    seeds = f"; mean ± standard deviation over {count} seeds" if count > 1 else "; one seed"
    notes = [f"Test accuracy in percent, {words}{seeds}.", *grid.notes]
    if any(line.diverged for line in lines):
        notes.append("Diverged: the loss or the weights were no longer finite; these seeds are not part of the mean.")
    if with_papers:
        sources = dict.fromkeys(line.published.source for line in lines if line.published)
        notes.append(f"In brackets: {'; '.join(sources) or 'no paper has a number for these settings'}.")
    cells = [[_cell(grid.lines.get((row, column)), of, count) for column in grid.columns] for row in grid.rows]
    marks = [list(row) for row in zip(*(_marks(column) for column in zip(*cells, strict=True)), strict=True)]
    return _WRITERS[format](grid, [[cell.text for cell in row] for row in cells], marks, notes)


# --- Rows and columns ------------------------------------------------------------------------------------------------

Column = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Methods by settings.

    Attributes:
      rows: names of the methods.
      columns: settings as text, one per level of the head.
      lines: lines of the table by row and column.
      notes: settings that all runs share, and those of single methods.
    """

    rows: list[str]
    columns: list[Column]
    lines: dict[tuple[str, Column], Line]
    notes: list[str]


def _arranged(lines: Sequence[Line]) -> Grid:
    known = [titles.facts(line.runs[0].config) for line in lines]
    methods = [titles.method(each) for each in known]
    flags = list(dict.fromkeys(flag for line in lines for flag in line.setting if flag != "strategy"))

    def values(flag: str, names: Sequence[str], name: str) -> set[str]:
        return {json.dumps(own.get(flag, "-")) for own, each in zip(known, names, strict=True) if each == name}

    def varies(flag: str, names: Sequence[str]) -> bool:
        return any(len(values(flag, names, name)) > 1 for name in set(names))

    own_flags = [
        [flag for flag in flags if flag.startswith((f"{each['strategy']}_", "server_")) and varies(flag, methods)]
        for each in known
    ]
    named = zip(methods, own_flags, known, strict=True)
    rows = [", ".join([name, *titles.words(own, each, brief=True)]) for name, own, each in named]
    of_methods = set(itertools.chain.from_iterable(own_flags))
    others = [flag for flag in flags if flag not in of_methods]
    across = [flag for flag in others if flag in DATA or varies(flag, rows)]
    levels = [[flag for flag in level if flag in across] for level in LEVELS]
    levels += [[flag] for flag in across if not any(flag in level for level in LEVELS)]
    columns = [tuple(", ".join(titles.words(level, each)) for level in levels if level) for each in known]
    cells = [" | ".join((row, *column)) for row, column in zip(rows, columns, strict=True)]
    if any(apart := titles.differences(cells, known)):  # settings that the words above do not tell apart
        columns = [(*column, text) for column, text in zip(columns, apart, strict=True)]
    # The types first: values of two types, such as a number and None, have no order.
    values_of = lambda own: [(type(own.get(flag)).__name__, own.get(flag)) for level in levels for flag in level]
    places = {column: values_of(own) for column, own in zip(columns, known, strict=True)}
    same = [flag for flag in SAID if flag not in flags and not (flag == "partition" and {*flags} & {*DIVISION})]
    notes = [f"All: {words}." for words in [", ".join(titles.words(same, known[0]))] if words]
    notes += _of_methods([flag for flag in others if flag not in across], methods, known)
    ordered = sorted(places, key=lambda column: places[column])
    return Grid(
        list(dict.fromkeys(rows)), ordered, dict(zip(zip(rows, columns, strict=True), lines, strict=True)), notes
    )


def _of_methods(flags: Sequence[str], methods: Sequence[str], known: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes on settings of single methods that differ from the most common value."""
    settings = dict(zip(methods, known, strict=True))
    sharing: dict[str, list[str]] = {}
    for method, own in settings.items():
        apart = []
        for flag in flags:
            values = collections.Counter(json.dumps(each.get(flag, "-")) for each in settings.values())
            if json.dumps(own.get(flag, "-")) != values.most_common(1)[0][0]:
                apart.append(flag)
        sharing.setdefault(", ".join(titles.words(apart, own)), []).append(method)
    return [f"{', '.join(names)}: {words}." for words, names in sharing.items() if words]


class Cell(NamedTuple):
    """A cell: its text, and its mean as printed, which is compared with others. "" if there is none."""

    text: str
    mean: str


def _cell(line: Line | None, of: Callable[[Line], Statistic], count: int) -> Cell:
    if line is None:
        return Cell("", "")
    text = tables.percent(of(line))
    if not text and not line.finished:
        return Cell("diverged" if line.diverged else "unfinished", "")
    mean = text.partition(" ")[0]
    if text and (line.finished != count or line.diverged or line.unfinished):
        text += f" (n = {tables.seeds(line)})"
    if line.published:
        text += f" [{tables.plus_minus(line.published.mean, line.published.deviation, digits=2)}]"
    return Cell(text, mean)


BEST, SECOND = "best", "second"


def _marks(cells: Sequence[Cell]) -> list[str]:
    """The mark of each cell of a column: the best of several, the second of more than two, or ""."""
    means = sorted({float(cell.mean) for cell in cells if cell.mean}, reverse=True)
    with_mean = sum(bool(cell.mean) for cell in cells)
    names = {means[0]: BEST} if with_mean > 1 else {}
    if with_mean > 2 and len(means) > 1:
        names[means[1]] = SECOND
    return [names.get(float(cell.mean), "") if cell.mean else "" for cell in cells]


# --- Formats ---------------------------------------------------------------------------------------------------------

Texts = Sequence[Sequence[str]]


def _flat(grid: Grid, texts: Texts, marks: Texts, marked: Mapping[str, str]) -> list[list[str]]:
    """Cells of a table with one line of head. A mark is written around the number of a cell."""
    head = [", ".join(filter(None, column)) or "accuracy %" for column in grid.columns]
    rows = [
        [name, *(marked.get(mark, "{}").format(text) for text, mark in zip(own, each, strict=True))]
        for name, own, each in zip(grid.rows, texts, marks, strict=True)
    ]
    return [["method", *head], *rows]


def _as_text(grid: Grid, texts: Texts, marks: Texts, notes: Sequence[str]) -> str:
    table = tables.aligned(_flat(grid, texts, marks, {BEST: "*{}*", SECOND: "_{}_"}))
    return "\n".join([table, "", *notes, "*best*, _second_"])


def _as_markdown(grid: Grid, texts: Texts, marks: Texts, notes: Sequence[str]) -> str:
    table = tables.markdown(_flat(grid, texts, marks, {BEST: "**{}**", SECOND: "<u>{}</u>"}))
    return "\n".join([table, "", *notes])


def _as_csv(grid: Grid, texts: Texts, marks: Texts, notes: Sequence[str]) -> str:
    return tables.comma_separated(_flat(grid, texts, marks, {}))


def _as_latex(grid: Grid, texts: Texts, marks: Texts, notes: Sequence[str]) -> str:
    """A ``tabular`` with one line of head per level and rules of the package booktabs."""
    commands = {BEST: r"\textbf{{{}}}", SECOND: r"\underline{{{}}}"}
    levels = max(1, len(grid.columns[0]))
    head = []
    for level in range(levels):
        last = level == levels - 1
        groups_of = [
            (key[-1] if key else "Accuracy (%)", len(list(members)))
            for key, members in itertools.groupby(grid.columns, key=lambda column: column[: level + 1])
        ]
        spans = [
            text if count == 1 else rf"\multicolumn{{{count}}}{{c}}{{{text}}}" for text, count in _escaped(groups_of)
        ]
        head.append(" & ".join(["Method" if last else "", *spans]) + r" \\")
        if not last:
            ends = list(itertools.accumulate((count for _, count in groups_of), initial=1))
            spans = [(first + 1, end) for first, end in itertools.pairwise(ends) if end > first + 1]
            head += [" ".join(rf"\cmidrule(lr){{{first}-{end}}}" for first, end in spans)] if spans else []
    body = [
        " & ".join(
            [
                tables.escaped(name),
                *(commands.get(mark, "{}").format(tables.escaped(text)) for text, mark in zip(own, each, strict=True)),
            ]
        )
        + r" \\"
        for name, own, each in zip(grid.rows, texts, marks, strict=True)
    ]
    return "\n".join(
        [
            *(f"% {note}" for note in notes),
            rf"\begin{{tabular}}{{l{'c' * len(grid.columns)}}}",
            r"\toprule",
            *head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _escaped(pairs: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(tables.escaped(text), count) for text, count in pairs]


_WRITERS: dict[str, Any] = {"text": _as_text, "markdown": _as_markdown, "csv": _as_csv, "latex": _as_latex}
