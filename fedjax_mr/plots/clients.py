"""Plots of the distribution of samples and accuracies over the clients."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.plots.figure import WIDTH, column, name_axes, picture
from fedjax_mr.plots.looks import COLOURS, STROKES, look, looks, number_of

MOST_COLUMNS = 1000  # columns of the plot of a partition; with more clients, neighbours share a column


def partition(
    counts: np.ndarray,
    path: Path | str,
    *,
    title: str = "",
    group: str = "class",
) -> None:
    """Draw the partition of the samples: a heat map of clients x classes below the sizes of the clients.

    With more than `MOST_COLUMNS` clients, neighbours share a column. It shows their mean and, in a paler colour above
    it, the size of the largest. So the time to draw does not grow with N.

    Args:
      counts: [N, C] samples per client and class.
      path: file to write, in one of `FORMATS`.
      title: line above the plot.
      group: name of the groups C.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    height = 2.4 + min(6.0, max(1.6, 0.24 * num_classes))
    with picture(path, (WIDTH, height), layout="none") as figure:  # drawn in every run, so it should be fast
        margins = {"left": 0.8 / WIDTH, "right": 1 - 0.75 / WIDTH, "bottom": 0.5 / height, "top": 1 - 0.3 / height}
        grid = figure.add_gridspec(
            2, 2, height_ratios=(1.3, height - 2.4), width_ratios=(1, 0.015), wspace=0.02, hspace=0.1, **margins
        )
        sizes = figure.add_subplot(grid[0, 0])
        table = figure.add_subplot(grid[1, 0], sharex=sizes)
        edges = np.linspace(0, num_clients, min(num_clients, MOST_COLUMNS) + 1).astype(int)
        groups, members = edges[:-1], np.diff(edges)
        of_clients = counts.sum(axis=1)
        mean = np.add.reduceat(of_clients, groups) / members
        if num_clients <= 200:
            sizes.bar(range(num_clients), of_clients, width=0.85, color=COLOURS[0])
        else:
            sizes.stairs(mean, edges - 0.5, fill=True, color=COLOURS[0], label="mean")
        if num_clients > MOST_COLUMNS:
            most, words = np.maximum.reduceat(of_clients, groups), f"most of {members.max()} neighbouring clients"
            sizes.stairs(most, edges - 0.5, baseline=mean, fill=True, color=COLOURS[4], alpha=0.5, label=words)
            sizes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2)
        name_axes(sizes, y_label="training\nsamples", title=title)
        sizes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        together = np.add.reduceat(counts, groups, axis=0, dtype=counts.dtype)  # without a copy of the table
        shares = together / members[:, None]  # [columns, C]
        norm = PowerNorm(0.5, vmin=0, vmax=max(1, shares.max()))  # small shares stay visible beside large ones
        extent = (-0.5, num_clients - 0.5, num_classes - 0.5, -0.5)
        image = table.imshow(shares.T, aspect="auto", cmap="Blues", norm=norm, interpolation="nearest", extent=extent)
        table.set(xlabel="client", ylabel=group, xlim=(-0.5, num_clients - 0.5))
        ticks = 40 if num_clients <= 100 else 10  # longer numbers need more room
        for axis, count, at_most in ((table.xaxis, num_clients, ticks), (table.yaxis, num_classes, 20)):
            axis.set_major_locator(MaxNLocator(min(count, at_most), integer=True, steps=(1, 2, 5, 10)))
        if num_clients <= 200 and num_classes <= 100:  # lines between the cells; minor ticks would take half a second
            white = {"colors": "white", "linewidths": 0.6}
            table.vlines(np.arange(1, num_clients) - 0.5, -0.5, num_classes - 0.5, **white)
            table.hlines(np.arange(1, num_classes) - 0.5, -0.5, num_clients - 0.5, **white)
        sizes.tick_params(axis="x", which="both", length=0, labelbottom=False)
        bar = figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]))
        bar.set_label("training samples")
        bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def contributions(values: Mapping[str, np.ndarray], path: Path | str, *, names: Sequence[str], y_label: str) -> None:
    """Draw the contribution of each client as bars, one colour per rule.

    Lines show one standard deviation over the seeds, and points the single seeds.

    Args:
      values: contributions [S, N] of N clients with S seeds, by rule.
      path: file to write, in one of `FORMATS`.
      names: names of the clients [N].
      y_label: what the clients contribute to.
    """
    places, width, chosen = np.arange(len(names)), 0.8 / len(values), looks(values)
    with picture(path, (min(2 * WIDTH, max(0.6 * WIDTH, 0.6 * len(names))), 4.0)) as figure:
        axis = figure.subplots()
        for number, (rule, each) in enumerate(values.items()):
            at, colour = places + (number - (len(values) - 1) / 2) * width, chosen[rule].colour
            several = len(each) > 1
            spread = each.std(axis=0, ddof=1) if several else None
            axis.bar(at, each.mean(axis=0), 0.92 * width, yerr=spread, color=colour, ecolor="0.25", label=rule)
            if several:
                axis.plot(np.tile(at, len(each)), each.ravel(), ".", color="0.25", markersize=2.5)
        axis.axhline(0, color="0.25", linewidth=0.8)
        axis.set_xticks(places, names, rotation=90 if max(map(len, names)) > 4 else 0)
        name_axes(axis, "client", y_label)
        _legend_above(axis)


def histograms(
    values: Mapping[str, Sequence[float]],
    path: Path | str,
    *,
    x_label: str,
    y_label: str,
    methods: Mapping[str, str] | None = None,
) -> None:
    """Draw histograms of fractions with twenty bins from 0 to 1 and their mean, one panel per name.

    Args:
      values: fractions by name.
      path: file to write, in one of `FORMATS`.
      x_label: quantity of the fractions.
      y_label: name of what is counted.
      methods: method of each name. It decides the colour of the bars.
    """
    chosen = looks(values, methods)
    with picture(path, (WIDTH, 1.0 + 1.6 * len(values))) as figure:
        axes = figure.subplots(len(values), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axis, (name, fractions) in zip(axes, values.items(), strict=True):
            axis.hist(fractions, bins=np.linspace(0, 1, 21), color=chosen[name].colour, rwidth=0.92)
            mean = axis.axvline(float(np.mean(fractions)), color="0.25", linewidth=1.6, linestyle="--", label="mean")
            name_axes(axis, y_label=y_label, title=name)
            axis.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes[0].legend(handles=[mean], frameon=False, fontsize=8, loc="upper left")
        axes[-1].set(xlabel=x_label, xlim=(0, 1))


def personal(
    rows: Sequence[Mapping[str, Any]],
    last: Mapping[str, Sequence[float]],
    path: Path | str,
    *,
    method: str | None = None,
    networks: Mapping[str, str] | None = None,
    metric: tuple[str, str] = ("accuracy", "accuracy"),
    fraction: bool = True,
) -> None:
    """Draw the first metric of the clients' own models over the rounds, its final distribution, and their networks.

    The panel over the rounds is left out if there is a single evaluation, or none of single clients.

    Args:
      rows: evaluations of a run. Missing columns are not drawn.
      last: values of the clients after the last round, by the treatment of their models.
      path: file to write, in one of `FORMATS`.
      method: method of the run. It decides the first colour.
      networks: names of the clients' networks, by the columns that count them. None if all have the same network.
      metric: the metric and its name in words.
      fraction: whether its values are from 0 to 1.
    """
    of = lambda name: np.array(column(rows, name), float)
    over_rounds = len(rows) > 1 and bool(np.isfinite(of(f"personal_{metric[0]}")).any())
    first = 0 if method is None else number_of(method)
    colours = [look(first + place).colour for place in range(3)]
    with picture(path, (WIDTH if over_rounds else 0.7 * WIDTH, 3.6)) as figure:
        axes = list(figure.subplots(1, 1 + over_rounds + bool(networks), squeeze=False)[0])
        if over_rounds:
            _over_rounds(axes.pop(0), of, colours, metric, fraction)
        _last(axes.pop(0), last, colours, metric[1], fraction)
        if networks:
            _networks(axes.pop(0), of, networks)


def _over_rounds(
    axis: Any, of: Callable[[str], np.ndarray], colours: Sequence[str], metric: tuple[str, str], fraction: bool
) -> None:
    name, title = metric
    rounds, mean, spread = of("round"), of(f"personal_{name}"), of("personal_std")
    axis.plot(rounds, mean, color=colours[0], label="mean of the clients")
    band = (mean - spread, mean + spread)
    band = (np.maximum(band[0], 0), np.minimum(band[1], 1)) if fraction else band
    axis.fill_between(rounds, *band, color=colours[0], alpha=0.15, linewidth=0, label="one standard deviation")
    others = {"personal_worst10": "worst 10 %", f"validation_{name}": "validation, mean"}
    for (name, words), stroke, colour in zip(others.items(), STROKES[1:], colours[1:], strict=False):
        if np.isfinite(of(name)).any():
            axis.plot(rounds, of(name), stroke, color=colour, label=words)
    _legend_above(axis)
    name_axes(axis, "round", f"{title} on the client's own samples")
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _last(axis: Any, last: Mapping[str, Sequence[float]], colours: Sequence[str], title: str, fraction: bool) -> None:
    every = [value for values in last.values() for value in values] or [0.0, 1.0]
    low, high = (0.0, 1.0) if fraction else (min(every), max(every))
    for (name, values), colour in zip(last.items(), colours, strict=False):
        axis.hist(values, np.linspace(low, high, 21), histtype="stepfilled", color=colour, alpha=0.35, label=name)
        axis.axvline(float(np.mean(values)), color=colour, linewidth=1.6)
    name_axes(axis, f"{title} after the last round (lines: means)", "clients")
    if fraction:
        axis.set_xlim(0, 1)
    axis.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    _legend_above(axis)


def _networks(axis: Any, of: Callable[[str], np.ndarray], networks: Mapping[str, str]) -> None:
    """Draw the number of clients with each network: over the rounds, or as bars if there is one evaluation."""
    counts = {name: of(counted) for counted, name in networks.items()}
    if len(of("round")) > 1:
        axis.stackplot(of("round"), counts.values(), labels=list(counts), colors=COLOURS, alpha=0.8, linewidth=0)
        name_axes(axis, "round", "clients with the network")
        axis.margins(0)
        _legend_above(axis)
    else:
        axis.barh(list(counts), [float(each[-1]) for each in counts.values()], color=COLOURS, alpha=0.8)
        name_axes(axis, "clients with the network")
        axis.invert_yaxis()
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _legend_above(axis: Any) -> None:
    """Put the legend above a panel, where it hides nothing."""
    axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
