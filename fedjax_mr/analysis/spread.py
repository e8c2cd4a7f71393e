"""Spread of the K models of a run, layer by layer in forward order: plot and table.

The spread of a layer is the root mean square, over the K models, of the distance of its trained tensors from their
mean, divided by the norm of that mean: 0 means K equal layers. FedMR's recombination leaves it unchanged (KDD'24, Lemma
4.4), so the spread of the models that the server keeps is that of the uploaded ones.
"""

import argparse

import jax

from fedjax_mr import plots
from fedjax_mr.analysis import runs, tables
from fedjax_mr.config import titles
from fedjax_mr.errors import UserError
from fedjax_mr.models import Variables
from fedjax_mr.models.base import Layer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)
    runs.add_picture_arguments(parser)
    runs.add_restore_arguments(parser)
    parser.add_argument(
        "--round", type=int, default=None, help="round of the checkpoint. Default: the newest of each run"
    )


def main(arguments: argparse.Namespace) -> None:
    """Plot and print the spread of each run's models."""
    chosen = runs.read(arguments.runs)
    by_run: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}  # of the lines, with their methods
    for run, name in zip(chosen, titles.runs([run.config for run in chosen]), strict=True):
        trained = runs.restore(run, round=arguments.round, data_dir=arguments.data_dir, trust=arguments.trust)
        if trained.models is None:
            raise UserError(f"{run.path}: {run.config.strategy} keeps one model, but the spread needs K models")
        by_run[f"{run.name}, round {trained.round}"] = by_layer(trained.models, trained.model.layers())
        names[f"{name}, round {trained.round}"] = run.method()
    first = list(next(iter(by_run.values())))
    if any(list(each) != first for each in by_run.values()):
        raise UserError("the runs have different networks, so their layers cannot be compared")
    series = {name: (range(len(first)), list(each.values())) for name, each in zip(names, by_run.values(), strict=True)}
    with runs.output_folder(arguments.out, chosen) as folder:
        path = folder / f"spread.{arguments.format}"
        y_label = "spread / norm of the mean"
        plots.lines({"": series}, path, x_label="layer", y_label=y_label, methods=names, x_names=first)
    rows = [(layer, *(f"{each[layer]:.4f}" for each in by_run.values())) for layer in first]
    print(tables.aligned([("layer", *by_run), *rows]))
    print(f"drawn in {path}")


def by_layer(models: Variables, layers: tuple[Layer, ...]) -> dict[str, float]:
    """The spread of each layer that has trained tensors, by its name.

    Args:
      models: K stacked models, leaves [K, ...].
      layers: layers in forward order.
    """
    leaves = jax.tree_util.tree_leaves_with_path(models)
    spread = {}
    for layer in layers:
        own = [leaves[position] for position in layer.leaves]
        if trained := [leaf for path, leaf in own if path[0].key == "params"]:
            spread[layer.name] = runs.relative_spread(trained)
    return spread
