"""The best value of a flag, such as the learning rate, by validation accuracy, for each setting.

The criterion is the final validation accuracy: the mean over the clients, and over the seeds that all values have. A
value is excluded if one of its runs diverged, or has no validation accuracy (runs of earlier versions). The test
accuracy is the mean over the seeds, of the clients' own models or of the deployed model, on each client's test samples;
every client counts the same. If the clients have no test samples, it is that of the deployed model on the test set. A
best value at the end of the grid is marked: a wider grid may have a better one.
"""

import argparse
from collections.abc import Sequence

from fedjax_mr.analysis import groups, tables
from fedjax_mr.analysis.groups import VALIDATION, Candidate, Choice

TEST, FINETUNED = "personal_", "finetuned_"  # of the first metric


def cells(choices: Sequence[Choice], *, over: Sequence[str]) -> list[list[str]]:
    """The table as cells, its head first. Accuracies and other fractions are in percent."""
    fractions = all(choice.best is None or choice.best.metric.unit == "fraction" for choice in choices)
    unit = " %" if fractions else ""
    heads = {f"validation{unit}": VALIDATION, f"test{unit}": TEST, f"fine-tuned{unit}": FINETUNED}
    names, rows = groups.short_names([choice.setting for choice in choices]), []
    for name, (_, candidates, best) in zip(names, choices, strict=True):
        values = [_value(flag, candidates, best) for flag in over]
        results = [tables.shown(_result(best, column), best.metric) if best else "" for column in heads.values()]
        trials = str(len(best.finished())) if best else ""
        rows.append([name, *values, *results, trials, _count(candidates)])
    return tables.filled([["setting", *over, *heads, "seeds", "tried"], *rows])


def _result(best: Candidate, column: str) -> groups.Statistic:
    known = best.mean(column)
    return best.mean("") if column == TEST and known.mean is None else known


def _value(flag: str, candidates: Sequence[Candidate], best: Candidate | None) -> str:
    if best is None:
        return "none"
    if flag not in best.values:
        return "-"
    value = best.values[flag]
    end = groups.end_of(value, [each.values.get(flag) for each in candidates])
    return f"{value} ({end})" if end else str(value)


def _count(candidates: Sequence[Candidate]) -> str:
    faults = [each.fault for each in candidates]
    counts = [f"{faults.count(fault)} {fault}" for fault in groups.FAULTS if fault in faults]
    return ", ".join([str(len(candidates)), *counts])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    groups.add_arguments(parser)
    parser.add_argument("--over", required=True, metavar="FLAGS", help="flags to compare, such as lr or lr,momentum")
    tables.add_format_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    """Print the choices."""
    over = arguments.over.split(",")
    choices = groups.choose(groups.find(arguments.runs), over=over)
    print(tables.FORMATS[arguments.format](cells(choices, over=over)))
