"""Accuracy (mean ± standard deviation over seeds), the papers' values, and the cost of a target accuracy.

Of runs with other metrics, the first one stands in place of the accuracy. With --target: the rounds, the bytes and, for
runs with --fleet, the simulated seconds until the target is reached. Runs that differ only in their seeds form one
line. If several have the same seed, one counts. Only finished runs count. The standard deviation is that of a sample.
The difference is the mean of the last ten evaluations minus the paper's value. A run with at most ten evaluations has
the mean of all, and its cell says so. Best checkpoint: the test accuracy of the checkpoint that --keep_best keeps,
chosen by validation samples if there are some. --layout=paper prints methods as rows and settings as columns.

The text ends with a verdict where methods share at least three seeds: which one is better, or that they are equal
within one percentage point, or undecided. It is that of `python -m fedjax_mr.compare`, for the seeds that there are.
"""

import argparse

from fedjax_mr.analysis import groups, layouts, tables, verdicts
from fedjax_mr.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table of accuracies."""
    groups.add_arguments(parser)
    tables.add_format_argument(parser)
    parser.add_argument(
        "--target",
        type=float,
        metavar="VALUE",
        help="list the rounds, bytes and simulated seconds until the tests reach this value of the first metric, such "
        "as an accuracy of 0.5",
    )
    parser.add_argument(
        "--round",
        type=int,
        metavar="R",
        help="compare runs after round R, whatever came after. R must be a round after which they were evaluated",
    )
    parser.add_argument(
        "--layout",
        choices=("lines", "paper"),
        default="lines",
        help="lines: one line per setting. paper: methods by settings, best in bold, second underlined. Default: lines",
    )
    parser.add_argument("--value", choices=layouts.VALUES, help="accuracy in the layout paper. Default: last_10")
    parser.add_argument(
        "--papers", action="store_true", help="print the papers' values in brackets in the layout paper"
    )


def text(arguments: argparse.Namespace) -> str:
    """The table that the arguments describe.

    Raises:
      UserError: a path holds no run, its files cannot be read, --target is out of range, or an option belongs to the
        other layout.
    """
    if arguments.layout == "lines":
        if options := [name for name in ("value", "papers") if getattr(arguments, name)]:
            raise UserError(f"--{options[0]} needs --layout=paper")
        return tables.accuracy_table(
            arguments.runs,
            format=arguments.format,
            target=arguments.target,
            until=arguments.round,
            notes=verdicts.below_table,
        )
    if options := [name for name in ("target", "round") if getattr(arguments, name) is not None]:
        raise UserError(f"--{options[0]} needs --layout=lines")
    value = arguments.value or "last_10"
    return layouts.paper_table(arguments.runs, format=arguments.format, value=value, with_papers=arguments.papers)


def main(arguments: argparse.Namespace) -> None:
    """Print the table."""
    print(text(arguments))
