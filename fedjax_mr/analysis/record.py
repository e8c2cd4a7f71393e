"""Make the page of record anew, or check it: which published results replicate, with how many seeds, how surely.

The main table has the methods of the papers' main comparison in the settings of their flag files, one cell each: our
mean over the seeds, the paper's number, and a verdict; another table has the other methods in one of these settings.
All are computed from the metrics kept in results/ beside the document. What is made anew stands between the lines
<!-- record PART --> and <!-- end -->, with PART one of table, pairs, others, claims, cost and headline, there and in
the README of the repository; and the lines "Measured:" in the heads of the flag files.
--check only compares.
"""

import argparse
import collections
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_mr import config as configuration
from fedjax_mr import files, titles
from fedjax_mr.analysis import claims, groups, pages, papers, tables
from fedjax_mr.analysis.claims import LEVEL, POINTS, Difference, difference
from fedjax_mr.analysis.groups import Statistic
from fedjax_mr.analysis.papers import Published
from fedjax_mr.analysis.runs import Run
from fedjax_mr.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import run_state

METHODS = ("fedavg", "fedmr", "fedcross")
FLAGS = {"CIFAR-10": "cifar10.flags", "CIFAR-100, coarse": "cifar100.flags"}
DIVISIONS = {
    "Dirichlet(0.1)": ("--alpha=0.1",),
    "Dirichlet(0.5)": ("--alpha=0.5",),
    "Dirichlet(1.0)": ("--alpha=1.0",),
    "IID": ("--partition=iid",),
}
OTHERS_SETTING = ("CIFAR-10", "Dirichlet(0.5)")
OTHERS = (
    *((f"--strategy={method}",) for method in (
        "fedprox", "scaffold", "moon", "fedgen", "clusamp", "fedexp", "fedasam", "fedmut",
        "fedntd", "fedgamma", "fedlc",
    )),
    ("--strategy=scaffold", "--scaffold_variant=authors"),  # the form behind the papers' number
    *((f"--strategy={method}", f"--server_optimizer={optimizer}")
      for method in ("fedavg", "fedcross") for optimizer in ("momentum", "adam", "yogi", "adagrad")),
)  # fmt: skip
# A mean replicates within POINTS of the paper's, or within so many of our standard deviations.
DEVIATIONS = 2.0
BLOCK = re.compile(r"(<!-- record (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MEASURED = re.compile(r"# Measured:.*?(?=\n--)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--document", type=Path, default=pages.DOCUMENT, help=f"the page ({pages.DOCUMENT})")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something would change")


def main(arguments: argparse.Namespace) -> None:
    """Write what has changed, or say it."""
    changed = {path: text for path, text in fresh_texts(arguments.document) if pages.read(path) != text}
    for path, text in changed.items():
        if not arguments.check:
            with files.whole(path) as new:
                new.write_text(text, encoding="utf-8")
        print(f"{path}: {'is not what the kept metrics say' if arguments.check else 'written'}")
    if not changed:
        print(f"{arguments.document} and its flag files say what the kept metrics say")
    if changed and arguments.check:
        sys.exit(1)


def fresh_texts(document: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files that belong to the record, each with the text that it should have.

    Raises:
      UserError: the document or a flag file cannot be read, or the document asks for a part that does not exist.
    """
    record = Record.of(document.parent)

    def fresh(page: Path) -> str:
        def part(found: re.Match) -> str:
            begin, name, end = found.groups()
            if name not in PARTS:
                raise UserError(f"{page}: {begin.strip()} is none of {', '.join(PARTS)}")
            return f"{begin}{PARTS[name](record)}\n{end}"

        return BLOCK.sub(part, pages.read(page))

    yield document, fresh(document)
    readme = document.resolve().parents[1] / "README.md"
    if readme.is_file():
        yield readme, fresh(readme)
    for data in FLAGS:
        path = document.parent / FLAGS[data]
        measured = "\n".join(_wrapped(f"Measured: {record.measured(data)}"))
        yield path, MEASURED.sub(lambda _, text=measured: text, pages.read(path), count=1)


# ---- The cells


class Cell(NamedTuple):
    """A method in a setting: our accuracies in percent by seed, and the paper's number."""

    method: str
    data: str
    division: str
    by_seed: dict[str, float]
    runs: list[Run]
    published: Published | None

    @property
    def own(self) -> Statistic:
        """Mean and standard deviation over the seeds."""
        return Statistic.of(self.by_seed.values())

    @property
    def verdict(self) -> str:
        """Return ``replicates``, ``lower``, ``higher`` or ``not run``; "" where no paper has a number.

        Where only the spread of our own seeds reaches the paper's number, the verdict says so.
        """
        own, published = self.own, self.published
        if own.mean is None:
            return "not run"
        if published is None:
            return ""
        difference = own.mean - published.mean
        if abs(difference) <= POINTS:
            return "replicates"
        if abs(difference) <= DEVIATIONS * (own.deviation or 0.0):
            return "replicates within the spread of our seeds"
        return "higher" if difference > 0 else "lower"


class Record(NamedTuple):
    """All cells of the main table, those of the other methods, and the folder with the kept runs."""

    cells: dict[tuple[str, str, str], Cell]  # by method, data and division
    others: list[Cell]
    kept: Path

    @classmethod
    def of(cls, folder: Path) -> "Record":
        """Return the record of the runs that are kept beside the flag files of a folder."""
        kept = folder / "results"
        by_facts: dict[str, list[Run]] = {}
        for run in groups.find([kept]):
            by_facts.setdefault(_key(run.config), []).append(run)
        published = papers.rows()

        def cell(data: str, division: str, *method: str) -> Cell:
            config = configuration.parse([f"--flagfile={folder / FLAGS[data]}", *DIVISIONS[division], *method])
            found, name = by_facts.get(_key(config), []), _name(config)
            return Cell(name, data, division, _by_seed(found), found, papers.lookup(config, published))

        cells = {
            (method, data, division): cell(data, division, f"--strategy={method}")
            for data in FLAGS
            for division in DIVISIONS
            for method in METHODS
        }
        return cls(cells, [cell(*OTHERS_SETTING, *flags) for flags in OTHERS], kept)

    def pairs(self, better: str, worse: str) -> dict[tuple[str, str], Difference | None]:
        """Return the difference of two methods in each setting."""
        return {
            (data, division): difference(
                self.cells[better, data, division].by_seed, self.cells[worse, data, division].by_seed
            )
            for data in FLAGS
            for division in DIVISIONS
        }

    def measured(self, data: str) -> str:
        """Return what a flag file says of its own setting, and where the rest is."""
        said = []
        for method in METHODS:
            own = self.cells[method, data, "Dirichlet(0.5)"]
            if own.by_seed:
                said.append(
                    f"{_title(method)} {_shown(own.own)} (seed{'s' * (len(own.by_seed) > 1)} {', '.join(own.by_seed)})"
                )
        if not said:
            return "not yet."
        return f"{'; '.join(said)}: percent, the mean of the last ten evaluations (RESULTS.md)."


def _key(config: Config) -> str:
    return json.dumps(titles.facts(config), sort_keys=True)


def _name(config: Config) -> str:
    """Return the title of a method, and its form where it is the one that the papers' authors ran."""
    facts = titles.facts(config)
    as_released = facts.get(f"{config.strategy}_variant") == "authors"
    return f"{titles.method(facts)}, variant=authors" if as_released else titles.method(facts)


def _by_seed(runs: Sequence[Run]) -> dict[str, float]:
    """Return the mean of the last ten evaluations of finished runs in percent, by seed."""
    found = {}
    for run in sorted(runs, key=lambda run: groups.seeds(run.config)):
        seed, partition_seed = groups.seeds(run.config)
        if run_state(run.path) == "finished":
            name = str(seed) if seed == partition_seed else f"{seed}/{partition_seed}"
            found[name] = 100 * float(run.summary()["accuracy_mean_last_10"])
    return found


def _title(method: str) -> str:
    return titles.method({"strategy": method})


def _shown(value: Statistic) -> str:
    return tables.plus_minus(*value, digits=1)


def _in_words(cell: Cell) -> tuple[str, str, str]:
    """Return our number, the paper's and the verdict; "" for what there is not."""
    own = f"{_shown(cell.own)} (n = {len(cell.by_seed)})" if cell.by_seed else ""
    paper = tables.plus_minus(*cell.published[1:3], digits=1) if cell.published else ""
    return own, paper, f"**{cell.verdict}**" if cell.verdict else ""


def _wrapped(text: str) -> list[str]:
    """Return a text as lines of comment."""
    return textwrap.wrap(text, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


# ---- The parts of the page


def main_table(record: Record) -> str:
    """Return a table per data set, methods by divisions: ours with the number of seeds, the paper's, the verdict."""

    def text(cell: Cell) -> str:
        own, paper, verdict = _in_words(cell)
        return "<br>".join(filter(None, [own, paper and f"paper {paper}", verdict]))

    def of(data: str) -> str:
        rows = [
            [_title(method), *(text(record.cells[method, data, division]) for division in DIVISIONS)]
            for method in METHODS
        ]
        return tables.markdown([[data, *DIVISIONS], *rows])

    return "\n\n".join(map(of, FLAGS))


def headline_table(record: Record) -> str:
    """Return the main table of the first data set in short: ours with the number of seeds, the papers' in brackets."""
    data = next(iter(FLAGS))

    def text(cell: Cell) -> str:
        own = f"{_shown(cell.own)}, n = {len(cell.by_seed)}" if cell.by_seed else "not run"
        return f"{own} ({tables.plus_minus(*cell.published[1:3], digits=1)})" if cell.published else own

    rows = [
        [_title(method), *(text(record.cells[method, data, division]) for division in DIVISIONS)] for method in METHODS
    ]
    return tables.markdown([[data, *DIVISIONS], *rows])


def pairs_table(record: Record) -> str:
    """Return which method is ahead of which in which setting, and how surely."""
    rows = []
    for better, worse in (("fedmr", "fedavg"), ("fedcross", "fedavg"), ("fedmr", "fedcross")):
        for (data, division), found in record.pairs(better, worse).items():
            if found:
                claim = f"{_title(better)} is better than {_title(worse)}"
                rows.append([claim, f"{data}, {division}", str(found), f"**{found.verdict}**"])
    head = ["claim", "setting", f"points [{LEVEL:.0%} confidence], seeds in common", "verdict"]
    return tables.markdown([head, *rows])


def others_table(record: Record) -> str:
    """Return the other methods in one setting, best first: ours, the paper's, the verdict, the lead over FedAvg."""
    fedavg = record.cells["fedavg", *OTHERS_SETTING]
    rows = []
    for cell in sorted(record.others, key=lambda cell: -(cell.own.mean or 0.0)):
        lead = difference(cell.by_seed, fedavg.by_seed)
        rows.append([cell.method, *_in_words(cell), "" if lead is None else str(lead)])
    return tables.markdown([["method", "ours", "paper", "verdict", "points above FedAvg, seeds in common"], *rows])


def claims_table(record: Record) -> str:
    """Return what else the papers claim, and how surely it holds."""
    return claims.table(record.kept)


def cost_table(record: Record) -> str:
    """Return what a run of the main table took: the median over its runs, and on what."""
    rows = []
    for data in FLAGS:
        for method in METHODS:
            ended = [run.summary() for division in DIVISIONS for run in record.cells[method, data, division].runs]
            by_devices: dict[str, list[dict]] = {}
            for summary in ended:
                kinds = collections.Counter(summary["devices"])
                by_devices.setdefault(", ".join(f"{count} x {kind}" for kind, count in kinds.items()), []).append(
                    summary
                )
            for devices, those in sorted(by_devices.items()):
                seconds = statistics.median(each["seconds"] for each in those)
                rows.append([_title(method), data, devices, str(len(those)), f"{seconds / 60:.0f}"])
    return tables.markdown([["method", "data", "devices", "runs", "minutes per run (median)"], *rows])


PARTS: dict[str, Callable[[Record], str]] = {
    "table": main_table, "pairs": pairs_table, "others": others_table, "claims": claims_table, "cost": cost_table,
    "headline": headline_table,
}  # fmt: skip
