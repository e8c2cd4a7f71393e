"""Mean pairwise cosine of the K models over the rounds (KDD'24, Figure 6): picture and table.

The default is the cosine of all trained parameters of the K uploaded models, which every run records; 1 means that all
models point in the same direction. ``--definition=authors`` is that of the released code: the tensors of a model, in
forward order, in groups of five; the cosine of each full group, and of the last group (once more if it was full), their
mean over groups and pairs. It is computed from the models in the checkpoints (FedMR's: recombined), of which a run
keeps ``--keep_checkpoints``.
"""

import argparse
import math

import jax
import numpy as np

from fedjax_mr.analysis import plots, runs, tables
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import titles
from fedjax_mr.models import Variables
from fedjax_mr.models.base import Layer

GROUP = 5  # tensors, in the authors' code
LABELS = {"cosine": "mean pairwise cosine", "authors": "similarity as in the authors' code"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)
    runs.add_picture_arguments(parser)
    runs.add_restore_arguments(parser)
    parser.add_argument(
        "--definition", choices=("cosine", "authors"), default="cosine", help="which similarity (default: cosine)"
    )


def main(arguments: argparse.Namespace) -> None:
    """Draw the similarity of each run and print its history in short."""
    chosen = runs.read(arguments.runs)
    if arguments.definition == "cosine":
        series = {run.name: recorded(run) for run in chosen}
    else:
        series = {run.name: of_checkpoints(run, arguments.data_dir, trust=arguments.trust) for run in chosen}
    names = titles.runs([run.config for run in chosen])
    panel = dict(zip(names, series.values(), strict=True))
    methods = {name: run.method() for name, run in zip(names, chosen, strict=True)}
    with runs.output_folder(arguments.out, chosen) as folder:
        path = folder / f"similarity.{arguments.format}"
        plots.lines({"": panel}, path, x_label="round", y_label=LABELS[arguments.definition], methods=methods)
    print(tables.aligned(cells(series)))
    print(f"drawn in {path}")


def recorded(run: runs.RunRecord) -> tuple[list[int], list[float]]:
    """Return the rounds of a run's evaluations and the similarities recorded there; not a number where missing."""
    rows = run.rows()
    values = [row.get("similarity") for row in rows]
    return [row["round"] for row in rows], [math.nan if value is None else value for value in values]


def of_checkpoints(run: runs.RunRecord, data_dir: str | None, *, trust: bool = False) -> tuple[list[int], list[float]]:
    """Return the rounds of a run's checkpoints and the authors' similarity of the K models there.

    Raises:
      UserError: the run keeps a single model.
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
    """Return the similarity of K stacked models, leaves [K, ...], as the released code computes it."""
    leaves = jax.tree.leaves(models)
    ordered = [np.asarray(leaves[leaf], np.float64) for layer in layers for leaf in layer.leaves]
    full = [ordered[start : start + GROUP] for start in range(0, len(ordered) - GROUP + 1, GROUP)]
    last = ordered[len(full) * GROUP :] or full[-1]
    return float(np.mean([_mean_cosine(part) for part in (*full, last)]))


def _mean_cosine(tensors: list[np.ndarray]) -> float:
    """Return the mean cosine over the pairs of K models, of which these tensors [K, ...] count."""
    flat = np.concatenate([tensor.reshape(len(tensor), -1) for tensor in tensors], axis=1)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    flat = np.divide(flat, norms, out=np.zeros_like(flat), where=norms > 0)
    count = len(flat)
    return float((flat @ flat.T)[~np.eye(count, dtype=bool)].mean()) if count > 1 else 1.0


def cells(series: dict[str, tuple[list[int], list[float]]]) -> list[tuple[str, ...]]:
    """Return first, lowest and last similarity of each run as cells, the head first."""
    rows: list[tuple[str, ...]] = [("run", "first", "lowest", "in round", "last", "in round")]
    for name, (rounds, values) in series.items():
        lowest = min(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])
        numbers = f"{values[0]:.4f}", f"{values[lowest]:.4f}", f"{rounds[lowest]}", f"{values[-1]:.4f}", f"{rounds[-1]}"
        rows.append((name, *numbers))
    return rows
