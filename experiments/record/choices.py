"""Number of clients by best network when they train alone: FedMe's first networks (its Table 3).

Only runs of Local-only with a single network count. The best network of a client has the highest accuracy on its
validation samples, or on its test samples if it has none for validation. If several runs have the same network and
partition of the data, the one with the best mean counts. Values are means over the partitions (seeds), with the
networks sorted by size. FedMe starts from the same choice with --architectures_from=RUN.
"""

import argparse
import inspect
from collections.abc import Sequence

import numpy as np

from fedjax_mr import data
from fedjax_mr.analysis import groups, tables
from fedjax_mr.analysis.groups import Statistic
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.architectures import best_of, trained_alone

DIVISION = ("strategy", "clients", *inspect.signature(data.federate).parameters)  # flags that differ between rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    groups.add_arguments(parser)
    tables.add_format_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    """Print the table."""
    print(tables.FORMATS[arguments.format](cells(groups.find(arguments.runs))))


def cells(chosen: Sequence[RunRecord]) -> list[list[str]]:
    """The table as cells, its head first.

    Raises:
      UserError: no run counts, or no run trains a network on the data of another one.
    """
    alone = trained_alone([run.path for run in chosen])
    counted = {folder for folders in alone.values() for folder in folders.values()}
    if not counted:
        raise UserError("no run is a finished one of --strategy=local with a single network")
    rows: dict[str, dict[str, dict[str, RunRecord]]] = {}  # by row, division, network
    for setting, members in groups.by_setting([run for run in chosen if run.path in counted]):
        divisions = rows.setdefault(groups.name({flag: setting[flag] for flag in setting if flag in DIVISION}), {})
        for run in members:
            divisions.setdefault(run.summary()["partition_hash"], {})[run.config.model] = run
    sizes = {
        network: run.summary()["parameters"]
        for divisions in rows.values()
        for runs in divisions.values()
        for network, run in runs.items()
    }
    networks = sorted(sizes, key=lambda network: sizes[network])
    return [
        ["trained alone", *networks, "clients", "divisions"],
        *([name, *_row(divisions, networks)] for name, divisions in rows.items()),
    ]


def _row(divisions: dict[str, dict[str, RunRecord]], networks: Sequence[str]) -> list[str]:
    """Number of clients per best network, number of clients, and number of partitions."""
    trained = [network for network in networks if any(network in runs for runs in divisions.values())]
    counts = []
    for runs in divisions.values():
        one = next(iter(runs.values()))
        if missing := [network for network in trained if network not in runs]:
            raise UserError(f"no finished run trains {missing[0]} on the same data as {one.path}")
        best = best_of([str(runs[network].path) for network in trained])
        counts.append(np.bincount(best, minlength=len(trained)))
    means = {
        network: tables.plus_minus(*Statistic.of(column.tolist()), digits=1)
        for network, column in zip(trained, np.array(counts, float).T, strict=True)
    }
    return [*(means.get(network, "") for network in networks), str(counts[0].sum()), str(len(divisions))]
