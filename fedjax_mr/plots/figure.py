"""Write a plot atomically, and the parts that all plots share."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import files

FORMATS = ("png", "pdf", "svg")
WIDTH = 10.0  # inches
X_UNITS = {
    "rounds": ((1, "round"),),
    "clock": ((3600, "simulated hours"), (60, "simulated minutes"), (1, "simulated seconds")),
    "bytes": ((1e9, "sent (GB)"), (1e6, "sent (MB)"), (1, "sent (bytes)")),
}  # units of each horizontal axis, from large to small
LEAST = 3  # a unit is used if the longest curve has at least so many
# Formulas are not typeset: a name may have a dollar sign. Publishers want TrueType fonts in a PDF, not Type 3.
_SETTINGS: Any = {"text.parse_math": False, "pdf.fonttype": 42, "svg.hashsalt": "fedjax_mr"}


def import_ahead() -> None:
    """Import matplotlib, which the first `picture` would do otherwise."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


@contextlib.contextmanager
def picture(path: Path | str, size: tuple[float, float], *, layout: Any = "constrained") -> Iterator[Any]:
    """Yield an empty figure of ``size`` (inches) and write it atomically to ``path``, unless the block fails.

    The suffix of the path must be one of `FORMATS`. With ``layout="none"``, which is faster, the block chooses the
    margins.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS), files.atomic_write(path) as temporary:
        figure = Figure(figsize=size, layout=layout, dpi=150)
        FigureCanvasAgg(figure)  # no window, whatever the user's backend
        yield figure
        figure.savefig(temporary)


def name_axes(axis: Any, x_label: str = "", y_label: str = "", *, title: str = "") -> None:
    """Set the title and the labels of a panel, and remove its frame at the top and on the right."""
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A column of the evaluations. NaN if missing."""
    return [float("nan") if row.get(name) is None else row[name] for row in rows]


def unit_of(x: str, largest: float) -> tuple[float, str]:
    """The unit of an axis in `X_UNITS` for values up to ``largest``, and its label."""
    return next((each for each in X_UNITS[x] if largest >= LEAST * each[0]), X_UNITS[x][-1])
