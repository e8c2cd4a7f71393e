"""The value of a flag, such as the learning rate, that is best on the clients' validation samples, for each setting.

RUN may also be a folder of run folders, at any depth. Compared are the last validation accuracies (mean over the
clients, and over the seeds that all values have); a value that diverged with any seed is out, and so is one with runs
of earlier versions that have no validation accuracy. Shown are means over the seeds, the test accuracy of the clients'
own or the deployed model on each client's test samples, every client counting the same; where these were not tested,
the deployed model's on the test set. A value at an end of those tried is marked: a wider grid may have a better one.
"""

import argparse
from collections.abc import Sequence

from fedjax_mr.analysis import groups, tables
from fedjax_mr.analysis.groups import VALIDATION, Choice, Tried

TEST, FINETUNED = "personal_accuracy", "finetuned_accuracy"


def cells(choices: Sequence[Choice], *, over: Sequence[str]) -> list[list[str]]:
    """Return the table as cells, the head first; accuracies are in percent."""
    heads = {"validation %": VALIDATION, "test %": TEST, "fine-tuned %": FINETUNED}
    names, rows = groups.short_names([choice.setting for choice in choices]), []
    for name, (_, tried, best) in zip(names, choices, strict=True):
        values = [_value(flag, tried, best) for flag in over]
        results = [tables.percent(_result(best, column)) if best else "" for column in heads.values()]
        trials = str(best.count("finished")) if best else ""
        rows.append([name, *values, *results, trials, _count(tried)])
    rows = [["setting", *over, *heads, "seeds", "tried"], *rows]
    shown = [position for position, column in enumerate(zip(*rows, strict=True)) if any(column[1:])]
    return [[row[position] for position in shown] for row in rows]


def _result(best: Tried, column: str) -> groups.Statistic:
    known = best.mean(column)
    return best.mean("accuracy") if column == TEST and known.mean is None else known


def _value(flag: str, tried: Sequence[Tried], best: Tried | None) -> str:
    if best is None:
        return "none"
    if flag not in best.values:
        return "-"
    value, values = best.values[flag], [each.values.get(flag) for each in tried]
    numbers = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    for end, word in ((min, "least"), (max, "largest")):
        if len(set(numbers)) > 1 and value == end(numbers):
            return f"{value} ({word})"
    return str(value)


def _count(tried: Sequence[Tried]) -> str:
    diverged = sum(each.count("diverged") > 0 for each in tried)
    unfinished = sum(not each.count("diverged") and not each.finished() for each in tried)
    lacking = sum(not each.count("diverged") and each.finished() != {} and each.lacks_validation() for each in tried)
    others = {"diverged": diverged, "unfinished": unfinished, "without validation accuracy": lacking}
    return ", ".join([str(len(tried)), *(f"{count} {word}" for word, count in others.items() if count)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    groups.add_arguments(parser)
    parser.add_argument("--over", required=True, metavar="FLAGS", help="flags that are compared: lr, or lr,momentum")
    tables.add_format_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    """Print the choices."""
    over = arguments.over.split(",")
    choices = groups.choose(groups.find(arguments.runs), over=over)
    print(tables.FORMATS[arguments.format](cells(choices, over=over)))
