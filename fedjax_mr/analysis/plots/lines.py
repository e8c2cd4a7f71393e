"""Lines and bars: learning curves, spreads, seconds."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.analysis.plots.figure import WIDTH, column, name_axes, picture
from fedjax_mr.analysis.plots.looks import Look, looks

Series = Mapping[str, tuple[Sequence[float] | np.ndarray, ...]]
"""Lines by name: their x and y and, where there is a band around the line, its half width."""

MOST_COLUMNS = 4  # panels side by side
ALL_MARKED = 12  # points of a line that all have their marker; of longer lines about as many have one


def curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path | str, *, methods: Mapping[str, str] | None = None
) -> None:
    """Draw test accuracy and test loss over the rounds.

    Args:
      runs: the evaluations of each run, by the run's name.
      path: the picture to write, in one of `FORMATS`.
      methods: the runs' methods by the same names, which decide about their `looks`.
    """
    quantities = {"accuracy": "test accuracy", "loss": "test loss (nats)"}
    panels = [
        {name: (column(rows, "round"), column(rows, quantity)) for name, rows in runs.items()}
        for quantity in quantities
    ]
    with _line_panels(path, panels, methods, share=False) as axes:
        axes[0].figure.get_layout_engine().set(wspace=0.04)
        for axis, words in zip(axes, quantities.values(), strict=True):
            name_axes(axis, "round", words)


def lines(
    panels: Mapping[str, Series],
    path: Path | str,
    *,
    x_label: str,
    y_label: str,
    methods: Mapping[str, str] | None = None,
    logarithmic: bool = False,
    x_names: Sequence[str] = (),
    crosses: Mapping[str, Series] | None = None,
    possible: tuple[float, float] = (-math.inf, math.inf),
) -> None:
    """Draw lines in panels with common axes; a name has the same look in all of them.

    Args:
      panels: the lines of each panel, by the panel's title.
      path: the picture to write, in one of `FORMATS`.
      x_label: the quantity x, with its unit.
      y_label: the quantity y, with its unit.
      methods: of the lines, by the lines' names; they decide about the `looks`.
      logarithmic: both axes.
      x_names: the names to write at x = 0, 1, ... in place of the numbers.
      crosses: points by panel and name of a line, each drawn as a cross in the colour of its line.
      possible: the lowest and the highest value that y can have; bands end there.
    """
    from matplotlib.ticker import NullFormatter

    with _line_panels(path, list(panels.values()), methods, possible=possible) as axes:
        chosen = looks(dict.fromkeys(name for series in panels.values() for name in series), methods)
        for axis, title in zip(axes, panels, strict=True):
            for name, (x, y) in (crosses or {}).get(title, {}).items():
                axis.plot(x, y, "x", color=chosen[name].colour, markersize=9, markeredgewidth=2.2, zorder=3)
            name_axes(axis, x_label, y_label, title=title)
            if logarithmic:
                axis.set_xscale("log")
                axis.set_yscale("log")
                for scale in (axis.xaxis, axis.yaxis):
                    scale.set_major_formatter(lambda value, position: f"{value:g}")  # needs no typesetting of formulas
                    scale.set_minor_formatter(NullFormatter())
            if x_names:
                axis.set_xticks(range(len(x_names)), x_names, rotation=90 if len(x_names) > 8 else 0, fontsize=8)
            axis.label_outer()


@contextlib.contextmanager
def _line_panels(
    path: Path | str,
    panels: Sequence[Series],
    methods: Mapping[str, str] | None,
    *,
    share: bool = True,
    possible: tuple[float, float] = (-math.inf, math.inf),
) -> Iterator[Sequence[Any]]:
    """Draw the lines of panels and their names below, and yield the panels' axes.

    Rounds (integers) have ticks at integers.
    """
    names = list(dict.fromkeys(name for series in panels for name in series))
    chosen = looks(names, methods)
    columns = min(MOST_COLUMNS, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    in_legend = max(1, min(len(names), int(WIDTH / (0.6 + 0.07 * max(map(len, names), default=0)))))
    height = (4.0 if rows == 1 else 3.0 * rows) + (0.18 * math.ceil(len(names) / in_legend) if len(names) > 1 else 0.0)
    with picture(path, (WIDTH, height)) as figure:
        drawn = {}
        grid = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).ravel()
        axes, empty = grid[: len(panels)], grid[len(panels) :]
        for axis in empty:
            axis.set_axis_off()
        for axis, series in zip(axes, panels, strict=True):
            for name, (x, y, *band) in series.items():
                for width in band:
                    low, high = np.clip([np.subtract(y, width), np.add(y, width)], *possible)
                    axis.fill_between(x, low, high, color=chosen[name].colour, alpha=0.15, linewidth=0)
                drawn[name] = _line(axis, x, y, chosen[name], names.index(name) / len(names))
            if all(isinstance(value, int) for x, *_ in series.values() for value in x):
                axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axis.grid(color="0.9", linewidth=0.8)
            axis.set_axisbelow(True)
            axis.margins(x=0.02)
        if len(names) > 1:
            shown = [drawn[name] for name in names]
            figure.legend(
                shown, names, loc="outside lower center", ncols=in_legend, frameon=False, fontsize=8, handlelength=3.2
            )
        else:
            figure.suptitle("".join(names), fontsize=10)
        yield axes


def _line(axis: Any, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, look: Look, shift: float) -> Any:
    """Draw a line with its markers, those of a long line apart from one another and from those of other lines."""
    step = max(1, math.ceil(len(x) / ALL_MARKED))
    (drawn,) = axis.plot(
        x,
        y,
        look.stroke,
        color=look.colour,
        linewidth=1.6,
        marker=look.marker or ("o" if len(x) == 1 else ""),
        markersize=8.5 if look.marker == "*" else 5.5,
        markeredgecolor="white",
        markeredgewidth=0.4,
        markevery=(int(shift * step), step),
    )
    return drawn


def bars(
    parts: Mapping[str, Mapping[str, float]],
    path: Path | str,
    *,
    x_label: str,
    methods: Mapping[str, str] | None = None,
) -> None:
    """Draw a panel of horizontal bars for each part of a whole, from 0 on one scale, with their values.

    Args:
      parts: values by part and name; the names are the same in every part.
      path: the picture to write, in one of `FORMATS`.
      x_label: the quantity, with its unit.
      methods: of the names, which decide about the bars' colours.
    """
    names = list(next(iter(parts.values())))
    chosen = looks(names, methods)
    with picture(path, (WIDTH, 1.2 + 0.3 * len(names))) as figure:
        axes = figure.subplots(1, len(parts), squeeze=False, sharex=True, sharey=True)[0]
        for axis, (part, values) in zip(axes, parts.items(), strict=True):
            colours = [chosen[name].colour for name in names]
            drawn = axis.barh(names, [values[name] for name in names], color=colours)
            axis.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
            name_axes(axis, x_label, title=part)
            axis.margins(x=0.18)
            axis.locator_params(axis="x", nbins=5)
        axes[0].invert_yaxis()  # the first name on top
