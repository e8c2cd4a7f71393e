"""Plots for Python: functions that draw into Matplotlib axes and return them, to be changed as any other axes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedjax_mr import plots
from fedjax_mr.analysis import groups
from fedjax_mr.analysis.learning import curves, label_of, possible
from fedjax_mr.errors import UserError


def plot_curves(
    paths: Path | str | Iterable[Path | str],
    *,
    column: str | None = None,
    x: str = "rounds",
    colours: Mapping[str, str] | None = None,
    ax: Any = None,
) -> Any:
    """Draw learning curves: the mean over the seeds with a band of one standard deviation.

    Args:
      paths: a run folder, a table of kept runs or a folder that holds some, or several of these.
      column: column of the evaluations. Default: the first metric, such as the accuracy.
      x: ``rounds``, ``clock`` (simulated time) or ``bytes``.
      colours: colours by method or by name of the curve. Default: those of the methods.
      ax: Matplotlib axes. Default: those of a new figure of pyplot.

    Returns:
      The axes, with a legend.

    Raises:
      UserError: a path holds no run, or a run has no such column or x.
    """
    if x not in plots.X_UNITS:
        raise UserError(f"x={x} is none of {', '.join(plots.X_UNITS)}")
    chosen = groups.find([paths] if isinstance(paths, Path | str) else paths)
    column = column or chosen[0].metric().name
    drawn = curves(chosen, column=column, x=x)
    (series,) = drawn.panels.values()
    axis = plots.new_axes() if ax is None else ax
    names = plots.coloured(plots.looks(series, drawn.methods), drawn.methods, plots.Design(colours=colours or {}))
    artists = plots.draw(axis, series, names, possible=possible(column), styled=True)
    axis.set(xlabel=drawn.x_label, ylabel=label_of(column))
    axis.legend(artists.values(), artists)
    return axis
