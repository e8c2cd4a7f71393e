"""The jobs of clients in simulated time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_mr.plots.figure import WIDTH, name_axes, picture
from fedjax_mr.plots.looks import COLOURS

MOST_NAMED = 30  # rows with a name each; of more rows, only the first and the last have one
TRANSFER, DROPPED, VERSION = "#B8C4CE", "#D9D9D9", "#9A9A9A"


class Jobs(NamedTuple):
    """J jobs, arrays [J]. Times have the unit of the picture."""

    row: np.ndarray  # the client's row in the picture, from the top
    start: np.ndarray
    train: np.ndarray  # end of the download
    trained: np.ndarray  # end of the training
    end: np.ndarray  # end of the upload, or of the round if the upload was dropped
    staleness: np.ndarray  # tau of the upload
    used: np.ndarray  # bool: the upload made a version
    dropped: np.ndarray  # bool: the upload came too late


def timeline(
    jobs: Jobs,
    versions: Sequence[float] | np.ndarray,
    path: Path | str,
    *,
    names: Sequence[str],
    window: tuple[float, float],
    all_staleness: np.ndarray,
    x_label: str,
    y_label: str,
    title: str,
) -> None:
    """Draw the jobs of clients, and a histogram of the staleness of their uploads.

    A row is a client and a bar is a job: grey transfers, and its training in the colour of the staleness of its upload.
    A dot is an arrival, a vertical line a version of the server.

    Args:
      jobs: the jobs of the window.
      versions: times at which the server made its versions.
      path: file to write, in one of `FORMATS`.
      names: names of the rows, from the top.
      window: first and last time.
      all_staleness: staleness of all uploads of the run, for the histogram. Without stale uploads there is none.
      x_label: quantity of time, with its unit.
      y_label: order of the rows.
      title: title of the picture.
    """
    colours = _colours(int(max(all_staleness.max(initial=0), jobs.staleness.max(initial=0))))
    stale = len(colours) > 1
    height = min(9.0, max(2.2, 0.9 + (0.2 if len(names) <= MOST_NAMED else 0.062) * len(names)))
    with picture(path, (WIDTH, height + 1.7 * stale + 0.5)) as figure:
        heights = [height, 1.7] if stale else [height]
        axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        _bars(axes[0], jobs, colours)
        axis = axes[0]
        axis.vlines(versions, -0.5, len(names) - 0.5, colors=VERSION, linewidths=0.7, zorder=1)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_xlim(*window)
        shown = range(len(names)) if len(names) <= MOST_NAMED else (0, len(names) - 1)
        axis.set_yticks(list(shown), [names[row] for row in shown], fontsize=7)
        axis.tick_params(axis="y", length=0)
        name_axes(axis, x_label, y_label, title=title)
        axis.spines["left"].set_visible(False)
        figure.legend(
            handles=_legend(jobs, colours),
            loc="outside lower center",
            ncols=6,
            frameon=False,
            fontsize=8,
            handlelength=1.6,
        )
        if stale:
            counts = np.bincount(all_staleness, minlength=len(colours))
            drawn = axes[1].bar(np.arange(len(counts)), counts / counts.sum(), color=colours, width=0.8)
            labels = [f"{share:.0%}" if share >= 0.005 else "" for share in counts / counts.sum()]
            axes[1].bar_label(drawn, labels, fontsize=7 if len(labels) < 25 else 5, padding=1)
            axes[1].margins(x=0.01, y=0.2)
            axes[1].set_xticks(np.arange(0, len(counts), 1 + len(counts) // 25))
            axes[1].set_yticks([])
            axes[1].spines["left"].set_visible(False)
            mean = f"staleness of an upload in versions (whole run; mean {all_staleness.mean():.2f})"
            name_axes(axes[1], mean, "uploads")


def _bars(axis: Any, jobs: Jobs, colours: Sequence[Any]) -> None:
    height, at = 0.72, jobs.row
    of_job = np.array([colours[tau] for tau in jobs.staleness], object)
    of_job[~jobs.used] = DROPPED  # also of jobs that are in flight at the end of the run
    bar = lambda first, last, colour, **look: axis.barh(
        at, np.maximum(last - first, 0), height, left=first, color=list(colour), linewidth=0, zorder=2, **look
    )
    bar(jobs.start, jobs.end, np.where(jobs.dropped, DROPPED, TRANSFER))
    bar(jobs.train, np.minimum(jobs.trained, jobs.end), of_job)
    arrived, late = jobs.used, jobs.dropped
    axis.plot(jobs.end[arrived], at[arrived], "o", color="black", markersize=2.6, markeredgewidth=0, zorder=3)
    axis.plot(jobs.end[late], at[late], "x", color=COLOURS[1], markersize=4, markeredgewidth=1.1, zorder=3)


def _legend(jobs: Jobs, colours: Sequence[Any]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    training = "training (colour: staleness, below)" if len(colours) > 1 else "training"
    dot = {"color": "black", "linewidth": 0}
    shown = [
        Patch(color=colours[0], label=training),
        Patch(color=TRANSFER, label="download, upload"),
        Line2D([], [], marker="o", markersize=3, label="arrival", **dot),
        Line2D([], [], color=VERSION, linewidth=0.9, label="version of the server"),
    ]
    if jobs.dropped.any():
        cross = Line2D([], [], marker="x", markersize=4.5, color=COLOURS[1], linewidth=0, label="late, dropped")
        shown += [Patch(color=DROPPED, label="dropped job"), cross]
    return shown


def _colours(most: int) -> list[Any]:
    """A colour for each staleness 0..most: blue for fresh uploads, then yellow to dark red."""
    import matplotlib

    ramp = matplotlib.colormaps["YlOrRd"]
    return [COLOURS[0], *(ramp(0.25 + 0.75 * (tau - 1) / max(most - 1, 1)) for tau in range(1, most + 1))]
