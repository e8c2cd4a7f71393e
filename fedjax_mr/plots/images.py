"""Rows of small images."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedjax_mr.plots.figure import picture

SIDE = 0.62  # inches per image
LABEL = 2.6  # inches for the names of the rows


def images(rows: Mapping[str, np.ndarray], path: Path | str) -> None:
    """Draw rows of images side by side, each with its name on the left.

    Args:
      rows: brightnesses [R, height, width, channels] in 0..1 with one or three channels, by the name of the row.
      path: file to write, in one of `FORMATS`.
    """
    columns = max(map(len, rows.values()))
    with picture(path, (columns * SIDE + LABEL, len(rows) * SIDE + 0.1), layout="none") as figure:
        left = LABEL / (columns * SIDE + LABEL)
        axes = figure.subplots(len(rows), columns, squeeze=False)
        figure.subplots_adjust(left=left, right=0.995, bottom=0.005, top=0.995, wspace=0.05, hspace=0.05)
        for line, (name, row) in zip(axes, rows.items(), strict=True):
            line[0].text(-0.1, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=7)
            for axis in line:
                axis.set_axis_off()
            for axis, image in zip(line, row, strict=False):
                shown = image[..., 0] if image.shape[-1] == 1 else image
                axis.imshow(shown, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
