"""Every picture; the only file that imports matplotlib (when a picture is drawn, and without a display)."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr import files

# Okabe and Ito's colours for all kinds of colour vision (jfly.uni-koeln.de/color, 2008), the pale yellow left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STROKES = ("-", "--", ":", "-.")
WIDTH = 10.0  # inches

Series = Mapping[str, tuple[Sequence[float] | np.ndarray, ...]]
"""Lines by name: their x and y and, where there is a band around the line, its half width."""


@contextlib.contextmanager
def _picture(path: Path | str, size: tuple[float, float]) -> Iterator[Any]:
    """Yield an empty figure of a size in inches and write it to ``path``, whole, unless the block fails."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False}), files.whole(path) as temporary:
        figure = Figure(figsize=size, layout="constrained", dpi=150)
        FigureCanvasAgg(figure)  # no window, whatever the user's backend
        yield figure
        figure.savefig(temporary)


def _label(axis: Any, x_label: str = "", y_label: str = "", *, title: str = "") -> None:
    """Name a panel and its axes; leave its frame open at the top and on the right."""
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


# --- Lines -----------------------------------------------------------------------------------------------------------


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path | str) -> None:
    """Draw test accuracy and test loss over the rounds.

    Args:
      runs: the evaluations of each run, by the run's name.
      path: the picture to write (png, svg or pdf).
    """
    labels = {"accuracy": "test accuracy", "loss": "test loss (nats)"}
    panels = [
        {name: (_column(rows, "round"), _column(rows, column)) for name, rows in runs.items()} for column in labels
    ]
    with _line_panels(path, panels) as axes:
        axes[0].figure.get_layout_engine().set(wspace=0.04)
        for axis, label in zip(axes, labels.values(), strict=True):
            _label(axis, "round", label)


def lines(
    panels: Mapping[str, Series],
    path: Path | str,
    *,
    x_label: str,
    y_label: str,
    logarithmic: bool = False,
    x_names: Sequence[str] = (),
) -> None:
    """Draw lines in panels side by side; a name has the same colour and stroke in all of them.

    Args:
      panels: the lines of each panel, by the panel's title.
      path: the picture to write (png, svg or pdf).
      x_label: the quantity x, with its unit.
      y_label: the quantity y, with its unit.
      logarithmic: both axes.
      x_names: the names to write at x = 0, 1, ... in place of the numbers.
    """
    from matplotlib.ticker import NullFormatter

    with _line_panels(path, list(panels.values()), markers=bool(x_names)) as axes:
        for axis, title in zip(axes, panels, strict=True):
            _label(axis, x_label, y_label, title=title)
            if logarithmic:
                axis.set_xscale("log")
                axis.set_yscale("log")
                for scale in (axis.xaxis, axis.yaxis):
                    scale.set_major_formatter(lambda value, position: f"{value:g}")  # needs no typesetting of formulas
                    scale.set_minor_formatter(NullFormatter())
            if x_names:
                axis.set_xticks(range(len(x_names)), x_names, rotation=90 if len(x_names) > 8 else 0, fontsize=8)


@contextlib.contextmanager
def _line_panels(path: Path | str, panels: Sequence[Series], *, markers: bool = False) -> Iterator[Sequence[Any]]:
    """Draw the lines of panels side by side and their names below, and yield the panels' axes.

    A line of one point has a marker anyway; rounds (integers) have ticks at integers.
    """
    names = list(dict.fromkeys(name for series in panels for name in series))
    looks = dict(zip(names, itertools.cycle(itertools.product(STROKES, COLOURS)), strict=False))
    columns = max(1, min(len(names), int(WIDTH / (0.6 + 0.07 * max(map(len, names), default=0)))))
    height = 4.0 + (0.18 * math.ceil(len(names) / columns) if len(names) > 1 else 0.0)
    with _picture(path, (WIDTH, height)) as figure:
        drawn = {}
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, series in zip(axes, panels, strict=True):
            for name, (x, y, *band) in series.items():
                stroke, colour = looks[name]
                for width in band:
                    low, high = np.subtract(y, width), np.add(y, width)
                    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
                marker = "o" if len(x) == 1 or markers else ""
                (drawn[name],) = axis.plot(x, y, stroke, color=colour, linewidth=1.6, marker=marker)
            if all(isinstance(value, int) for x, *_ in series.values() for value in x):
                axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(color="0.9", linewidth=0.8)
            axis.set_axisbelow(True)
            axis.margins(x=0.01)
        if len(names) > 1:
            shown = [drawn[name] for name in names]
            figure.legend(shown, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
        else:
            figure.suptitle("".join(names), fontsize=10)
        yield axes


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return a column of evaluations; not a number where it is missing."""
    return [math.nan if row.get(name) is None else row[name] for row in rows]


# --- Heat maps, bars and surfaces ------------------------------------------------------------------------------------


def partition(counts: np.ndarray, path: Path | str, *, title: str = "", noun: str = "training samples") -> None:
    """Draw the division of the samples: a heat map of clients x classes under the clients' sizes.

    Args:
      counts: [N, C] samples per client and class.
      path: the picture to write (png, svg or pdf).
      title: a line above it.
      noun: the samples that are counted.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    height = 2.4 + min(6.0, max(1.6, 0.24 * num_classes))
    with _picture(path, (WIDTH, height)) as figure:
        sizes, table = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, height - 2.4))
        sizes.bar(range(num_clients), counts.sum(axis=1), width=0.85 if num_clients <= 200 else 1.0, color=COLOURS[0])
        _label(sizes, y_label=noun.replace(" ", "\n"), title=title)
        sizes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        norm = PowerNorm(0.5, vmin=0, vmax=max(1, counts.max()))  # small shares stay visible beside large ones
        smoothing = "nearest" if num_clients <= 1000 else "antialiased"
        image = table.imshow(counts.T, aspect="auto", cmap="Blues", norm=norm, interpolation=smoothing)
        table.set(xlabel="client", ylabel="class", xlim=(-0.5, num_clients - 0.5))
        for axis, count, most in ((table.xaxis, num_clients, 40), (table.yaxis, num_classes, 20)):
            axis.set_major_locator(MaxNLocator(min(count, most), integer=True, steps=(1, 2, 5, 10)))
        if num_clients <= 200 and num_classes <= 100:  # lines between the cells
            table.set_xticks([client - 0.5 for client in range(1, num_clients)], minor=True)
            table.set_yticks([label - 0.5 for label in range(1, num_classes)], minor=True)
            table.grid(which="minor", color="white", linewidth=0.6)
        table.tick_params(which="minor", length=0)
        sizes.tick_params(axis="x", which="both", length=0)
        bar = figure.colorbar(image, ax=table, pad=0.01, fraction=0.04)
        bar.set_label(noun)
        bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def histograms(values: Mapping[str, Sequence[float]], path: Path | str, *, x_label: str, y_label: str) -> None:
    """Draw how fractions spread over twenty bins from 0 to 1, a panel for each name, with their mean.

    Args:
      values: the fractions by name.
      path: the picture to write (png, svg or pdf).
      x_label: the quantity that the fractions are.
      y_label: the things that are counted.
    """
    with _picture(path, (WIDTH, 1.0 + 1.6 * len(values))) as figure:
        axes = figure.subplots(len(values), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axis, (name, fractions) in zip(axes, values.items(), strict=True):
            axis.hist(fractions, bins=np.linspace(0, 1, 21), color=COLOURS[0], rwidth=0.92)
            axis.axvline(float(np.mean(fractions)), color=COLOURS[1], linewidth=1.6)
            _label(axis, y_label=y_label, title=f"{name} (line: mean)")
            axis.yaxis.get_major_locator().set_params(integer=True)
        axes[-1].set(xlabel=x_label, xlim=(0, 1))


def bars(parts: Mapping[str, Mapping[str, float]], path: Path | str, *, x_label: str) -> None:
    """Draw a panel of horizontal bars for each part of a whole, from 0, with their values.

    Args:
      parts: values by part and name; the names are the same in every part.
      path: the picture to write (png, svg or pdf).
      x_label: the quantity, with its unit.
    """
    names = list(next(iter(parts.values())))
    with _picture(path, (WIDTH, 1.2 + 0.3 * len(names))) as figure:
        axes = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
        for axis, colour, (part, values) in zip(axes, itertools.cycle(COLOURS), parts.items(), strict=False):
            drawn = axis.barh(names, [values[name] for name in names], color=colour)
            axis.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
            _label(axis, x_label, title=part)
            axis.margins(x=0.18)
            axis.locator_params(axis="x", nbins=5)
        axes[0].invert_yaxis()  # the first name on top


def personal(
    rows: Sequence[Mapping[str, Any]], last: Mapping[str, Sequence[float]], path: Path | str, *, bins: int = 20
) -> None:
    """Draw the accuracy of the clients' own models over the rounds, its spread in the end, and their networks.

    Args:
      rows: the evaluations of a run; columns that are missing are not drawn.
      last: the clients' accuracies after the last round, by the treatment of their models.
      path: the picture to write (png, svg or pdf).
      bins: of the histogram.
    """
    column = lambda name: np.array(_column(rows, name), float)
    networks = [name for name in (rows[-1] if rows else ()) if name.startswith("network_")]
    with _picture(path, (WIDTH, 3.6)) as figure:
        axes = figure.subplots(1, 2 + bool(networks))
        rounds, mean, spread = column("round"), column("personal_accuracy"), column("personal_std")
        if np.isfinite(mean).any():
            axes[0].plot(rounds, mean, color=COLOURS[0], label="mean of the clients")
            band = np.maximum(mean - spread, 0), np.minimum(mean + spread, 1)
            axes[0].fill_between(rounds, *band, color=COLOURS[0], alpha=0.15, linewidth=0, label="one deviation")
            others = {"personal_worst10": "worst 10 %", "validation_accuracy": "validation, mean"}
            for (name, label), stroke, colour in zip(others.items(), STROKES[1:], COLOURS[1:], strict=False):
                if np.isfinite(column(name)).any():
                    axes[0].plot(rounds, column(name), stroke, color=colour, label=label)
            axes[0].legend(frameon=False, fontsize=8, loc="lower right")
        _label(axes[0], "round", "accuracy on the client's own samples")
        edges = np.linspace(0, 1, bins + 1)
        for (name, values), colour in zip(last.items(), COLOURS, strict=False):
            axes[1].hist(values, edges, histtype="stepfilled", color=colour, alpha=0.35, label=name)
            axes[1].axvline(float(np.mean(values)), color=colour, linewidth=1.6)
        _label(axes[1], "accuracy after the last round (lines: means)", "clients")
        axes[1].legend(frameon=False, fontsize=8, loc="upper left")
        if networks:
            counts, labels = [column(name) for name in networks], [name.split("_", 2)[2] for name in networks]
            axes[2].stackplot(rounds, counts, labels=labels, colors=COLOURS, alpha=0.8, linewidth=0)
            _label(axes[2], "round", "clients with the network")
            axes[2].margins(0)
            axes[2].legend(frameon=True, fontsize=8, loc="lower left")
        for axis in axes:
            axis.xaxis.get_major_locator().set_params(integer=axis is not axes[1])
            axis.yaxis.get_major_locator().set_params(integer=axis is not axes[0])


def surfaces(
    heights: Mapping[str, np.ndarray], steps: np.ndarray, path: Path | str, *, label: str, levels: int = 15
) -> None:
    """Draw surfaces [P, P] as contour maps side by side with one common scale.

    The common scale is logarithmic where the highest point is more than ten times the lowest, so that a valley and
    the walls around it both show; heights that are not finite stay white.

    Args:
      heights: the value at (steps[i], steps[j]), by the surface's name.
      steps: the coordinates [P] of both axes, in filter norms.
      path: the picture to write (png, svg or pdf).
      label: the quantity, with its unit.
      levels: how many contours.
    """
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import MaxNLocator, NullFormatter

    everything = np.concatenate([np.ravel(surface) for surface in heights.values()])
    finite = everything[np.isfinite(everything)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    high = high if high > low else low + 1.0
    steep = 0 < 10 * low < high
    edges = np.geomspace(low, high, levels) if steep else np.linspace(low, high, levels)
    columns = min(len(heights), 4)
    rows = math.ceil(len(heights) / columns)
    side = min(4.4, (WIDTH - 1.0) / columns)
    with _picture(path, (max(5.0, columns * side + 1.0), rows * (side + 0.3) + 0.2)) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        filled: Any = None
        for axis, (name, surface) in zip(axes.flat, heights.items(), strict=False):
            values = np.ma.masked_invalid(np.clip(surface.T, edges[0], edges[-1]))
            norm = (LogNorm if steep else Normalize)(edges[0], edges[-1])
            filled = axis.contourf(steps, steps, values, levels=edges, cmap="cividis", norm=norm)
            axis.contour(steps, steps, values, levels=edges, colors="white", linewidths=0.5)
            axis.plot(0, 0, "+", color="white", markersize=9)
            axis.set_title(name, fontsize=10)
            axis.set_aspect("equal")
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_locator(MaxNLocator(5))
        for axis in axes[-1]:
            axis.set_xlabel("first direction (filter norms)")
        for axis in axes[:, 0]:
            axis.set_ylabel("second direction (filter norms)")
        for axis in list(axes.flat)[len(heights) :]:
            axis.set_axis_off()
        bar = figure.colorbar(filled, ax=axes, pad=0.02, fraction=0.05, ticks=edges[::2])
        bar.ax.yaxis.set_major_formatter(lambda value, position: f"{value:.3g}")
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
        bar.set_label(label)


# --- pFedHR's reassembly ---------------------------------------------------------------------------------------------


def grouped(table: np.ndarray, names: Sequence[str], groups: Sequence[int], path: Path | str, *, label: str) -> None:
    """Draw a symmetric table of numbers between 0 and 1 whose rows are sorted by group, with a frame around each.

    Args:
      table: [L, L].
      names: of the rows.
      groups: of the rows, ascending.
      path: the picture to write (png, svg or pdf).
      label: the quantity that the numbers are.
    """
    from matplotlib.patches import Rectangle

    side = max(5.0, 0.19 * len(names) + 1.6)
    with _picture(path, (side + 1.0, side)) as figure:
        axis = figure.subplots()
        image = axis.imshow(table, cmap="cividis", vmin=0.0, vmax=1.0)
        for group in sorted(set(groups)):
            rows = [row for row, own in enumerate(groups) if own == group]
            corner = (rows[0] - 0.5, rows[0] - 0.5)
            axis.add_patch(Rectangle(corner, len(rows), len(rows), fill=False, edgecolor=COLOURS[1], linewidth=2.5))
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set_title("blocks (client.place), framed by group", fontsize=10)
        figure.colorbar(image, ax=axis, shrink=0.8).set_label(label)


Strip = Sequence[tuple[int, int, bool]]
"""Blocks in order: the owner, the place in its network, and whether it is drawn as a disc."""


def strips(rows: Mapping[str, Sequence[Strip]], path: Path | str, *, num_colours: int) -> None:
    """Draw strips of blocks, a panel for each name: the colour is the owner's, the number the place in its network.

    Args:
      rows: the strips by the panel's name.
      path: the picture to write (png, svg or pdf).
      num_colours: how many owners there are.
    """
    columns = min(4, len(rows))
    lines = math.ceil(len(rows) / columns)
    widest = max((len(strip) for strips in rows.values() for strip in strips), default=1)
    tallest = max(1, *(len(strips) for strips in rows.values()))
    size = (columns * (0.28 * widest + 0.5), lines * (0.3 * tallest + 0.4) + 0.5)
    with _picture(path, size) as figure:
        axes = figure.subplots(lines, columns, squeeze=False).ravel()
        for axis, (name, drawn) in zip(axes, rows.items(), strict=False):
            axis.set_title(name if drawn else f"{name}: none", fontsize=9)
            for height, strip in enumerate(drawn):
                _strip(axis, strip, 0.0, float(height), 1.0, num_colours, with_numbers=True)
            axis.set(xlim=(-0.6, widest - 0.4), ylim=(tallest - 0.4, -0.6), aspect="equal")
        for axis in axes:
            axis.set_axis_off()
        _owners(figure, num_colours)


def teachers(rounds: Mapping[int, Mapping[int, Strip]], num_clients: int, path: Path | str) -> None:
    """Draw the owners of the blocks in each client's teacher: round by round, and their shares over all rounds.

    Args:
      rounds: each client's teacher by round, for the clients that had one.
      num_clients: N.
      path: the picture to write (png, svg or pdf).
    """
    shares = np.zeros((num_clients, num_clients))
    for teachers in rounds.values():
        for client, strip in teachers.items():
            for owner, _, _ in strip:
                shares[client, owner] += 1
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1)
    longest = max((len(strip) for each in rounds.values() for strip in each.values()), default=1)
    widths = max(3.0, 0.62 * len(rounds)), 0.34 * num_clients + 0.8
    with _picture(path, (sum(widths) + 1.6, 0.34 * num_clients + 1.6)) as figure:
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
        _owners(figure, num_clients)


def _strip(
    axis: Any, strip: Strip, left: float, middle: float, width: float, num_colours: int, *, with_numbers: bool
) -> None:
    """Draw a strip of blocks, each ``width`` wide; with numbers, ``left`` is the middle of the first one."""
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
    """Return an owner's colour out of those of all owners."""
    import matplotlib

    return matplotlib.colormaps["tab20" if count <= 20 else "turbo"](owner if count <= 20 else owner / (count - 1))


def _owners(figure: Any, count: int) -> None:
    """Write below a picture which colour is whose; more than twenty owners have too many."""
    from matplotlib.patches import Patch

    if count > 20:
        return
    handles = [Patch(facecolor=_colour(owner, count), edgecolor="0.2", label=str(owner)) for owner in range(count)]
    columns = max(1, min(count, 12, int(figure.get_figwidth() / 0.6)))  # inches that an entry takes
    place = "outside lower center"
    figure.legend(handles=handles, loc=place, ncols=columns, fontsize=7, frameon=False, title="client")
