"""Accuracy, mean and standard deviation over the seeds, beside the papers' numbers; rounds and bytes to a target.

RUN may also be a folder of run folders, at any depth. Runs that differ in their seeds alone are one line; of several
with the same seed one counts. Only finished runs count; the standard deviation is the sample's. The difference is the
mean of the last ten evaluations minus the number that the paper prints; of a run with no more than ten evaluations it
is the mean of all, which the cell says. --layout=paper has methods as rows and settings as columns.
"""

import argparse

from fedjax_mr.analysis import layouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    layouts.add_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Print the table."""
    print(layouts.accuracy_text(arguments))
