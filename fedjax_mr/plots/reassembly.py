"""Plots of pFedHR's reassembly: blocks by group, candidates as strips of blocks, and teachers of the clients."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.plots.figure import picture
from fedjax_mr.plots.looks import COLOURS

MOST_OWNERS = 20  # number of distinct colours


def grouped(table: np.ndarray, names: Sequence[str], groups: Sequence[int], path: Path | str, *, label: str) -> None:
    """Draw a symmetric matrix of numbers between 0 and 1 whose rows are sorted by group, with a frame per group.

    Args:
      table: matrix [L, L].
      names: names of the rows.
      groups: group of each row, in ascending order.
      path: file to write, in one of `FORMATS`.
      label: quantity of the numbers.
    """
    from matplotlib.patches import Rectangle

    side = max(5.0, 0.19 * len(names) + 1.6)
    with picture(path, (side + 1.0, side)) as figure:
        axis = figure.subplots()
        image = axis.imshow(table, cmap="cividis", vmin=0.0, vmax=1.0)
        for group in sorted(set(groups)):
            rows = [row for row, own in enumerate(groups) if own == group]
            corner = (rows[0] - 0.5, rows[0] - 0.5)
            axis.add_patch(Rectangle(corner, len(rows), len(rows), fill=False, edgecolor=COLOURS[1], linewidth=2.5))
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set_title("blocks (client.place; fc: dense), framed by group", fontsize=10)
        figure.colorbar(image, ax=axis, shrink=0.8).set_label(label)


Strip = Sequence[tuple[int, int, bool]]
"""Blocks in order: owner, place in the owner's network, and whether the block is drawn as a disc."""


def strips(rows: Mapping[str, Sequence[Strip]], path: Path | str, *, num_colours: int) -> None:
    """Draw strips of blocks, one panel per name. The colour is the owner, the number the place in its network.

    Args:
      rows: strips by the name of the panel.
      path: file to write, in one of `FORMATS`.
      num_colours: number of owners.
    """
    columns = min(4, len(rows))
    lines = math.ceil(len(rows) / columns)
    widest = max((len(strip) for strips in rows.values() for strip in strips), default=1)
    tallest = max(1, *(len(strips) for strips in rows.values()))
    size = (max(4.8, columns * (0.28 * widest + 0.5)), lines * (0.3 * tallest + 0.4) + 0.5)
    with picture(path, size) as figure:
        axes = figure.subplots(lines, columns, squeeze=False).ravel()
        for axis, (name, drawn) in zip(axes, rows.items(), strict=False):
            axis.set_title(name if drawn else f"{name}: none", fontsize=9)
            for height, strip in enumerate(drawn):
                _strip(axis, strip, 0.0, float(height), 1.0, num_colours, with_numbers=True)
            axis.set(xlim=(-0.6, widest - 0.4), ylim=(tallest - 0.4, -0.6), aspect="equal")
        for axis in axes:
            axis.set_axis_off()
        _legends(figure, num_colours, numbers=True)


def teachers(rounds: Mapping[int, Mapping[int, Strip]], num_clients: int, path: Path | str) -> None:
    """Draw the owners of the blocks in each client's teacher: by round, and their shares over all rounds.

    Args:
      rounds: by round, the teacher of each client that had one.
      num_clients: number of clients N.
      path: file to write, in one of `FORMATS`.
    """
    shares = np.zeros((num_clients, num_clients))
    for teachers in rounds.values():
        for client, strip in teachers.items():
            for owner, _, _ in strip:
                shares[client, owner] += 1
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1)
    longest = max((len(strip) for each in rounds.values() for strip in each.values()), default=1)
    widths = max(3.0, 0.62 * len(rounds)), 0.34 * num_clients + 0.8
    with picture(path, (sum(widths) + 1.6, 0.34 * num_clients + 1.6)) as figure:
        time, total = figure.subplots(1, 2, width_ratios=widths)
        for column, each in enumerate(rounds.values()):
            for client, strip in each.items():
                _strip(time, strip, column - 0.4, float(client), 0.8 / longest, num_clients, with_numbers=False)
        time.set_xticks(range(len(rounds)), [str(number) for number in rounds], fontsize=8)
        time.set_yticks(range(num_clients))
        time.set(xlim=(-0.6, len(rounds) - 0.4), ylim=(num_clients - 0.4, -0.6), xlabel="round", ylabel="client taught")
        time.grid(color="0.92")
        time.set_axisbelow(True)
        time.set_title("its teacher's blocks, coloured by their owner", fontsize=9)
        image = total.imshow(shares, cmap="cividis", vmin=0.0, aspect="auto")
        total.set(xticks=range(num_clients), yticks=range(num_clients), xlabel="client that blocks are from")
        total.set_title("share of blocks", fontsize=9)
        figure.colorbar(image, ax=total)
        _legends(figure, num_clients, numbers=False)


def _strip(
    axis: Any, strip: Strip, left: float, middle: float, width: float, num_colours: int, *, with_numbers: bool
) -> None:
    """Draw a strip of blocks, each ``width`` wide. With numbers, ``left`` is the middle of the first block."""
    from matplotlib.patches import Ellipse, Rectangle

    height = 0.8 if with_numbers else 0.7
    for number, (owner, place, disc) in enumerate(strip):
        x, colour = left + number * width, _colour(owner, num_colours)
        if disc:
            centre = (x if with_numbers else x + width / 2, middle)
            patch = Ellipse(centre, 0.84 * width, 1.05 * height)
        else:
            corner = (x - 0.42 * width if with_numbers else x + 0.08 * width, middle - height / 2)
            patch = Rectangle(corner, 0.84 * width, height)
        patch.set(facecolor=colour, edgecolor="0.2", linewidth=0.5)
        axis.add_patch(patch)
        if with_numbers:
            axis.text(x, middle, str(place), ha="center", va="center", fontsize=7)


def _colour(owner: int, count: int) -> Any:
    """The colour of an owner among ``count`` owners."""
    import matplotlib

    return matplotlib.colormaps["tab20" if count <= MOST_OWNERS else "turbo"](
        owner if count <= MOST_OWNERS else owner / (count - 1)
    )


def _legends(figure: Any, count: int, *, numbers: bool) -> None:
    """Add legends: of the shapes above the plot, and of the colours below, unless there are too many owners."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {"s": "convolutional block", "o": "dense block"}
    shapes = [
        Line2D([], [], linestyle="", marker=marker, color="0.85", markeredgecolor="0.2", markersize=8, label=words)
        for marker, words in kinds.items()
    ]
    title = "number: the block's place in its client's network" if numbers else None
    figure.legend(
        handles=shapes, loc="outside upper center", ncols=2, fontsize=8, frameon=False, title=title, title_fontsize=8
    )
    if count > MOST_OWNERS:
        return
    handles = [Patch(facecolor=_colour(owner, count), edgecolor="0.2", label=str(owner)) for owner in range(count)]
    columns = max(1, min(count, 12, int(figure.get_figwidth() / 0.6)))  # inches that an entry takes
    title = "colour: the client that the block is from"
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
        frameon=False,
        title=title,
        title_fontsize=8,
    )
