"""Tables and plots from run folders: ``python -m fedjax_mr.analysis``; `frame` and `plot_curves` for Python."""

from fedjax_mr.analysis.axes import plot_curves
from fedjax_mr.analysis.frames import frame

__all__ = ["frame", "plot_curves"]
