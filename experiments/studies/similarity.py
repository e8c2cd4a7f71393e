"""Mean pairwise cosine of the K models over the rounds (KDD'24, Figure 6): plot and table.

By default it is the cosine of all trained parameters of the K uploaded models, which every run records. 1 means that
all models have the same direction. ``--definition=authors`` is the definition of the released code: the tensors of a
model, in forward order, are cut into groups of five; the result is the mean over groups and pairs of the cosine of each
full group and of the last group (counted twice if it is full). It is computed from the models in the checkpoints
(FedMR's after recombination). ``--keep_checkpoints`` of a run decides how many there are.
"""

import argparse
import math
import sys

import jax
import numpy as np

from fedjax_mr import plots
from fedjax_mr.analysis import command, runs, tables
from fedjax_mr.config import titles
from fedjax_mr.errors import UserError
from fedjax_mr.models import Variables
from fedjax_mr.models.base import Layer
from fedjax_mr.terminal import interrupts

GROUP = 5  # tensors, in the authors' code
LABELS = {"cosine": "mean pairwise cosine", "authors": "similarity as in the authors' code"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)
    runs.add_picture_arguments(parser)
    runs.add_restore_arguments(parser)
    parser.add_argument(
        "--definition",
        choices=("cosine", "authors"),
        default="cosine",
        help="definition of similarity. Default: cosine",
    )


def main(arguments: argparse.Namespace) -> None:
    """Plot the similarity of each run and print its first, lowest and last value."""
    records = runs.read(arguments.runs)
    if arguments.definition == "cosine":
        series = {run.name: recorded(run) for run in records}
    else:
        series = {run.name: of_checkpoints(run, arguments.data_dir, trust=arguments.trust) for run in records}
    names = titles.runs([run.config for run in records])
    panel = dict(zip(names, series.values(), strict=True))
    methods = {name: run.method() for name, run in zip(names, records, strict=True)}
    with runs.output_folder(arguments.out, records) as folder:
        path = folder / f"similarity.{arguments.format}"
        plots.lines({"": panel}, path, x_label="round", y_label=LABELS[arguments.definition], methods=methods)
    print(tables.aligned(cells(series)))
    print(f"drawn in {path}")


def recorded(run: runs.RunRecord) -> tuple[list[int], list[float]]:
    """The rounds of a run's evaluations and the recorded similarities. NaN if missing."""
    rows = run.rows()
    values = [row.get("similarity") for row in rows]
    return [row["round"] for row in rows], [math.nan if value is None else value for value in values]


def of_checkpoints(run: runs.RunRecord, data_dir: str | None, *, trust: bool = False) -> tuple[list[int], list[float]]:
    """The rounds of a run's checkpoints and the authors' similarity of their K models.

    Raises:
      UserError: the run keeps a single model, or has no checkpoint of a trained model.
    """
    rounds = [round for round in run.checkpoints() if round > 0]
    values = []
    for round in rounds:
        trained = runs.restore(run, round=round, data_dir=data_dir, trust=trust)
        if trained.models is None:
            raise UserError(f"{run.path}: {run.config.strategy} keeps one model; --definition=authors needs K models")
        values.append(authors_similarity(trained.models, trained.model.layers()))
    if not rounds:
        raise UserError(f"{run.path} has no checkpoint of a trained model")
    return rounds, values


def authors_similarity(models: Variables, layers: tuple[Layer, ...]) -> float:
    """The similarity of K stacked models, leaves [K, ...], as in the released code."""
    leaves = jax.tree.leaves(models)
    ordered = [np.asarray(leaves[leaf], np.float64) for layer in layers for leaf in layer.leaves]
    full = [ordered[start : start + GROUP] for start in range(0, len(ordered) - GROUP + 1, GROUP)]
    last = ordered[len(full) * GROUP :] or full[-1]
    return float(np.mean([_mean_cosine(part) for part in (*full, last)]))


def _mean_cosine(tensors: list[np.ndarray]) -> float:
    """The mean cosine over all pairs of K models, computed from these tensors [K, ...]."""
    flat = np.concatenate([tensor.reshape(len(tensor), -1) for tensor in tensors], axis=1)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    flat = np.divide(flat, norms, out=np.zeros_like(flat), where=norms > 0)
    count = len(flat)
    return float((flat @ flat.T)[~np.eye(count, dtype=bool)].mean()) if count > 1 else 1.0


def cells(series: dict[str, tuple[list[int], list[float]]]) -> list[tuple[str, ...]]:
    """First, lowest and last similarity of each run as cells, the head first."""
    rows: list[tuple[str, ...]] = [("run", "first", "lowest", "in round", "last", "in round")]
    for name, (rounds, values) in series.items():
        lowest = min(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])
        numbers = f"{values[0]:.4f}", f"{values[lowest]:.4f}", f"{rounds[lowest]}", f"{values[-1]:.4f}", f"{rounds[-1]}"
        rows.append((name, *numbers))
    return rows


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
