"""Comparisons of the kept runs with the papers' numbers, and the parts of the page of record made from them.

The main table has the methods of the papers' main comparison in the settings of their flag files, one cell each: our
mean over the seeds, the papers' numbers, and a verdict; another table has all methods in one of these settings.
"""

import collections
import functools
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_mr.analysis import papers, tables
from fedjax_mr.analysis.groups import Index, Statistic, by_seed
from fedjax_mr.analysis.paired import LEVEL, Difference, difference
from fedjax_mr.analysis.papers import Published
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.analysis.tables import USUAL_ROUNDS
from fedjax_mr.config import config as configuration
from fedjax_mr.config import titles
from fedjax_mr.config.config import Config
from fedjax_mr.experiment.report import summarise
from record import claims
from record.claims import POINTS, verdicts

METHODS = ("fedavg", "fedmr", "fedcross")
PAIRS = (("fedmr", "fedavg"), ("fedcross", "fedavg"), ("fedmr", "fedcross"))  # the better one first, as claimed
FLAGS = {"CIFAR-10": "cifar10.flags", "CIFAR-100, coarse": "cifar100.flags"}
DIVISIONS = {
    "Dirichlet(0.1)": ("--alpha=0.1",),
    "Dirichlet(0.5)": ("--alpha=0.5",),
    "Dirichlet(1.0)": ("--alpha=1.0",),
    "IID": ("--partition=iid",),
}
ONE_SETTING = ("CIFAR-10", "Dirichlet(0.5)")
OTHERS = (
    *((f"--strategy={method}",) for method in (
        "fedprox", "scaffold", "moon", "fedgen", "clusamp", "fedexp", "fedasam", "fedmut",
        "fedntd", "fedgamma", "fedlc",
    )),
    ("--strategy=scaffold", "--scaffold_variant=authors"),
    ("--strategy=fedasam", "--fedasam_rho=0.1", "--fedasam_eta=0"),
    ("--strategy=fedexp", "--fedexp_variant=authors", "--fedexp_epsilon=0.1"),
    ("--strategy=moon", "--moon_mu=1"),
    *((f"--strategy={method}", f"--server_optimizer={optimizer}")
      for method in ("fedavg", "fedcross") for optimizer in ("momentum", "adam", "yogi", "adagrad")),
    ("--strategy=fedcross", "--server_optimizer=momentum", "--server_lr=1"),
)  # fmt: skip
# The papers' values of these methods belong to another form than the default one, which neither replicates nor refutes
# them.
PAPERS_RAN = {"scaffold": "variant=authors", "fedexp": "variant=authors", "fedasam": "rho=0.1, eta=0"}
OWN_PAPER = ", as in its paper"
# The papers state no number of rounds. With the most different clients, accuracies still rise after those of the flag
# file.
LONG_SETTING, LONG_ROUNDS = ("CIFAR-10", "Dirichlet(0.1)"), 1000
# A mean replicates the paper's value if they differ by at most POINTS, or by this many of our standard deviations.
DEVIATIONS = 2.0
NOT_RUN, REPLICATES = "not run", "replicates"


# ---- The cells


class Comparison(NamedTuple):
    """A method in a setting: our accuracies in percent by seed, and the papers' values."""

    method: str
    data: str
    division: str
    by_seed: dict[str, float]
    runs: list[RunRecord]
    published: list[Published]

    @property
    def own(self) -> Statistic:
        """Mean and standard deviation over the seeds."""
        return Statistic.of(self.by_seed.values())

    @property
    def outcome(self) -> str:
        """The verdict on all of the papers' values, which may disagree. "" if they have none.

        ``replicates`` means all of them, ``replicates v1`` only the named ones. ``lower`` and ``higher`` mean than all
        of them, ``between`` is neither.
        """
        verdicts = {number.short_source: verdict(self.own, number) for number in self.published}
        replicated = {name: words for name, words in verdicts.items() if words.startswith(REPLICATES)}
        if not replicated:
            return "between" if len(set(verdicts.values())) > 1 else next(iter(verdicts.values()), "")
        words = [REPLICATES] if len(replicated) == len(verdicts) else [REPLICATES, " and ".join(replicated)]
        return " ".join([*words, "(spread)"] if REPLICATES not in replicated.values() else words)


def verdict(own: Statistic, number: Published) -> str:
    """The verdict on a paper's value: ``replicates``, ``lower``, ``higher``, or ``not run`` if we have no run.

    If only the standard deviation of our seeds reaches the paper's value, the verdict is ``replicates (spread)``.

    Args:
      own: mean and standard deviation over our seeds, in percent.
      number: the paper's value.
    """
    if own.mean is None:
        return NOT_RUN
    difference = own.mean - number.mean
    if abs(difference) <= POINTS:
        return REPLICATES
    if abs(difference) <= DEVIATIONS * (own.deviation or 0.0):
        return f"{REPLICATES} (spread)"
    return "higher" if difference > 0 else "lower"


class Record(NamedTuple):
    """The comparisons of the main table, of the other methods and of longer runs, and the kept runs."""

    cells: dict[tuple[str, str, str], Comparison]  # by method, data and division
    others: list[Comparison]
    longer: list[Comparison]
    kept: Index

    @classmethod
    def of(cls, folder: Path) -> "Record":
        """The record of the kept runs in a folder that also holds the flag files."""
        kept = Index(folder / "results")
        of = functools.partial(compare, kept)
        cells = {
            (method, data, division): of(data, division, f"--strategy={method}")
            for data in FLAGS
            for division in DIVISIONS
            for method in METHODS
        }
        others = [of(*ONE_SETTING, *flags) for flags in OTHERS]
        longer = [of(*LONG_SETTING, f"--strategy={method}", f"--rounds={LONG_ROUNDS}") for method in METHODS]
        return cls(cells, others, longer, kept)

    def pairs(self, better: str, worse: str) -> dict[tuple[str, str], Difference | None]:
        """The difference of two methods in each setting."""
        return {
            (data, division): difference(
                self.cells[better, data, division].by_seed, self.cells[worse, data, division].by_seed
            )
            for data in FLAGS
            for division in DIVISIONS
        }


def compare(kept: Index, data: str, division: str, *method: str) -> Comparison:
    """A method in a setting of the main table.

    Args:
      kept: the kept runs, in a folder beside the flag files.
      data: a name of `FLAGS`.
      division: a name of `DIVISIONS`.
      *method: flags of the method.
    """
    config = configuration.parse([f"--flagfile={kept.folder.parent / FLAGS[data]}", *DIVISIONS[division], *method])
    runs = kept.of(config)
    numbers = papers.lookup_all(config, papers.rows())
    return Comparison(_name(config, method), data, division, by_seed(runs), runs, numbers)


def _name(config: Config, flags: Sequence[str]) -> str:
    """The title of a method with the settings of ``flags``; the default form is named if the papers ran another one."""
    prefix = re.compile(rf"--({config.strategy}_)?(?=\w+=)")
    elsewhere = ("--strategy=", "--server_optimizer=", "--rounds=")  # in the title, or above the table
    settings = [prefix.sub("", flag) for flag in flags if not flag.startswith(elsewhere)]
    name = ", ".join([titles.method(titles.facts(config)), *settings])
    return f"{name}{OWN_PAPER}" if config.strategy in PAPERS_RAN and not settings else name


def _papers_ran(cell: Comparison) -> str | None:
    """The form of the method to which the papers' values belong, if it is another one than that of the cell."""
    forms = {f"{_title(method)}{OWN_PAPER}": form for method, form in PAPERS_RAN.items()}
    return forms.get(cell.method)


def _title(method: str) -> str:
    return titles.method({"strategy": method})


def _shown(value: Statistic) -> str:
    return tables.plus_minus(*value, digits=1)


def accuracy_text(cell: Comparison) -> str:
    """Our value and its number of seeds, or why there is none."""
    diverged = sum(run.state == "diverged" for run in cell.runs)
    if cell.by_seed:
        return f"{_shown(cell.own)} (n = {len(cell.by_seed)}{f', {diverged} diverged' if diverged else ''})"
    return "**diverged**" if diverged else f"**{NOT_RUN}**"


def _papers(cell: Comparison) -> str:
    """The papers' values, without their standard deviations."""
    return ", ".join(f"{number.mean:.1f}" for number in cell.published)


def _outcome(cell: Comparison) -> str:
    return f"**{cell.outcome}**" if cell.by_seed and cell.published else ""


# ---- The parts of the page


def main_table(record: Record) -> str:
    """A table per dataset, methods by partitions: our value with its number of seeds, the papers', the verdict."""

    def text(cell: Comparison) -> str:
        papers = f"paper{'s' * (len(cell.published) > 1)} {_papers(cell)}" if cell.published else ""
        return "<br>".join(filter(None, [accuracy_text(cell), papers, _outcome(cell)]))

    def of(data: str) -> str:
        rows = [
            [_title(method), *(text(record.cells[method, data, division]) for division in DIVISIONS)]
            for method in METHODS
        ]
        return tables.markdown([[data, *DIVISIONS], *rows])

    return "\n\n".join(map(of, FLAGS))


def headline_table(record: Record) -> str:
    """The main table of the first dataset in short: our value, the papers' in brackets, and what is sure of FedMR."""
    data = next(iter(FLAGS))

    def text(cell: Comparison) -> str:
        ours = _shown(cell.own) if cell.by_seed else NOT_RUN
        return f"{ours} ({_papers(cell)})" if cell.published else ours

    rows = [
        [_title(method), *(text(record.cells[method, data, division]) for division in DIVISIONS)] for method in METHODS
    ]
    leads = []
    for (better, worse, of, _), gap, outcome in judged_pairs(record):
        if (better, worse, of) == ("fedmr", "fedavg", data):
            sure = "significant" if outcome.startswith(("holds", "does not hold")) else "not sure"
            leads.append(f"{gap.mean:+.1f} ({gap.count} seeds; {sure})" if gap else "")
    return tables.markdown([[data, *DIVISIONS], *rows, ["FedMR - FedAvg", *leads]])


def judged_pairs(record: Record) -> list[tuple[tuple[str, str, str, str], Difference | None, str]]:
    """Two methods, data and division of each comparison, with the difference and the verdict.

    Where one of the methods was not run, the difference is None and the verdict is "".
    """
    found = [
        ((better, worse, *setting), gap)
        for better, worse in PAIRS
        for setting, gap in record.pairs(better, worse).items()
    ]
    outcomes = iter(verdicts([(gap, False) for _, gap in found if gap]))
    return [(key, gap, next(outcomes) if gap else "") for key, gap in found]


def pairs_table(record: Record) -> str:
    """Comparisons of two methods in each setting, with differences and verdicts."""
    rows = [
        [f"{_title(better)} is better than {_title(worse)}", f"{data}, {division}", str(gap), f"**{outcome}**"]
        for (better, worse, data, division), gap, outcome in judged_pairs(record)
        if gap
    ]
    head = ["claim", "setting", f"points [{LEVEL:.0%} confidence], seeds in common", "verdict"]
    return tables.markdown([head, *rows])


def longer_pairs_table(record: Record) -> str:
    """The comparisons of two methods after more rounds, a family of their own."""
    by_method: dict[str, Comparison] = dict(zip(METHODS, record.longer, strict=True))
    gaps = [difference(by_method[better].by_seed, by_method[worse].by_seed) for better, worse in PAIRS]
    outcomes = iter(verdicts([(gap, False) for gap in gaps if gap]))
    rows = [
        [f"{_title(better)} is better than {_title(worse)}", str(gap), f"**{next(outcomes)}**"]
        for (better, worse), gap in zip(PAIRS, gaps, strict=True)
        if gap
    ]
    return tables.markdown([["claim", f"points [{LEVEL:.0%} confidence], seeds in common", "verdict"], *rows])


def setting_table(record: Record) -> str:
    """All methods in one setting, best first: our value, the papers', verdict, lead over FedAvg, and bytes."""
    main = [record.cells[method, *ONE_SETTING] for method in METHODS]
    fedavg, rows = record.cells["fedavg", *ONE_SETTING], []
    for cell in sorted([*main, *record.others], key=lambda cell: -(cell.own.mean or 0.0)):
        lead = None if cell is fedavg else difference(cell.by_seed, fedavg.by_seed)
        bytes = f"{bytes_sent(cell) / bytes_sent(fedavg):.1f}" if cell.by_seed and fedavg.by_seed else ""
        other = _papers_ran(cell)
        outcome = f"papers ran {other}" if other else _outcome(cell)
        rows.append([cell.method, accuracy_text(cell), _papers(cell), outcome, str(lead or ""), bytes])
    head = ["method", "ours", "papers", "verdict", "points above FedAvg, seeds in common", "bytes, times FedAvg's"]
    return tables.markdown([head, *rows])


def bytes_sent(cell: Comparison) -> float:
    """Bytes that a finished run sends in both directions, mean over the seeds."""
    ended = [run.summary() for run in cell.runs if run.state == "finished"]
    return statistics.fmean(summary["bytes_down"] + summary["bytes_up"] for summary in ended)


def longer_table(record: Record) -> str:
    """The main methods in one setting after the rounds of the main table, and after more."""
    fedavg, rows = record.longer[0], []
    for cell in record.longer:
        lead = None if cell is fedavg else difference(cell.by_seed, fedavg.by_seed)
        reached = [_up_to(USUAL_ROUNDS, cell), accuracy_text(cell)]
        rows.append([cell.method, *reached, _papers(cell), _outcome(cell), str(lead or "")])
    after = [f"after {USUAL_ROUNDS:,} rounds", f"after {LONG_ROUNDS:,}"]
    head = ["method", *after, "papers", "verdict on the latter", "points above FedAvg"]
    return tables.markdown([head, *rows])


def _up_to(round: int, cell: Comparison) -> str:
    """The mean of the last ten evaluations up to a round."""
    reached = [summarise([row for row in run.rows() if row["round"] <= round]) for run in cell.runs]
    return _shown(Statistic.of(100 * run["accuracy_mean_last_10"] for run in reached))


def claims_table(record: Record) -> str:
    """Other claims of the papers, with differences and verdicts."""
    return claims.table(record.kept.folder)


def cost_table(record: Record) -> str:
    """The median time of the runs of each method, and their devices."""
    seconds: dict[tuple[str, ...], list[float]] = {}
    for cell in (*record.cells.values(), *record.others, *record.longer):
        for ended in (run.summary() for run in cell.runs if run.state == "finished"):
            kinds = collections.Counter(ended["devices"])
            devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            seconds.setdefault((cell.data, cell.method, str(ended["rounds"]), devices), []).append(ended["seconds"])
    rows = [[*row, str(len(times)), f"{statistics.median(times) / 60:.0f}"] for row, times in seconds.items()]
    return tables.markdown([["data", "method", "rounds", "devices", "runs", "minutes per run (median)"], *rows])


def summary(record: Record) -> str:
    """A summary of the main table in two sentences."""
    cells = [cell for cell in record.cells.values() if cell.by_seed]
    count = sum(cell.outcome.startswith(REPLICATES) for cell in cells)
    outcomes = [f"{count} replicate{'s' if count == 1 else ''} a number of the papers"]
    for outcome in sorted({cell.outcome for cell in cells if not cell.outcome.startswith(REPLICATES)}):
        names = [f"{cell.method}: {cell.data}, {cell.division}" for cell in cells if cell.outcome == outcome]
        outcomes.append(f"{len(names)} {'is' if len(names) == 1 else 'are'} {outcome} ({'; '.join(names)})")
    total, runs = len(record.cells), sum(len(cell.by_seed) for cell in cells)
    run = f"All {total} cells are run" if len(cells) == total else f"Of {total} cells {len(cells)} are run"
    printed = [[number.mean for number in cell.published] for cell in record.cells.values()]
    apart = max((max(means) - min(means) for means in printed if means), default=0.0)
    counts = f"{run} ({runs} runs): {', '.join(outcomes)}"
    return f"{counts}. The papers themselves differ by up to {apart:.1f} points in a cell."


PARTS: dict[str, Callable[[Record], str]] = {
    "table": main_table, "pairs": pairs_table, "setting": setting_table, "claims": claims_table, "cost": cost_table,
    "headline": headline_table, "summary": summary, "longer": longer_table,
    "longer_pairs": longer_pairs_table,
}  # fmt: skip
