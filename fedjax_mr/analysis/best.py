"""The value of a flag, such as the learning rate, that is best on the clients' validation samples, for each setting.

RUN may also be a folder of run folders, at any depth. Compared are the last validation accuracies (mean over the
clients, and over the seeds that all values have); a value that diverged with any seed is out. Shown are means over the
seeds, the test accuracy of the clients' own or the deployed model on each client's test samples, every client counting
the same. A value at an end of those tried is marked: a wider grid may have a better one.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjax_mr import config as configuration
from fedjax_mr.analysis import table
from fedjax_mr.analysis.runs import Run
from fedjax_mr.analysis.table import Statistic
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment.folder import run_state

VALIDATION, TEST, FINETUNED = "validation_accuracy", "personal_accuracy", "finetuned_accuracy"


class Tried(NamedTuple):
    """One value of the flags and its runs, one per seed."""

    values: dict[str, Any]
    runs: list[Run]

    def count(self, state: str) -> int:
        """Return how many of the runs are in a state of `STATES`."""
        return sum(run_state(run.path) == state for run in self.runs)

    def finished(self) -> dict[str, Run]:
        """Return the finished runs by what they drew at random."""
        return {str(table.seeds(run.config)): run for run in self.runs if run_state(run.path) == "finished"}

    def mean(self, column: str, seeds: Sequence[str] | None = None) -> Statistic:
        """Return the statistic of a last result, over some seeds (None: all that are finished)."""
        finished = self.finished()
        chosen = finished.values() if seeds is None else [finished[seed] for seed in seeds]
        return Statistic.of((run.summary() | run.rows()[-1]).get(column) for run in chosen)


class Choice(NamedTuple):
    """A setting, all that was tried in it and the best of that; None if no value has a finished run."""

    setting: dict[str, Any]
    tried: list[Tried]
    best: Tried | None


def choose(chosen: Sequence[Run], *, over: Sequence[str]) -> list[Choice]:
    """Return the choice of each setting.

    Args:
      chosen: as `table.find` returns them.
      over: the flags whose values are compared.

    Raises:
      UserError: no run knows a flag, or a run has no validation accuracy.
    """
    known = {flag for run in chosen for flag in configuration.decisive(run.config)}
    for flag in over:
        if flag not in known:
            raise unknown_name("flag in --over", flag, sorted(known))
    grids: dict[str, tuple[dict[str, Any], list[Tried]]] = {}
    for setting, members in table.settings(chosen):
        facts = table.facts(members[0].config)
        values = {flag: facts[flag] for flag in over if flag in facts}
        rest = {flag: value for flag, value in setting.items() if flag not in over}
        grids.setdefault(json.dumps(rest), (rest, []))[1].append(Tried(values, members))
    return [Choice(setting, tried, _best(tried)) for setting, tried in grids.values()]


def _best(tried: Sequence[Tried]) -> Tried | None:
    candidates = [each for each in tried if each.finished() and not each.count("diverged")]
    if not candidates:
        return None
    common = sorted(set.intersection(*(set(each.finished()) for each in candidates)))
    if not common:
        names = ", ".join(map(str, candidates[0].values))
        raise UserError(f"no seed has all values of {names} (see {candidates[0].runs[0].path}): run the same seeds")

    def validation(each: Tried) -> float:
        mean = each.mean(VALIDATION, common).mean
        if mean is None:
            raise UserError(
                f"{each.runs[0].path} has no {VALIDATION}: train with --validation_share and, where clients have no "
                "models of their own, --eval_clients"
            )
        return mean

    return max(candidates, key=validation)


# --- Writing ---------------------------------------------------------------------------------------------------------


def cells(choices: Sequence[Choice], *, over: Sequence[str]) -> list[list[str]]:
    """Return the table as texts, the head first; accuracies are in percent."""
    heads = {"validation %": VALIDATION, "test %": TEST, "fine-tuned %": FINETUNED}
    names, rows = table.short_names([choice.setting for choice in choices]), []
    for name, (_, tried, best) in zip(names, choices, strict=True):
        values = [_value(flag, tried, best) for flag in over]
        results = [table.percent(best.mean(column)) if best else "" for column in heads.values()]
        trials = str(best.count("finished")) if best else ""
        rows.append([name, *values, *results, trials, _count(tried)])
    rows = [["setting", *over, *heads, "seeds", "tried"], *rows]
    shown = [position for position, column in enumerate(zip(*rows, strict=True)) if any(column[1:])]
    return [[row[position] for position in shown] for row in rows]


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
    others = {"diverged": diverged, "unfinished": unfinished}
    return ", ".join([str(len(tried)), *(f"{count} {word}" for word, count in others.items() if count)])


# --- The command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    table.add_runs_argument(parser)
    parser.add_argument("--over", required=True, metavar="FLAGS", help="whose values are compared: lr, or lr,momentum")
    table.add_format_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    """Print the choices."""
    over = arguments.over.split(",")
    choices = choose(table.find(arguments.runs), over=over)
    print(table.FORMATS[arguments.format](cells(choices, over=over)))
