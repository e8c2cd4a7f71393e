"""Loss surfaces as contour maps."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.plots.figure import WIDTH, picture


def surfaces(
    heights: Mapping[str, np.ndarray], steps: np.ndarray, path: Path | str, *, label: str, levels: int = 15
) -> None:
    """Draw surfaces [P, P] as contour maps side by side with a common scale.

    The scale is logarithmic if the highest point is more than ten times the lowest, so that both a valley and its walls
    are visible. Heights that are not finite are white.

    Args:
      heights: values at (steps[i], steps[j]), by the name of the surface.
      steps: coordinates [P] of both axes, in filter norms.
      path: file to write, in one of `FORMATS`.
      label: quantity, with its unit.
      levels: number of contours.
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
    with picture(path, (max(5.0, columns * side + 1.0), rows * (side + 0.3) + 0.2)) as figure:
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
