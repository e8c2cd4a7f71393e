"""From run folders to tables and pictures: ``python -m fedjax_mr.analysis``, and `frame` for one's own."""

from fedjax_mr.analysis.frames import frame

__all__ = ["frame"]
