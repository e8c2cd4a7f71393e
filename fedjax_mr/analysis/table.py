"""Accuracy (mean ± standard deviation over seeds), the papers' values, and the cost of a target accuracy.

With --target: the rounds, the bytes and, for runs with --fleet, the simulated seconds until the target is reached. Runs
that differ only in their seeds form one line. If several have the same seed, one counts. Only finished runs count. The
standard deviation is that of a sample. The difference is the mean of the last ten evaluations minus the paper's value.
A run with at most ten evaluations has the mean of all, and its cell says so. Best checkpoint: the test accuracy of the
checkpoint that --keep_best keeps, chosen by validation samples if there are some. --layout=paper prints methods as rows
and settings as columns.
"""

import argparse

from fedjax_mr.analysis import layouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    layouts.add_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Print the table."""
    print(layouts.accuracy_text(arguments))
