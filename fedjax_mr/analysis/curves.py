"""Learning curves: mean over the seeds with a band of one standard deviation (FedMR Figures 9-12, FedCross 2-7).

RUN may also be a folder of run folders, at any depth. Runs that differ in their seeds alone are one curve, up to the
last round that all of them have evaluated. With --best=lr, of each setting only the runs with the learning rate that
has the best validation accuracy are drawn (see the command best). A method has the same colour and marker in all
pictures; where all curves are of one method, colours tell its settings apart.
"""

import argparse
import math
from collections.abc import Sequence

import numpy as np

from fedjax_mr import config as configuration
from fedjax_mr import plots, titles
from fedjax_mr.analysis import groups, runs
from fedjax_mr.analysis.runs import Run
from fedjax_mr.errors import UserError, unknown_name

LABELS = {
    "accuracy": "test accuracy", "loss": "test loss (nats)", "train_loss": "training loss (nats)",
    "personal_accuracy": "clients' own test accuracy, mean",
    "validation_accuracy": "clients' validation accuracy, mean",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    groups.add_arguments(parser)
    parser.add_argument("--column", default="accuracy", help="column of metrics.csv (default: accuracy)")
    parser.add_argument("--panels", metavar="FLAGS", help="a panel for each value of a flag: alpha, or partition,alpha")
    parser.add_argument("--best", metavar="FLAGS", help="draw only the values of these flags that do best: lr")
    runs.add_picture_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Draw the curves and print the picture's path."""
    chosen = groups.find(arguments.runs)
    if arguments.best:
        choices = groups.choose(chosen, over=arguments.best.split(","))
        chosen = [run for choice in choices if choice.best for run in choice.best.finished().values()]
    column: str = arguments.column
    panels, methods = curves(chosen, column=column, panels=arguments.panels)
    words = LABELS.get(column, column.replace("_", " "))
    with runs.output_folder(arguments.out, chosen) as folder:
        path = folder / f"{column}.{arguments.format}"
        plots.lines(panels, path, x_label="round", y_label=words, methods=methods)
    print(f"drawn in {path}")


def curves(
    chosen: Sequence[Run], *, column: str, panels: str | None = None
) -> tuple[dict[str, plots.Series], dict[str, str]]:
    """Return the curves by panel and name, and the names' methods.

    A curve has rounds, means and, with several seeds, standard deviations. Its name is that of the method and of the
    settings in which the curves of a panel differ.

    Args:
      chosen: as `groups.find` returns them.
      column: of the evaluations.
      panels: the flags, separated by commas, that divide the curves among panels; None: one panel.

    Raises:
      UserError: a run has no such column or flag, or no evaluation.
    """
    by_panel: dict[str, list[Run]] = {}
    for run in sorted(chosen, key=lambda run: _place(run, panels)):
        by_panel.setdefault(_panel(run, panels), []).append(run)
    found, methods = {}, {}
    for title, own in by_panel.items():
        settings = groups.by_setting(own)
        names = groups.titles_of(settings)
        found[title] = {name: _mean(members, column) for name, (_, members) in zip(names, settings, strict=True)}
        methods |= {name: members[0].method() for name, (_, members) in zip(names, settings, strict=True)}
    return found, methods


def _place(run: Run, flags: str | None) -> list[tuple]:
    """Return what a run's panel is sorted by: numbers by size and before words."""
    facts = titles.facts(run.config)
    values = [facts.get(name) for name in (flags.split(",") if flags else [])]
    return [(0, value) if isinstance(value, int | float) else (1, str(value)) for value in values]


def _panel(run: Run, flags: str | None) -> str:
    """Return the title of the panel that a run's curve belongs to."""
    names = flags.split(",") if flags else []
    known = configuration.decisive(run.config)
    for name in names:
        if name not in known:
            raise unknown_name("flag in --panels", name, known)
    return ", ".join(titles.words(names, titles.facts(run.config)))


def _mean(members: Sequence[Run], column: str) -> tuple[Sequence[float], ...]:
    """Return the rounds that all runs have, their mean and, of several runs, the sample standard deviation."""
    histories = [{row["round"]: _value(run, row, column) for row in run.rows()} for run in members]
    rounds = sorted(set.intersection(*map(set, histories)))
    values = np.array([[history[at] for at in rounds] for history in histories])
    if len(members) == 1:
        return rounds, values[0].tolist()
    return rounds, values.mean(axis=0).tolist(), values.std(axis=0, ddof=1).tolist()


def _value(run: Run, row: dict, column: str) -> float:
    if column not in row:
        raise UserError(f"{run.path} has no column {column} (it has {', '.join(row)})")
    return math.nan if row[column] is None else float(row[column])
