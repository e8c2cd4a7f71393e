"""Mean pairwise cosine of the K models over the rounds (KDD'24, Figure 6): picture and table.

The default is the cosine of all trained parameters of the K uploaded models, which every run records; 1 means that all
models point the same way.
"""

import argparse
import math

from fedjax_mr import plots
from fedjax_mr.analysis import runs, text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Draw the similarity of each run and print its course."""
    chosen = runs.read(arguments.runs)
    series = {run.name: recorded(run) for run in chosen}
    path = runs.results(arguments.out, chosen) / "similarity.png"
    plots.lines({"": series}, path, x_label="round", y_label="mean pairwise cosine")
    print(table(series))
    print(f"drawn in {path}")


def recorded(run: runs.Run) -> tuple[list[int], list[float]]:
    """Return the rounds of a run's evaluations and the similarities recorded there; not a number where missing."""
    rows = run.rows()
    values = [row.get("similarity") for row in rows]
    return [row["round"] for row in rows], [math.nan if value is None else value for value in values]


def table(series: dict[str, tuple[list[int], list[float]]]) -> str:
    """Return first, lowest and last similarity of each run."""
    rows: list[tuple[str, ...]] = [("run", "first", "lowest", "in round", "last", "in round")]
    for name, (rounds, values) in series.items():
        lowest = min(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])
        numbers = f"{values[0]:.4f}", f"{values[lowest]:.4f}", f"{rounds[lowest]}", f"{values[-1]:.4f}", f"{rounds[-1]}"
        rows.append((name, *numbers))
    return text.table(rows)
