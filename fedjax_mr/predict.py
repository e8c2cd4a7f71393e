"""Predict the rows of a file with the trained network of a run, and write a CSV file.

FILE is a CSV file with the columns that the run was trained on (other columns are ignored), or an .npy file of samples.
The predictions are in the order of the rows: the class and the probability of each class; for labels the probability of
each; for numbers, their values; for survival, the relative risk.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr import files
from fedjax_mr.config import imports
from fedjax_mr.data.facts import Facts
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import of_run
from fedjax_mr.terminal import interrupts
from fedjax_mr.terminal.commands import exit_code
from fedjax_mr.terminal.messages import flags_in_errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 0, or 2 for bad input.

    Args:
      arguments: command-line arguments without the program name. Default: those of this process.
    """
    parser = of_run.parser("predict", __doc__)
    parser.add_argument("file", metavar="FILE", help="CSV file, or .npy file of samples [n, ...]")
    parser.add_argument("--out", metavar="FILE", default="predictions.csv", help="default: predictions.csv")
    parser.add_argument(
        "--calibrated",
        action="store_true",
        help="calibrate the probabilities on the validation samples (requires a run with --validation_share)",
    )
    of_run.add_choice(parser)

    def work() -> None:
        chosen = parser.parse_args(arguments)
        with imports.blamed(), flags_in_errors():
            run = of_run.read(chosen)
            network = run.deployed if chosen.client is None else run.personal(chosen.client)
            samples = read(Path(chosen.file), run.samples)
            predictions = probabilities = network.predict(samples)
            if chosen.calibrated:
                network = run.calibrated(chosen.client)
                probabilities = network.predict(samples)
        count = write(Path(chosen.out), predictions, probabilities, run.samples)
        heat = f", temperature {network.temperature:.3g}" if chosen.calibrated else ""
        print(f"{count} predictions in {chosen.out}{heat}")

    return exit_code(work)


def read(path: Path, facts: Facts) -> Any:
    """The samples in a file: an array, or the path of a CSV file for a run that was trained on a table.

    Raises:
      UserError: the file cannot be read, or is a table although the run was trained on other samples.
    """
    if path.suffix == ".npy":
        try:
            return np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not an .npy file of samples ({error})") from None
    if facts.preparation is None:
        raise UserError(f"{path} must be an .npy file of samples, because the run was not trained on a table")
    return str(path)


def write(path: Path, predictions: np.ndarray, probabilities: np.ndarray, facts: Facts) -> int:
    """Write predictions [n, ...] as CSV and return n.

    Calibrated probabilities [n, ...] stand in place of the network's own, but do not change the predicted class: after
    a loss with class weights, it need not be the most probable one.

    Raises:
      UserError: the task has no table of predictions, or the file cannot be written.
    """
    task = facts.learned
    if predictions.ndim != 2:
        raise UserError(f"predictions for {task.name} are no table: use fmr.load(RUN).predict(x) in Python")
    names = [str(number) for number in range(predictions.shape[1])]
    if "classes" in task.provides:
        names = list(facts.class_names) or names
        head = ["prediction", *(f"p({name})" for name in names)]
        classes = [names[number] for number in predictions.argmax(axis=1)]
        rows = [[name, *row] for name, row in zip(classes, probabilities.tolist(), strict=True)]
    else:
        targets = facts.preparation.target if facts.preparation is not None else ()
        kind = {"labels": "p({})", "risk": "risk"}.get(next(iter(task.provides), ""), "{}")
        names = list(targets) if len(targets) == len(names) else names
        head, rows = [kind.format(name) for name in names], probabilities.tolist()
    try:
        with files.atomic_write(path) as new, new.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([head, *rows])
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})") from None
    return len(rows)


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
