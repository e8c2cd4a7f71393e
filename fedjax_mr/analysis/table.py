"""Accuracy, mean and standard deviation over the seeds, beside the papers' numbers; rounds and bytes to a target.

RUN may also be a folder of run folders, at any depth. Runs that differ in their seeds alone are one line; of several
with the same seed one counts. Only finished runs count; the standard deviation is the sample's. The difference is the
mean of the last ten evaluations minus the number that the paper prints.
"""

import argparse
import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr import config as configuration
from fedjax_mr.analysis import runs, text
from fedjax_mr.analysis.runs import Run
from fedjax_mr.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import STATES, MetricsRow, run_state
from fedjax_mr.experiment.report import summarise

PAPER_TABLES = Path(__file__).parents[2] / "experiments" / "paper_tables.csv"
SEEDS = ("seed", "partition_seed")

# The papers' names. A "CNN" is LeNet-5 in the FedMR authors' code and McMahan's network in the papers' text.
MODELS = {
    "lenet5": "CNN", "cnn_mcmahan": "CNN", "cnn_femnist": "CNN", "resnet20": "ResNet-20", "vgg16": "VGG-16",
    "vgg_femnist": "VGG-16", "pfedhr_m1,pfedhr_m2,pfedhr_m3,pfedhr_m4": "M1 to M4", "cnn1,cnn2,cnn3,cnn4": "1 to 4",
    "vgg11_fedma,vgg13_fedma,vgg16_fedma,vgg19_fedma": "1 to 4", "lstm1,lstm2,lstm3,lstm4": "1 to 4",
}  # fmt: skip
DATASETS = {
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "femnist": "FEMNIST", "mnist": "MNIST", "svhn_cropped": "SVHN",
    "shakespeare": "Shakespeare",
}  # fmt: skip
# Settings of one division only; the others ignore them.
DIVISIONS = {
    "alpha": ("dirichlet", "dirichlet_size"), "alpha_size": ("dirichlet_size",), "shards_per_client": ("shards",),
    "classes_per_client": ("classes",), "quantity_power": ("quantity",),
}  # fmt: skip
# The papers' clients and how many of them are drawn, but for natural clients. Of several papers that have a number for
# a setting the first one's is shown.
PAPERS = {
    "fedmr_kdd": (100, 10), "fedmr_v1": (100, 10), "fedcross": (100, 10), "pfedhr": (12, 4), "fedme": (20, 20),
}  # fmt: skip


class Statistic(NamedTuple):
    """Mean and sample standard deviation over the seeds; None where there is nothing to say."""

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Statistic":
        """Return the statistic of values; if one of them is missing there is none."""
        known = []
        for value in values:
            if value is None:
                return cls(None, None)
            known.append(value)
        if not known:
            return cls(None, None)
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


class Published(NamedTuple):
    """A number of a paper, in percent as printed."""

    paper: str
    mean: float
    deviation: float | None
    source: str


@dataclasses.dataclass(frozen=True)
class Line:
    """One setting of a table, over its seeds; accuracies are fractions.

    Attributes:
      setting: the values, by flag, in which it differs from other lines; the strategy first.
      runs: its runs, by seed.
      finished, diverged, unfinished: how many of them are; only finished ones enter the statistics.
      last, best, last_10: accuracy of the last evaluation, of the best, mean of the last ten.
      personal, finetuned: mean over the clients of each one's last accuracy on its own test samples, and after
        fine-tuning.
      rounds: rounds of the finished runs.
      reached: how many finished runs reached the target accuracy.
      rounds_to_target, bytes_to_target: if all finished runs reached it; bytes of both directions.
      published: the paper's number for this setting, if there is one.
    """

    setting: dict[str, Any]
    runs: tuple[Run, ...]
    finished: int
    diverged: int
    unfinished: int
    last: Statistic
    best: Statistic
    last_10: Statistic
    personal: Statistic
    finetuned: Statistic
    rounds: int
    reached: int
    rounds_to_target: Statistic
    bytes_to_target: Statistic
    published: Published | None


def name(setting: Mapping[str, Any]) -> str:
    """Return a setting in words: the strategy and what differs, such as ``fedmr alpha=0.1 unit=layer``."""
    strategy, *others = setting.items()
    prefix = f"{strategy[1]}_"
    return " ".join([strategy[1], *(f"{flag.removeprefix(prefix)}={value}" for flag, value in others)])


def short_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings in words, without the flags that have one value in all settings of a strategy."""

    def tells_apart(flag: str, strategy: str) -> bool:
        values = [json.dumps(each.get(flag, "-")) for each in settings if each["strategy"] == strategy]
        return flag == "strategy" or len(set(values)) > 1

    return [name({flag: each[flag] for flag in each if tells_apart(flag, each["strategy"])}) for each in settings]


# --- Reading ---------------------------------------------------------------------------------------------------------


def find(paths: Iterable[Path | str]) -> list[Run]:
    """Return the runs of run folders and of folders that hold some, at any depth.

    They come in the order of the paths, and those of one folder by strategy and by the values of their settings.

    Raises:
      UserError: a path holds no run folder.
    """
    ordered: dict[Path, None] = {}
    for path in map(Path, paths):
        folders = sorted(each.parent for each in path.rglob("config.json"))
        if not folders:
            raise UserError(f"{path} is no run folder and holds none (no config.json)")
        found = runs.read(list(map(str, folders)))
        ordered |= dict.fromkeys(run.path for run in sorted(found, key=_order))
    return runs.read(list(map(str, ordered)))


def _order(run: Run) -> tuple[str, list[tuple[str, str, Any]]]:
    values = facts(run.config)
    # The types first: values of two types, such as a number and None, have no order.
    return run.config.strategy, [(flag, type(value).__name__, value) for flag, value in values.items()]


def facts(config: Config) -> dict[str, Any]:
    """Return the settings of a run that mean something to it, by flag, without its seeds."""
    return {
        flag: value
        for flag, value in configuration.decisive(config).items()
        if flag not in SEEDS and config.partition in DIVISIONS.get(flag, (config.partition,))
    }


def seeds(config: Config) -> list[int]:
    """Return what decides about all random draws of a run: its seed, and that of its partition."""
    return [config.seed, config.seed if config.partition_seed is None else config.partition_seed]


def settings(chosen: Sequence[Run]) -> list[tuple[dict[str, Any], list[Run]]]:
    """Return the runs by setting, in their order; runs of one setting differ in nothing but seeds.

    A setting names the strategy, and what does not have the same value in all runs that know it. Of several runs of
    one setting and seed, one counts: the last of those that are furthest.
    """
    once = {
        json.dumps([facts(run.config), *seeds(run.config)]): run.path
        for run in sorted(chosen, key=lambda run: STATES.index(run_state(run.path)))
    }
    chosen = [run for run in chosen if run.path in once.values()]
    decisive = [facts(run.config) for run in chosen]
    flags = list(dict.fromkeys(flag for each in decisive for flag in each))
    groups: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for each, run in zip(decisive, chosen, strict=True):
        key = json.dumps({flag: each.get(flag, "-") for flag in flags})
        groups.setdefault(key, (each, []))[1].append(run)
    values = {flag: {json.dumps(each[flag]) for each in decisive if flag in each} for flag in flags}
    varied = [flag for flag in flags if len(values[flag]) > 1 and flag != "strategy"]
    return [
        ({"strategy": each["strategy"]} | {flag: each[flag] for flag in varied if flag in each}, members)
        for each, members in groups.values()
    ]


def published(path: Path | str | None = None) -> list[dict[str, str]]:
    """Return the rows of the papers' tables; none where the file is not there (an installed package)."""
    path = PAPER_TABLES if path is None else Path(path)
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def lookup(config: Config, tables: Iterable[Mapping[str, str]]) -> Published | None:
    """Return the papers' number for a configuration, or None.

    Data set, model, division, strategy, its settings that the table names and, without natural clients, the numbers of
    clients must be the paper's. Rounds, momentum and labels need not: the papers leave them open or contradict their
    code.
    """
    own = configuration.decisive(config)
    wanted = (DATASETS.get(config.dataset), MODELS.get(config.model), division(config), config.strategy)
    sizes = (config.clients, config.cohort)

    def fits(row: Mapping[str, str]) -> bool:
        if config.partition != "natural" and PAPERS.get(row["paper"]) != sizes:
            return False
        pairs = (pair.split("=") for pair in row["setting"].split())
        same = all(str(own.get(f"{config.strategy}_{name}")) == value for name, value in pairs)
        return same and (row["dataset"], row["model"], row["heterogeneity"], row["method"].lower()) == wanted

    found = {row["paper"]: row for row in tables if fits(row)}
    row = next((found[paper] for paper in PAPERS if paper in found), None)
    if row is None:
        return None
    return Published(row["paper"], float(row["mean"]), float(row["std"]) if row["std"] else None, row["source"])


def division(config: Config) -> str:
    """Return what the papers' tables call the division of the samples."""
    parts = {
        "dirichlet": f"dir_{float(config.alpha)}",
        "dirichlet_size": f"dir_{float(config.alpha)}_size_{float(config.alpha_size)}",
        "classes": f"classes_{config.classes_per_client}",
    }
    return parts.get(config.partition, config.partition)


# --- Computing -------------------------------------------------------------------------------------------------------


def lines(
    chosen: Sequence[Run], *, target: float | None = None, tables: Sequence[Mapping[str, str]] = ()
) -> list[Line]:
    """Return the lines of the table of some runs.

    Args:
      chosen: as `find` returns them.
      target: the accuracy to reach, a fraction.
      tables: as `published` returns them.
    """
    return [_line(setting, members, target, tables) for setting, members in settings(chosen)]


def _line(setting: dict, chosen: Sequence[Run], target: float | None, tables: Sequence[Mapping[str, str]]) -> Line:
    chosen = sorted(chosen, key=lambda run: run.config.seed)
    states = [run_state(run.path) for run in chosen]
    ended = [run for run, state in zip(chosen, states, strict=True) if state == "finished"]
    courses = [run.rows() for run in ended]
    summaries = [summarise(rows, target) for rows in courses]
    reached = [_first_at(rows, target) for rows in courses]
    return Line(
        setting=setting,
        runs=tuple(chosen),
        finished=len(courses),
        diverged=states.count("diverged"),
        unfinished=states.count("started") + states.count("new"),
        last=Statistic.of(each["accuracy_last"] for each in summaries),
        best=Statistic.of(each["accuracy_best"] for each in summaries),
        last_10=Statistic.of(each["accuracy_mean_last_10"] for each in summaries),
        personal=Statistic.of(rows[-1].get("personal_accuracy") for rows in courses),
        finetuned=Statistic.of(run.summary().get("finetuned_accuracy") for run in ended),
        rounds=max((each["rounds"] for each in summaries), default=0),
        reached=sum(row is not None for row in reached),
        rounds_to_target=Statistic.of(row["round"] if row else None for row in reached),
        bytes_to_target=Statistic.of(_bytes(row) if row else None for row in reached),
        published=lookup(chosen[0].config, tables),
    )


def _first_at(rows: Iterable[MetricsRow], target: float | None) -> MetricsRow | None:
    """Return the first evaluation that reaches an accuracy, or None."""
    if target is None:
        return None
    return next((row for row in rows if (row["accuracy"] or 0.0) >= target), None)


def _bytes(row: MetricsRow) -> int:
    """Return the bytes sent up to an evaluation, in all directions."""
    return row["bytes_down"] + row["bytes_up"] + row.get("bytes_peer", 0)


# --- Writing ---------------------------------------------------------------------------------------------------------


def cells(lines: Sequence[Line], *, target: float | None = None) -> list[list[str]]:
    """Return the table as texts, the head first; accuracies and differences are in percent and percentage points.

    A column in which nothing stands is left out. The difference is the mean of the last ten minus the paper's number.
    """
    columns: dict[str, Callable[[Line], str]] = {
        "setting": lambda line: name(line.setting),
        "seeds": _seeds,
        "rounds": lambda line: str(line.rounds) if line.finished else "",
        "last %": lambda line: percent(line.last),
        "best %": lambda line: percent(line.best),
        "last 10 %": lambda line: percent(line.last_10),
        "clients' own %": lambda line: percent(line.personal),
        "fine-tuned %": lambda line: percent(line.finetuned),
    }
    if target is not None:
        columns |= {
            f"rounds to {100 * target:g} %": lambda line: _to_target(line, line.rounds_to_target, 1, 0),
            "MB to it": lambda line: _to_target(line, line.bytes_to_target, 1e6, 1),
        }
    columns |= {
        "paper %": lambda line: _paper(line.published),
        "difference": _difference,
        "paper": lambda line: line.published.source if line.published else "",
    }
    filled = {head: [show(line) for line in lines] for head, show in columns.items()}
    filled = {head: texts for head, texts in filled.items() if any(texts) or head == "setting"}
    return [list(filled), *map(list, zip(*filled.values(), strict=True))]


def _seeds(line: Line) -> str:
    others = {"diverged": line.diverged, "unfinished": line.unfinished}
    return ", ".join([str(line.finished), *(f"{count} {word}" for word, count in others.items() if count)])


def percent(value: Statistic) -> str:
    """Return a fraction over the seeds in percent."""
    return plus_minus(*(None if part is None else 100 * part for part in value), digits=2)


def plus_minus(mean: float | None, deviation: float | None, *, digits: int) -> str:
    """Return a mean with its deviation, as far as they are known."""
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def _to_target(line: Line, value: Statistic, unit: float, digits: int) -> str:
    if line.finished and line.reached < line.finished:
        return f"{line.reached} of {line.finished} reach it"
    return plus_minus(*(None if part is None else part / unit for part in value), digits=digits)


def _paper(number: Published | None) -> str:
    return plus_minus(number.mean, number.deviation, digits=2) if number else ""


def _difference(line: Line) -> str:
    if line.published is None or line.last_10.mean is None:
        return ""
    return f"{100 * line.last_10.mean - line.published.mean:+.2f}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    head, *body = [[text.replace("|", r"\|") for text in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def comma_separated(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().removesuffix("\n")


def latex(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as a LaTeX ``tabular``, with rules of the package booktabs."""
    escaped = str.maketrans({"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "±": r"$\pm$", "$": r"\$"})
    head, *body = [" & ".join(text.translate(escaped) for text in row) + r" \\" for row in rows]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"])


FORMATS: dict[str, Callable[[Sequence[Sequence[str]]], str]] = {
    "text": text.table,
    "markdown": markdown,
    "csv": comma_separated,
    "latex": latex,
}


def table(paths: Iterable[Path | str], *, format: str = "text", target: float | None = None) -> str:
    """Return the table of some runs.

    Args:
      paths: run folders, or folders that hold some.
      format: a key of `FORMATS`.
      target: the accuracy to reach, a fraction.

    Raises:
      UserError: a path holds no run folder, or its files cannot be read.
    """
    return FORMATS[format](cells(lines(find(paths), target=target, tables=published()), target=target))


# --- The command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_runs_argument(parser)
    add_format_argument(parser)
    parser.add_argument("--target", type=float, metavar="FRACTION", help="accuracy whose rounds and bytes are listed")


def add_runs_argument(parser: argparse.ArgumentParser) -> None:
    """Add the run folders of a command that joins the seeds of a setting."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or a folder that holds some")


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """Add the choice of `FORMATS`."""
    parser.add_argument("--format", choices=FORMATS, default="text", help="how it is written (default: text)")


def main(arguments: argparse.Namespace) -> None:
    """Print the table."""
    print(table(arguments.runs, format=arguments.format, target=arguments.target))
