"""Write a plot atomically, and the parts that all plots share."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr import files
from fedjax_mr.errors import UserError

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


class Design(NamedTuple):
    """How a picture differs from the usual look.

    Attributes:
      width, height: size in inches. None: the usual size.
      title: title of the picture.
      colours: colours of lines by their name or by their method, as Matplotlib names them.
      style: a Matplotlib style: its name, or the path of an ``.mplstyle`` file.
    """

    width: float | None = None
    height: float | None = None
    title: str = ""
    colours: Mapping[str, str] = {}
    style: str | None = None

    def check(self) -> None:
        """Check the design before anything is drawn.

        Raises:
          UserError: a size out of range, an unknown colour or an unknown style.
        """
        from matplotlib.colors import is_color_like

        for name, size in (("width", self.width), ("height", self.height)):
            if size is not None and not 1 <= size <= 100:
                raise UserError(f"{name}={size} is out of range (allowed: >= 1 and <= 100 inches)")
        if wrong := [name for name, colour in self.colours.items() if not is_color_like(colour)]:
            raise UserError(f"{self.colours[wrong[0]]} is no colour: write a name such as black, or #D55E00")
        if self.style is not None:
            import matplotlib.style

            try:
                with matplotlib.style.context(self.style):
                    pass
            except OSError:
                raise UserError(f"{self.style} is neither a style of Matplotlib nor a file with one") from None


def import_ahead() -> None:
    """Import matplotlib, which the first `picture` would do otherwise."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


@contextlib.contextmanager
def picture(
    path: Path | str, size: tuple[float, float], *, layout: Any = "constrained", style: str | None = None
) -> Iterator[Any]:
    """Yield an empty figure of ``size`` (inches) and write it atomically to ``path``, unless the block fails.

    The suffix of the path must be one of `FORMATS`. With ``layout="none"``, which is faster, the block chooses the
    margins. ``style`` is a style of Matplotlib.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with contextlib.ExitStack() as settings, files.atomic_write(path) as temporary:
        if style is not None:
            import matplotlib.style  # reads files, so only if needed

            settings.enter_context(matplotlib.style.context(style))
        settings.enter_context(matplotlib.rc_context(_SETTINGS))
        figure = Figure(figsize=size, layout=layout, dpi=150)
        FigureCanvasAgg(figure)  # no window, whatever the user's backend
        yield figure
        figure.savefig(temporary)


def new_axes() -> Any:
    """Axes of a new figure of pyplot, which notebooks show."""
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


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
