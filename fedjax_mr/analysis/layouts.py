"""The table of accuracies as a paper prints it: methods by settings."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr.analysis import groups, papers, tables
from fedjax_mr.analysis.tables import Line
from fedjax_mr.config import titles
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.report import last_evaluations

VALUES = {
    "last_10": "mean of {} evaluations",
    "last": "last evaluation",
    "best": "best evaluation",
    "checkpoint": "best checkpoint",
    "personal": "mean over the clients' own models",
    "finetuned": "mean over the clients' fine-tuned models",
}
DIVISION = ("partition", "partition_file", *titles.DIVISIONS)
DATA = ("dataset", "label_mode", *DIVISION, "clients")  # never a matter of the method, so always columns
LEVELS = (("dataset", "label_mode"), ("model",), DIVISION)  # of the head; every other flag is one of its own
MARKS = {
    "text": ("*{}*", "_{}_"),
    "markdown": ("**{}**", "<u>{}</u>"),
    "csv": ("{}", "{}"),
    "latex": (r"\textbf{{{}}}", r"\underline{{{}}}"),
}  # of the best and the second in a column
SAID = ("dataset", "model", "partition", "clients", "cohort", "rounds")  # in the notes if all have one


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
    numbers = sorted(result["evaluations"] for line in lines for result in line.results)
    evaluations = dict.fromkeys(last_evaluations(number).replace("last", "the last") for number in numbers)
    words = VALUES[value].format(" or ".join(evaluations))
    seeds = f"; mean ± standard deviation over {count} seeds" if count > 1 else "; one seed"
    titles_of = dict.fromkeys(line.metric for line in lines if line.finished)
    units = [f"test {each.title}{' in percent' if each.unit == 'fraction' else ''}" for each in titles_of]
    named, only = " or ".join(units), next(iter(titles_of))
    quantity = f"{only.title} %" if only.unit == "fraction" else only.title
    notes = [f"{named[0].upper()}{named[1:]}, {words}{seeds}.", *grid.notes]
    if any(line.diverged for line in lines):
        notes.append("Diverged: the loss or the weights were no longer finite; these seeds are not part of the mean.")
    if with_papers:
        sources = dict.fromkeys(line.published.source for line in lines if line.published)
        notes.append(f"In brackets: {'; '.join(sources) or 'no paper has a number for these settings'}.")
    cells = [[_cell(grid.lines.get((row, column)), value, count) for column in grid.columns] for row in grid.rows]
    escape = tables.escaped if format == "latex" else str
    higher = all(each.higher_is_better for each in titles_of)
    columns = [_marked(column, escape, *MARKS[format], higher=higher) for column in zip(*cells, strict=True)]
    body = [[escape(name), *texts] for name, *texts in zip(grid.rows, *columns, strict=True)]
    if format == "latex":
        table = tables.tabular("l" + "c" * len(columns), _latex_head(grid.columns), body)
        return "\n".join([*(f"% {note}" for note in notes), table])
    head = ["method", *(", ".join(filter(None, column)) or quantity for column in grid.columns)]
    table = tables.FORMATS[format]([head, *body])
    if format == "csv":
        return table
    return "\n".join([table, "", *notes, *(["*best*, _second_"] if format == "text" else [])])


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

    def varies(flag: str, names: Sequence[str]) -> bool:
        """Whether a flag has several values in lines of the same name."""
        pairs = {(name, json.dumps(own.get(flag, "-"))) for name, own in zip(names, known, strict=True)}
        return len(pairs) > len(set(names))

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


def _cell(line: Line | None, value: str, count: int) -> Cell:
    if line is None:
        return Cell("", "")
    text = tables.shown(line.of(value), line.metric)
    if not text and not line.finished:
        return Cell("diverged" if line.diverged else "unfinished", "")
    mean = text.partition(" ")[0]
    if text and (line.finished != count or line.diverged or line.unfinished):
        text += f" (n = {tables.seeds(line)})"
    if line.published:
        text += f" [{tables.paper(line.published)}]"
    return Cell(text, mean)


def _marked(cells: Sequence[Cell], escape: Callable[[str], str], best: str, second: str, *, higher: bool) -> list[str]:
    """The texts of a column, with a mark around the best of several and the second of more than two."""
    numbers = [float(cell.mean) for cell in cells if cell.mean]
    means = sorted(set(numbers), reverse=higher)
    marks = {means[0]: best} if len(numbers) > 1 else {}
    if len(numbers) > 2 and len(means) > 1:
        marks[means[1]] = second
    of = lambda cell: marks.get(float(cell.mean), "{}") if cell.mean else "{}"
    return [of(cell).format(escape(cell.text)) for cell in cells]


def _latex_head(columns: Sequence[Column]) -> list[str]:
    """The lines of the head, one per level. Equal neighbours share a cell, with a rule below."""
    lines, levels = [], max(1, len(columns[0]))
    for level in range(levels):
        last = level == levels - 1
        cells, rules, first = ["Method" if last else ""], [], 2
        for key, members in itertools.groupby(columns, key=lambda column: column[: level + 1]):
            count, text = len(list(members)), tables.escaped(key[-1] if key else "Accuracy (%)")
            cells.append(text if count == 1 else rf"\multicolumn{{{count}}}{{c}}{{{text}}}")
            rules += [rf"\cmidrule(lr){{{first}-{first + count - 1}}}"] if count > 1 else []
            first += count
        lines.append(" & ".join(cells) + r" \\")
        lines += [" ".join(rules)] if rules and not last else []
    return lines
