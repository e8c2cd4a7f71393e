"""How many steps of a search with one seed survive? A campaign of 20 candidates, and a verdict on each step it kept.

Campaigns of agents keep a change if the score of one run rises. Here a campaign starts from FedAvg on the digits, tries
20 changes of one setting each, and keeps a change whose accuracy with one seed is higher than the best so far. Each
step that was kept is then compared with its predecessor on other seeds, until it is decided (`fedjax_mr.compare`).

    python experiments/studies/campaign.py --out=runs/campaign

Another call continues after a stop. The accuracy is the mean of the last ten evaluations, as in all tables.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import fedjax_mr as fmr
from fedjax_mr.analysis import command, tables
from fedjax_mr.analysis.paired import BETTER, EQUAL, WORSE
from fedjax_mr.experiment.folder import read_summary, run_state
from fedjax_mr.terminal import interrupts

START: dict[str, Any] = {
    "strategy": "fedavg", "rounds": 60, "eval_every": 2, "local_epochs": 1, "model": "mlp", "devices": 1,
}  # fmt: skip
CANDIDATES: tuple[dict[str, Any], ...] = (
    {"lr": 0.1}, {"momentum": 0.9}, {"batch_size": 20}, {"weight_decay": 1e-4}, {"strategy": "fedmr"},
    {"lr_schedule": "cosine"}, {"clip_norm": 1.0}, {"strategy": "fedprox"}, {"local_epochs": 2}, {"lr": 0.07},
    {"weight_decay": 1e-3}, {"momentum": 0.7}, {"batch_size": 5}, {"strategy": "fedexp"}, {"clip_norm": 5.0},
    {"local_epochs": 3}, {"strategy": "scaffold"}, {"lr": 0.15}, {"weight_decay": 5e-4}, {"batch_size": 8},
)  # fmt: skip
SEED, FIRST_OF_VERDICTS = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--out", metavar="FOLDER", default="runs/campaign", help="folder. Default: runs/campaign")
    parser.add_argument("--most_seeds", type=int, default=30, help="seeds of a verdict. Default: 30")


def main(arguments: argparse.Namespace) -> None:
    """Run the campaign, print each candidate, and the verdict on each step that was kept."""
    folder = Path(arguments.out)
    best = fmr.Config(**START, seed=SEED, progress=False)
    score, steps, rows = scored(best, folder / "start"), [], [["candidate", "one seed %", "gain", "verdict", "seeds"]]
    rows.append(["start", f"{100 * score:.2f}", "", "", ""])
    for number, change in enumerate(CANDIDATES):
        candidate = dataclasses.replace(best, **change)
        reached = scored(candidate, folder / f"candidate_{number}")
        gain = reached - score
        words = ", ".join(f"{flag}={value}" for flag, value in change.items())
        rows.append([words, f"{100 * reached:.2f}", f"{100 * gain:+.2f}", "", ""])
        if gain > 0:
            others = [dataclasses.replace(each, seed=FIRST_OF_VERDICTS) for each in (candidate, best)]
            place = folder / f"verdict_{number}"
            verdict = fmr.compare(*others, folder=place, most_seeds=arguments.most_seeds, batch=False).verdicts()[0, 1]
            shown = f"{verdict.outcome} ({100 * verdict.mean:+.2f})"
            rows[-1][3:] = [shown, str(verdict.count)]
            steps.append(verdict.outcome)
            best, score = candidate, reached
    print(tables.aligned(rows))
    counts = ", ".join(f"{steps.count(each)} {each}" for each in (BETTER, EQUAL, WORSE, "undecided"))
    print(f"{len(steps)} of {len(CANDIDATES)} candidates were kept with one seed; on other seeds: {counts}")


def scored(config: fmr.Config, folder: Path) -> float:
    """The accuracy of a run, which is trained unless its folder has it."""
    if run_state(folder) != "finished":
        fmr.run(dataclasses.replace(config, run_dir=str(folder), overwrite=folder.exists()), record=False)
    return read_summary(folder)["accuracy_mean_last_10"]


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
