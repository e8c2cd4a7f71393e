"""Tables and plots from run folders: ``python -m fedjax_mr.analysis``; `frame` and `plot_curves` for Python."""

from fedjax_mr.analysis.frames import frame
from fedjax_mr.analysis.learning import plot_curves

__all__ = ["frame", "plot_curves"]
