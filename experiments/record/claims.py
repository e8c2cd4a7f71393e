"""Claims of the papers that compare two methods, and whether the kept runs support them.

A claim compares two settings over the seeds that both have. Runs of one seed share partition, initial model and
cohorts, so their differences are paired. "Better" is tested by Student's paired t-test, two-sided; "as good as each
other" by two one-sided tests against a margin (TOST). The p-values of a table are corrected for its number of
comparisons by Holm's method. Fewer than three seeds get no test and no verdict: the spread of two differences says
little, and with few test samples they may be equal by chance.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr.analysis import groups, tables
from fedjax_mr.analysis.paired import LEVEL, Difference, difference, holm
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.config import titles
from fedjax_mr.errors import UserError
from fedjax_mr.results import kept

POINTS = 1.5  # margin: two settings are as good as each other if their means differ by less


def verdicts(compared: Sequence[tuple[Difference, bool]]) -> list[str]:
    """The verdicts on the comparisons of a table, whose p-values are corrected together.

    Args:
      compared: each comparison, and whether its claim is "as good as each other". Otherwise the claim is that the first
        one is better.
    """
    corrected = holm([comparison.p_level(POINTS) if level else comparison.p_better() for comparison, level in compared])
    return [_verdict(comparison, level, p) for (comparison, level), p in zip(compared, corrected, strict=True)]


def _verdict(gap: Difference, level: bool, p: float | None) -> str:
    if p is None:
        return f"{'one seed' if gap.count == 1 else f'{gap.count} seeds'}: {gap.mean:+.1f}"
    shown = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    if p >= 1 - LEVEL:
        return f"not sure ({shown})"
    return f"{'holds' if level or gap.mean > 0 else 'does not hold'} ({shown})"


class Chosen(NamedTuple):
    """Kept runs of one setting: the name of their table in results/, and flags that select the setting in it."""

    table: str
    flags: Mapping[str, Any]


class Claim(NamedTuple):
    """A claim, where papers make it, the two settings, and the rounds whose evaluations count."""

    text: str
    source: str
    where: str
    better: Chosen
    worse: Chosen
    rounds: tuple[int, int]
    level: bool = False  # whether the claim is that the two are as good as each other
    metric: str = "accuracy"  # of the deployed model; personal_accuracy and finetuned_accuracy: of the clients' own
    # "flatness": minus the mean rise of the loss around the deployed model, where a point is a hundredth of a nat


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
    folder = {_HALF: "cifar10_lenet5_300", _ONE: chosen.table}[where]
    return Claim(text, figure, where, Chosen(folder, {**_FEDMR, **flags}), chosen, rounds, level)


def _above_fedavg(name: str, source: str, where: str, table: str, rounds: tuple[int, int] = (455, 500)) -> Claim:
    ours, theirs = (Chosen(table, {"strategy": strategy}) for strategy in (name, "fedavg"))
    text = f"{titles.method({'strategy': name})} is better than FedAvg"
    return Claim(text, source, where, ours, theirs, rounds)


def _flatter(title: str, source: str, **flags: Any) -> Claim:
    ours, fedavg = (Chosen(_AT_ONE.table, settings) for settings in (flags, {"strategy": "fedavg"}))
    where = f"{_ONE}, 150 rounds; rise of the loss in hundredths of a nat"
    return Claim(
        f"{title}'s minima are flatter than FedAvg's", source, where, ours, fedavg, (150, 150), metric="flatness"
    )


def _adapters(title: str, where: str, table: str, averaging: str, rounds: tuple[int, int]) -> Claim:
    ours, theirs = (
        Chosen(table, {"strategy": name, "adapter": "lora", "lr": 0.05}) for name in (title.lower(), averaging)
    )
    return Claim(f"{title} over adapters is better than FedAvg over them", "no paper", where, ours, theirs, rounds)


_SENTENCES = ("MiniLM, sentences, four domains, Dirichlet(0.5)", "sentences_adapters", "fedit", (15, 60))
_VIT = ("vision transformer, CIFAR-100 to CIFAR-10, Dirichlet(0.1)", "vit_adapters", "fedavg", (12, 48))
_RELEASED = ("CIFAR-10, Dirichlet(0.1), the authors' own division", "record_cifar10_released")
_WRITERS = ("MNIST, 440 writers, 500 rounds", "record_writers")
_RESNET = ("ResNet-20, CIFAR-10, Dirichlet(0.5), 200 rounds", "record_resnet20", (155, 200))
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
    _above_fedavg("fedmr", "FedMR KDD'24, Table 1", *_RELEASED),
    _above_fedavg("fedcross", "FedCross, Table 1", *_RELEASED),
    _above_fedavg("fedmr", "FedMR KDD'24, Table 1", *_RESNET),
    _above_fedavg("fedcross", "FedCross, Table 1", *_RESNET),
    _above_fedavg("fedmr", "FedMR KDD'24, Table 1, for FEMNIST", *_WRITERS),
    _above_fedavg("fedcross", "FedCross, Table 1, for FEMNIST", *_WRITERS),
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
    _adapters("FedMR", *_VIT),
    _adapters("FedMR", *_SENTENCES),
    _adapters("FedCross", *_SENTENCES),
)  # fmt: skip


def accuracies(
    chosen: Chosen, runs: Mapping[str, Sequence[RunRecord]], rounds: tuple[int, int], *, metric: str = "accuracy"
) -> dict[str, float]:
    """The mean accuracy of the runs of a setting over the evaluations of some rounds in percent, by seed.

    Args:
      chosen: the setting.
      runs: the runs of some tables by the table's name, from `runs_of`.
      rounds: the first and the last round.
      metric: the column. ``finetuned_accuracy``, which only the summary has, is of the end of the run, ``flatness`` of
        the checkpoint that ``studies/landscape.py`` read.

    Raises:
      UserError: no run has the setting, two runs have the same seed, or a run has no evaluation in these rounds.
    """
    by_seed: dict[str, float] = {}
    for run in runs[chosen.table]:
        facts = titles.facts(run.config)
        if any(facts.get(flag) != value for flag, value in chosen.flags.items()):
            continue
        seed = str(run.config.seed)
        values = _flatness(run) if metric == "flatness" else _evaluations(run, rounds, metric)
        if seed in by_seed or not values:
            raise UserError(f"{run.path}: {'a second run of its seed' if values else 'no evaluation'} in {rounds}")
        by_seed[seed] = 100 * statistics.fmean(values)
    if not by_seed:
        raise UserError(f"{chosen.table}{kept.SUFFIX} holds no run with {dict(chosen.flags)}")
    return by_seed


def runs_of(claims: Sequence[Claim], results: Path) -> dict[str, list[RunRecord]]:
    """The runs of the tables of some claims in a folder, by the names of the tables."""
    names = dict.fromkeys(side.table for claim in claims for side in (claim.better, claim.worse))
    return {name: groups.find([results / f"{name}{kept.SUFFIX}"]) for name in names}


def _evaluations(run: RunRecord, rounds: tuple[int, int], metric: str) -> list[float]:
    rows = [row for row in run.rows() if rounds[0] <= row["round"] <= rounds[1]]
    return [row[metric] if metric in row else run.summary()[metric] for row in rows]


def _flatness(run: RunRecord) -> list[float]:
    kept_run = kept.run(run.path)
    return [-kept_run.sharpness["rise"]] if kept_run and kept_run.sharpness else []


def table(results: Path, claims: Sequence[Claim] = CLAIMS, *, source: str = "where it is made") -> str:
    """Some claims with their differences and verdicts as a Markdown table.

    Args:
      results: the folder of the tables.
      claims: the claims.
      source: head of the column of `Claim.source`.
    """
    runs = runs_of(claims, results)
    gaps: list[Difference] = []
    for claim in claims:
        own, other = (accuracies(side, runs, claim.rounds, metric=claim.metric) for side in (claim.better, claim.worse))
        gap = difference(own, other)
        assert gap is not None, claim
        gaps.append(gap)
    outcomes = verdicts([(gap, claim.level) for gap, claim in zip(gaps, claims, strict=True)])
    rows = []
    for claim, gap, verdict in zip(claims, gaps, outcomes, strict=True):
        files = " and ".join(dict.fromkeys(f"`{side.table}`" for side in (claim.better, claim.worse)))
        rows.append([claim.text, claim.source, claim.where, str(gap), f"**{verdict}**", files])
    points = f"points [{LEVEL:.0%} confidence], seeds in common"
    head = ["claim", source, "setting", points, "verdict", "kept runs"]
    return tables.markdown([head, *rows])
