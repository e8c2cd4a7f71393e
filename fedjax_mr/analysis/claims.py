"""What papers claim of one method beside another, and how surely the kept runs say so.

A claim compares two settings over the seeds that both have; seeds share division, start and cohorts, so their
differences are paired.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import t as student

from fedjax_mr import titles
from fedjax_mr.analysis import groups, tables
from fedjax_mr.analysis.groups import Statistic
from fedjax_mr.analysis.runs import Run
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.kept import SHARPNESS

LEVEL = 0.95  # of confidence intervals
POINTS = 1.5  # two settings so near to each other are level


class Difference(NamedTuple):
    """One method's accuracies minus another's over the seeds that both have, in points."""

    count: int
    mean: float
    low: float | None  # of the confidence interval; None with a single seed
    high: float | None

    @property
    def verdict(self) -> str:
        """Return how surely the first method is ahead; with one seed only a lead of more than `POINTS` counts."""
        if self.low is None or self.high is None:
            if abs(self.mean) <= POINTS:  # other seeds have moved a method by as much
                return "not sure (one seed)"
            return "holds with one seed" if self.mean > 0 else "does not hold (one seed)"
        if self.low > 0:
            return f"holds ({self.count} seeds)"
        return f"{'not sure' if self.high > 0 else 'does not hold'} ({self.count} seeds)"

    @property
    def level(self) -> str:
        """Return how surely the two are within `POINTS` of each other."""
        if self.low is None or self.high is None:
            return "holds with one seed" if abs(self.mean) <= POINTS else "does not hold (one seed)"
        if max(-self.low, self.high) <= POINTS:
            return f"holds ({self.count} seeds)"
        return f"{'not sure' if abs(self.mean) <= POINTS else 'does not hold'} ({self.count} seeds)"

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:+.1f}, {self.high:+.1f}]"
        return f"{self.mean:+.1f}{interval}, n = {self.count}"


def difference(better: Mapping[str, float], worse: Mapping[str, float]) -> Difference | None:
    """Return the mean difference of paired seeds with Student's confidence interval; None without a common seed.

    Args:
      better: accuracies in percent by seed.
      worse: those of the other method.
    """
    found = [better[seed] - worse[seed] for seed in better if seed in worse]
    if not found:
        return None
    mean, deviation = Statistic.of(found)
    assert mean is not None
    if deviation is None:
        return Difference(1, mean, None, None)
    half = float(student.ppf((1 + LEVEL) / 2, len(found) - 1)) * deviation / len(found) ** 0.5
    return Difference(len(found), mean, mean - half, mean + half)


class Chosen(NamedTuple):
    """Kept runs of one setting: their folder in results/, and flags that single the setting out there."""

    folder: str
    flags: Mapping[str, Any]


class Claim(NamedTuple):
    """A claim, where papers make it, the two settings, and the rounds whose evaluations count."""

    text: str
    source: str
    where: str
    better: Chosen
    worse: Chosen
    rounds: tuple[int, int]
    level: bool = False  # claimed is that the two are as good as each other
    metric: str = "accuracy"  # of the deployed model; of the clients' own ones: personal_ or finetuned_accuracy
    # "flatness": minus the mean rise of the loss around the deployed model (a point is a hundredth of a nat)

    @property
    def verdict_of(self) -> str:
        """Return which property of a difference is the verdict."""
        return "level" if self.level else "verdict"


def _pfedhr(where: str, folder: str, **flags: Any) -> Claim:
    return Claim(
        "pFedHR is better than Local-only", "pFedHR, Table 2", where,
        Chosen(folder, {"strategy": "pfedhr", **flags}),
        Chosen(folder, {"strategy": "local", **{flag: flags[flag] for flag in flags if "pfedhr" not in flag}}),
        (20, 20),
    )  # fmt: skip


_FOUR_DIGITS = "cnn_digits_small,cnn_digits,cnn_digits_large,cnn_digits_deep"
_FOUR_LENETS = "lenet5_small,lenet5,lenet5_large,lenet5_deep"
_FEDME = {
    "local": ("FedMe is better than Local-only", "personal_accuracy"),
    "fedavg": ("FedMe is better than FedAvg, both fine-tuned", "finetuned_accuracy"),
}


def _fedme(other: str, where: str, folder: str, models: tuple[str, str], rounds: tuple[int, int]) -> Claim:
    text, metric = _FEDME[other]
    ours, theirs = (
        Chosen(folder, {"strategy": name, "model": model}) for name, model in zip(("fedme", other), models, strict=True)
    )
    return Claim(text, "FedMe, Table 4", where, ours, theirs, rounds, metric=metric)


_FEDMR = {"strategy": "fedmr", "momentum": 0.5, "fedmr_unit": "leaf", "fedmr_stage1_rounds": 0}
_AT_HALF = Chosen("cifar10_lenet5_500", {**_FEDMR, "partition": "dirichlet", "alpha": 0.5})
_AT_ONE = Chosen("cifar10_lenet5_alpha1_150", _FEDMR)
_HALF, _ONE = "CIFAR-10, Dirichlet(0.5)", "CIFAR-10, Dirichlet(1.0)"
_TAUGHT = {"public_max": 1000, "projection": 0, "pfedhr_distillation_weight": 0.1}


def _fedmr(text: str, figure: str, where: str, chosen: Chosen, rounds: tuple[int, int], level: bool, **flags) -> Claim:
    folder = {_HALF: "cifar10_lenet5_300", _ONE: chosen.folder}[where]
    return Claim(text, figure, where, Chosen(folder, {**_FEDMR, **flags}), chosen, rounds, level)


def _released(text: str, source: str, better: str, worse: str) -> Claim:
    ours, theirs = (Chosen("record_cifar10_released", {"strategy": name}) for name in (better, worse))
    return Claim(text, source, "CIFAR-10, Dirichlet(0.1), the authors' own division", ours, theirs, (455, 500))


def _flatter(title: str, source: str, **flags: Any) -> Claim:
    ours, fedavg = (Chosen(_AT_ONE.folder, chosen) for chosen in (flags, {"strategy": "fedavg"}))
    where = f"{_ONE}, 150 rounds; rise of the loss in hundredths of a nat"
    return Claim(
        f"{title}'s minima are flatter than FedAvg's", source, where, ours, fedavg, (150, 150), metric="flatness"
    )


_EARLY, _EARLY_SOURCE = "two stages put FedMR ahead early (rounds 5 to 150)", "FedMR KDD'24, Figure 12"
_UNIT, _UNIT_SOURCE = "FedMR by layer is as good as by tensor", "FedMR: its paper by layer, its code by tensor"
CLAIMS = (
    _fedmr(_EARLY, _EARLY_SOURCE, _HALF, _AT_HALF, (5, 150), False, fedmr_stage1_rounds=100),
    _fedmr(_EARLY, _EARLY_SOURCE, _ONE, _AT_ONE, (5, 150), False, fedmr_stage1_rounds=50),
    _fedmr(_UNIT, _UNIT_SOURCE, _HALF, _AT_HALF, (255, 300), True, fedmr_unit="layer"),
    _fedmr(_UNIT, _UNIT_SOURCE, _ONE, _AT_ONE, (105, 150), True, fedmr_unit="layer"),
    *(
        Claim(
            "FedCross: the most similar collaborator is the worst", "FedCross, Table 2", f"{_ONE}, beside {other}",
            Chosen("cifar10_lenet5_alpha1_150", {"fedcross_selection": other}),
            Chosen("cifar10_lenet5_alpha1_150", {"fedcross_selection": "highest"}),
            (105, 150),
        )
        for other in ("lowest", "in_order")
    ),
    _flatter("FedMR", "FedMR KDD'24, Figure 7", **_FEDMR),
    _flatter("FedCross", "no paper", strategy="fedcross", fedcross_selection="lowest"),
    _released("FedMR is better than FedAvg", "FedMR KDD'24, Table 1", "fedmr", "fedavg"),
    _released("FedCross is better than FedAvg", "FedCross, Table 1", "fedcross", "fedavg"),
    _pfedhr("MNIST, M1 and M2, IID", "pfedhr_mnist_taught", partition="iid", **_TAUGHT),
    _pfedhr("MNIST, M1 and M2, two classes", "pfedhr_mnist_taught", partition="classes", **_TAUGHT),
    _pfedhr("MNIST, M1 to M4, IID", "pfedhr_mnist_four_taught"),
    _pfedhr("CIFAR-10, M1 to M3, IID", "pfedhr_cifar10_taught"),
    _fedme("local", "digits, four networks", "digits_personal", (_FOUR_DIGITS, _FOUR_DIGITS), (55, 100)),
    _fedme("local", "CIFAR-10, four LeNets, 200 rounds", "record_fedme", (_FOUR_LENETS, _FOUR_LENETS), (155, 200)),
    _fedme(
        "fedavg", "digits, four networks; FedAvg cnn_digits", "digits_personal",
        (_FOUR_DIGITS, "cnn_digits"), (100, 100),
    ),
    _fedme(
        "fedavg", "CIFAR-10, four LeNets, 200 rounds; FedAvg lenet5_large", "record_fedme",
        (_FOUR_LENETS, "lenet5_large"), (200, 200),
    ),
)  # fmt: skip


def accuracies(chosen: Chosen, kept: Path, rounds: tuple[int, int], *, metric: str = "accuracy") -> dict[str, float]:
    """Return the mean accuracy of a setting's runs over the evaluations of some rounds in percent, by seed.

    Args:
      chosen: the setting.
      kept: the folder results/.
      rounds: the first and the last round.
      metric: the column; ``finetuned_accuracy``, which the summary alone has, is of the end, ``flatness`` of the round
        that ``landscape`` was told.

    Raises:
      UserError: no run is of that setting, or two are of one seed.
    """
    found: dict[str, float] = {}
    for run in groups.find([kept / chosen.folder]):
        facts = titles.facts(run.config)
        if any(facts.get(flag) != value for flag, value in chosen.flags.items()):
            continue
        seed = str(run.config.seed)
        values = _flatness(run) if metric == "flatness" else _evaluations(run, rounds, metric)
        if seed in found or not values:
            raise UserError(f"{run.path}: {'a second run of its seed' if values else 'no evaluation'} in {rounds}")
        found[seed] = 100 * statistics.fmean(values)
    if not found:
        raise UserError(f"{kept / chosen.folder} holds no run with {dict(chosen.flags)}")
    return found


def _evaluations(run: Run, rounds: tuple[int, int], metric: str) -> list[float]:
    rows = [row for row in run.rows() if rounds[0] <= row["round"] <= rounds[1]]
    return [row[metric] if metric in row else run.summary()[metric] for row in rows]


def _flatness(run: Run) -> list[float]:
    found = json.loads((run.path.parent / SHARPNESS).read_text(encoding="utf-8"))["runs"].get(run.path.name)
    return [] if found is None else [-found["rise"]]


def table(kept: Path) -> str:
    """Return the claims with their differences and verdicts as a Markdown table.

    Args:
      kept: the folder results/.
    """
    rows = []
    for claim in CLAIMS:
        own, other = (
            accuracies(chosen, kept, claim.rounds, metric=claim.metric) for chosen in (claim.better, claim.worse)
        )
        found = difference(own, other)
        assert found is not None, claim
        runs = " and ".join(dict.fromkeys(f"`{chosen.folder}`" for chosen in (claim.better, claim.worse)))
        verdict = f"**{getattr(found, claim.verdict_of)}**"
        rows.append([claim.text, claim.source, claim.where, str(found), verdict, runs])
    head = ["claim", "where it is made", "setting", "points [95% confidence], seeds in common", "verdict", "kept runs"]
    return tables.markdown([head, *rows])
