"""All plots, one subject per file. Only this package imports matplotlib, when it draws; it needs no display."""

from fedjax_mr.plots.clients import contributions, histograms, partition, personal
from fedjax_mr.plots.coalitions import MOST_IN_LATTICE, approximations, lattice
from fedjax_mr.plots.figure import FORMATS, X_UNITS, Design, import_ahead, new_axes, unit_of
from fedjax_mr.plots.lines import Series, bars, coloured, curves, draw, lines
from fedjax_mr.plots.looks import COLOURS, Look, looks
from fedjax_mr.plots.timeline import Jobs, timeline

__all__ = [
    "COLOURS", "FORMATS", "MOST_IN_LATTICE", "X_UNITS", "Design", "Jobs", "Look", "Series",
    "approximations", "bars", "coloured", "contributions", "curves", "draw", "histograms", "import_ahead", "lattice",
    "lines", "looks", "new_axes", "partition", "personal", "timeline", "unit_of",
]  # fmt: skip
