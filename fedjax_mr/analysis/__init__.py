"""Tables and plots from run folders: ``python -m fedjax_mr.analysis``, and `frame` for a pandas data frame."""

from fedjax_mr.analysis.frames import frame

__all__ = ["frame"]
