"""Learning curves: mean over the seeds with a band of one standard deviation (FedMR Figures 9-12, FedCross 2-7).

Runs that differ only in their seeds form one curve, up to the last round that all of them have evaluated. n is the
number of these seeds. As in the table, a seed that diverged is not part of the mean: a cross marks its last evaluation,
and the legend counts it. --best=lr draws, for each setting, only the runs with the learning rate of the best validation
accuracy (see the command best). --x=clock draws simulated time (runs with --fleet), --x=bytes everything that was sent.
Seeds are averaged at the same round, their x too. A method has the same colour and marker in all plots. Its settings
differ in their strokes and in the shades of this colour.
"""

import argparse

from fedjax_mr import plots
from fedjax_mr.analysis import groups, runs
from fedjax_mr.analysis.learning import curves
from fedjax_mr.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    groups.add_arguments(parser)
    parser.add_argument(
        "--column",
        help="column of metrics.csv, or several with commas: a run has a line for each of them that it has. Default: "
        "the first metric, such as accuracy",
    )
    parser.add_argument("--x", choices=plots.X_UNITS, default="rounds", help="horizontal axis. Default: rounds")
    parser.add_argument(
        "--panels", metavar="FLAGS", help="draw one panel per value of these flags, such as alpha or partition,alpha"
    )
    parser.add_argument("--best", metavar="FLAGS", help="draw only the best value of these flags, such as lr")
    parser.add_argument("--title", help="title of the picture")
    parser.add_argument("--y_label", help="label of the vertical axis")
    parser.add_argument("--width", type=float, metavar="INCHES", help="width of the picture. Default: 10")
    parser.add_argument("--height", type=float, metavar="INCHES", help="height. Default: by the number of panels")
    parser.add_argument(
        "--colours",
        metavar="NAME=COLOUR,...",
        help="colours of curves by method or by name of the curve, such as fedmr=black,fedavg=#D55E00",
    )
    parser.add_argument("--style", metavar="STYLE", help="Matplotlib style: a name, or the path of an .mplstyle file")
    runs.add_picture_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Plot the curves and print the path of the plot."""
    chosen = groups.find(arguments.runs)
    if arguments.best:
        choices = groups.choose(chosen, over=arguments.best.split(","))
        chosen = [run for choice in choices if choice.best for run in choice.best.finished().values()]
        if not chosen:
            raise UserError(f"--best={arguments.best}: no run is finished, so no value is the best")
    column: str = arguments.column or chosen[0].metric().name
    drawn = curves(chosen, column=column, panels=arguments.panels, x=arguments.x)
    design = plots.Design(
        width=arguments.width,
        height=arguments.height,
        title=arguments.title or "",
        colours=_colours(arguments.colours),
        style=arguments.style,
    )
    with runs.output_folder(arguments.out, chosen) as folder:
        path = folder / f"{column.partition(',')[0]}.{arguments.format}"
        plots.lines(
            drawn.panels, path, x_label=drawn.x_label, y_label=arguments.y_label or drawn.y_label,
            methods=drawn.methods, crosses=drawn.crosses, possible=drawn.possible, design=design,
        )  # fmt: skip
    print(f"drawn in {path}")


def _colours(text: str | None) -> dict[str, str]:
    """The colours of --colours, by method or name of the curve."""
    pairs = [pair.rpartition("=") for pair in text.split(",")] if text else []
    if wrong := [pair for pair in pairs if not pair[0] or not pair[2]]:
        raise UserError(f"--colours={text}: {''.join(wrong[0])!r} is not NAME=COLOUR")
    return {name: colour for name, _, colour in pairs}
