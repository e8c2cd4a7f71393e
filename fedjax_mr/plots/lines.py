"""Lines and bars: learning curves, spreads, seconds."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.plots.figure import WIDTH, Design, column, name_axes, picture
from fedjax_mr.plots.looks import Look, looks

Series = Mapping[str, tuple[Sequence[float] | np.ndarray, ...]]
"""Lines by name: x, y and, for a band around the line, its half width."""

USUAL = Design()
MOST_COLUMNS = 4  # panels side by side
ALL_MARKED = 12  # lines with at most so many points have a marker at each; longer ones have about as many markers


def curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    path: Path | str,
    *,
    methods: Mapping[str, str] | None = None,
    metric: tuple[str, str] = ("accuracy", "accuracy"),
) -> None:
    """Draw the first metric, such as the test accuracy, and the test loss over the rounds.

    Args:
      runs: evaluations of each run, by the name of the run.
      path: file to write, in one of `FORMATS`.
      methods: method of each run by the same names. It decides the `looks`.
      metric: the column and its name in words.
    """
    name, title = metric
    quantities = {name: f"test {title}", "loss": "test loss (nats)" if name == "accuracy" else "test loss"}
    panels = [
        {name: (column(rows, "round"), column(rows, quantity)) for name, rows in runs.items()}
        for quantity in quantities
    ]
    with _line_panels(path, panels, methods, share=False) as (axes, _):
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
    design: Design = USUAL,
) -> None:
    """Draw lines in panels with common axes; a name has the same look in all of them.

    Args:
      panels: lines of each panel, by the title of the panel.
      path: file to write, in one of `FORMATS`.
      x_label: quantity x, with its unit.
      y_label: quantity y, with its unit.
      methods: method of each line, by the name of the line. It decides the `looks`.
      logarithmic: whether both axes are logarithmic.
      x_names: names to write at x = 0, 1, ... instead of numbers.
      crosses: points by panel and name of a line, each drawn as a cross in the colour of its line.
      possible: lowest and highest possible value of y. Bands end there.
      design: size, title, colours and style of the picture.

    Raises:
      UserError: a bad size, colour or style.
    """
    from matplotlib.ticker import NullFormatter

    design.check()
    with _line_panels(path, list(panels.values()), methods, possible=possible, design=design) as (axes, chosen):
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
    design: Design = USUAL,
) -> Iterator[tuple[Sequence[Any], Mapping[str, Look]]]:
    """Draw the lines of panels and a legend below, and yield the axes of the panels and the looks of the lines."""
    names = list(dict.fromkeys(name for series in panels for name in series))
    chosen = coloured(looks(names, methods), methods, design)
    width = design.width or WIDTH
    columns = min(MOST_COLUMNS, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    in_legend = max(1, min(len(names), int(width / (0.6 + 0.07 * max(map(len, names), default=0)))))
    height = (4.0 if rows == 1 else 3.0 * rows) + (0.18 * math.ceil(len(names) / in_legend) if len(names) > 1 else 0.0)
    with picture(path, (width, design.height or height), style=design.style) as figure:
        drawn = {}
        grid = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).ravel()
        axes, empty = grid[: len(panels)], grid[len(panels) :]
        for axis in empty:
            axis.set_axis_off()
        for axis, series in zip(axes, panels, strict=True):
            drawn |= draw(axis, series, chosen, possible=possible, styled=design.style is not None)
        if len(names) > 1:
            shown = [drawn[name] for name in names]
            figure.legend(
                shown, names, loc="outside lower center", ncols=in_legend, frameon=False, fontsize=8, handlelength=3.2
            )
        if design.title or len(names) == 1:
            figure.suptitle(design.title or names[0], fontsize=10)
        yield axes, chosen


def draw(
    axis: Any,
    series: Series,
    chosen: Mapping[str, Look],
    *,
    possible: tuple[float, float] = (-math.inf, math.inf),
    styled: bool = False,
) -> dict[str, Any]:
    """Draw lines with bands into Matplotlib axes, and return the artist of each line.

    If all x are integers (rounds), the ticks are at integers.

    Args:
      axis: the axes.
      series: the lines.
      chosen: the look of each line; their order decides where markers are.
      possible: lowest and highest possible value of y. Bands end there.
      styled: whether the grid and the margins are those of the user's style.
    """
    names, drawn = list(chosen), {}
    for name, (x, y, *band) in series.items():
        for width in band:
            low, high = np.clip([np.subtract(y, width), np.add(y, width)], *possible)
            axis.fill_between(x, low, high, color=chosen[name].colour, alpha=0.15, linewidth=0)
        drawn[name] = _line(axis, x, y, chosen[name], names.index(name) / len(names))
    if all(isinstance(value, int) for x, *_ in series.values() for value in x):
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if not styled:
        axis.grid(color="0.9", linewidth=0.8)
        axis.margins(x=0.02)
    axis.set_axisbelow(True)
    return drawn


def coloured(chosen: Mapping[str, Look], methods: Mapping[str, str] | None, design: Design) -> dict[str, Look]:
    """The looks with the colours of a design: by the name of a line, or by its method."""
    colour = lambda name: design.colours.get(name) or design.colours.get((methods or {}).get(name, ""))
    return {name: look._replace(colour=colour(name) or look.colour) for name, look in chosen.items()}


def _line(axis: Any, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, look: Look, shift: float) -> Any:
    """Draw a line with its markers. On a long line they are spaced, and shifted against those of other lines."""
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
    """Draw a panel of horizontal bars for each part of a whole, on one scale from 0, with their values.

    Args:
      parts: values by part and name. All parts have the same names.
      path: file to write, in one of `FORMATS`.
      x_label: quantity, with its unit.
      methods: method of each name. It decides the colour of the bar.
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
