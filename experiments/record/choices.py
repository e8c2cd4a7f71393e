"""How many clients do best with each network when they train alone: FedMe's choice of the first networks (its Table 3).

RUN may also be a folder of run folders, at any depth; only those of Local-only with one network count. A client's best
network is the one with the highest accuracy on its validation samples (test samples where it keeps none for
validation). Of several runs with one network and the same division of the data, the one that is better on average
counts. Shown are means over the divisions (seeds), the networks by size. FedMe starts from the same choice by
--architectures_from=RUN.
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

DIVISION = ("strategy", "clients", *inspect.signature(data.federate).parameters)  # the flags that tell rows apart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    groups.add_arguments(parser)
    tables.add_format_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    """Print the table."""
    print(tables.FORMATS[arguments.format](cells(groups.find(arguments.runs))))


def cells(chosen: Sequence[RunRecord]) -> list[list[str]]:
    """Return the table as cells, the head first.

    Raises:
      UserError: no run counts, or a network lacks a run with the data that another one was trained on.
    """
    alone = trained_alone([run.path for run in chosen])
    counted = {folder for folders in alone.values() for folder in folders.values()}
    if not counted:
        raise UserError("none of the runs is a finished one of --strategy=local with a single network")
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
    """Return how many clients do best with each network, how many there are, and the number of divisions."""
    known = [network for network in networks if any(network in runs for runs in divisions.values())]
    counts = []
    for runs in divisions.values():
        one = next(iter(runs.values()))
        if missing := [network for network in known if network not in runs]:
            raise UserError(f"no finished run trains {missing[0]} on the same data as {one.path}")
        best = best_of([str(runs[network].path) for network in known])
        counts.append(np.bincount(best, minlength=len(known)))
    means = {
        network: tables.plus_minus(*Statistic.of(column.tolist()), digits=1)
        for network, column in zip(known, np.array(counts, float).T, strict=True)
    }
    return [*(means.get(network, "") for network in networks), str(counts[0].sum()), str(len(divisions))]
