"""Plots of federations of some of the clients: all of them as a lattice, and approximations against the truth."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_mr.plots.figure import WIDTH, name_axes, picture
from fedjax_mr.plots.looks import COLOURS

MOST_IN_LATTICE = 6  # clients, which have 64 sets


def lattice(
    values: Mapping[frozenset[int], float], path: Path | str, *, names: Sequence[str], label: str, lower: bool = False
) -> None:
    """Draw the value of every set of N clients, from nobody at the bottom to all at the top.

    Sets have the numbers of their clients, and a line below the names, if these are others.

    A line joins two sets that differ by one client. It is orange if the client makes the value worse.

    Args:
      values: the value of each of the 2^N sets.
      path: file to write, in one of `FORMATS`.
      names: names of the clients [N].
      label: name of the value.
      lower: whether lower values are better.
    """
    count = len(names)
    rows = [list(itertools.combinations(range(count), size)) for size in range(count + 1)]
    at = {
        frozenset(each): (place - (len(row) - 1) / 2, size)
        for size, row in enumerate(rows)
        for place, each in enumerate(row)
    }
    with picture(path, (WIDTH, 1.2 + 0.85 * (count + 1))) as figure:
        axis = figure.subplots()
        for some in at:
            for client in set(range(count)) - some:
                more = some | {client}
                worse = (values[more] > values[some]) if lower else (values[more] < values[some])
                x, y = zip(at[some], at[more], strict=True)
                axis.plot(x, y, color=COLOURS[1] if worse else "0.8", linewidth=0.8, zorder=1 + worse)
        x, y = zip(*at.values(), strict=True)
        shown = [values[each] for each in at]
        colours = "viridis_r" if lower else "viridis"  # good values are bright
        points = axis.scatter(x, y, c=shown, cmap=colours, s=260, edgecolors="white", zorder=3)
        middle = (max(shown) + min(shown)) / 2
        for some, (left, height) in at.items():
            bright = (values[some] < middle) == lower
            words = "".join(map(str, sorted(some))) or "-"
            axis.text(
                left,
                height,
                words,
                ha="center",
                va="center",
                fontsize=6,
                zorder=4,
                color="black" if bright else "white",
            )
        figure.colorbar(points, label=label)
        axis.set_yticks(range(count + 1))
        axis.set_xticks([])
        numbers = list(map(str, range(count)))
        legend = ", ".join(f"{number}: {name}" for number, name in zip(numbers, names, strict=True))
        name_axes(axis, "" if list(names) == numbers else legend, "number of clients")
        axis.spines[["bottom", "left"]].set_visible(False)


def approximations(
    truth: np.ndarray,
    found: Mapping[str, np.ndarray],
    path: Path | str,
    *,
    names: Sequence[str],
    ranks: Sequence[float],
) -> None:
    """Draw approximate contributions against exact ones, a panel per rule and a point per client.

    Lines show one standard deviation over the seeds. Each panel has its own scale, because some rules only rank.

    Args:
      truth: exact contributions [S, N] of N clients with S seeds.
      found: the approximate ones [S, N] by rule.
      path: file to write, in one of `FORMATS`.
      names: names of the clients [N].
      ranks: the rank correlation of each rule with the truth.
    """
    columns = min(4, len(found))
    rows = math.ceil(len(found) / columns)
    spread = lambda values: values.std(axis=0, ddof=1) if len(values) > 1 else None
    with picture(path, (2.5 * columns, 2.5 * rows)) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, (rule, values), rank in zip(axes, found.items(), ranks, strict=False):
            x, y = truth.mean(axis=0), values.mean(axis=0)
            axis.errorbar(x, y, spread(values), spread(truth), "o", color=COLOURS[0], markersize=4, linewidth=0.8)
            for name, left, height in zip(names, x, y, strict=True):
                axis.annotate(name, (left, height), xytext=(4, 3), textcoords="offset points", fontsize=7)
            axis.axhline(0, color="0.8", linewidth=0.8, zorder=0)
            axis.axvline(0, color="0.8", linewidth=0.8, zorder=0)
            axis.margins(0.15)
            name_axes(axis, title=f"{rule.replace('_', ' ')} (rank {rank:.2f})")
            axis.tick_params(labelsize=7)
        for axis in axes[len(found) :]:
            axis.set_visible(False)
        figure.supxlabel("Shapley value", fontsize=9)
        figure.supylabel("contribution by the rule", fontsize=9)
