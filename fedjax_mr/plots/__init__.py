"""All plots, one subject per file. Only this package imports matplotlib, when it draws; it needs no display."""

from fedjax_mr.plots.clients import contributions, histograms, partition, personal
from fedjax_mr.plots.figure import FORMATS, X_UNITS, import_ahead, unit_of
from fedjax_mr.plots.lines import Series, bars, curves, lines
from fedjax_mr.plots.looks import COLOURS, Look, looks
from fedjax_mr.plots.timeline import Jobs, timeline

__all__ = [
    "COLOURS",
    "FORMATS",
    "X_UNITS",
    "Jobs",
    "Look",
    "Series",
    "bars",
    "contributions",
    "curves",
    "histograms",
    "import_ahead",
    "lines",
    "looks",
    "partition",
    "personal",
    "timeline",
    "unit_of",
]
