"""The lines "Measured:" in the heads of the flag files."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fedjax_mr.analysis import tables
from fedjax_mr.analysis.groups import Index, Statistic, by_seed
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError
from record import documents

LINES = re.compile(r"^# Measured:.*(?:\n# .*)*", re.MULTILINE)  # up to the first line that is no comment


class Header(NamedTuple):
    """The kept runs of a flag file.

    Attributes:
      page: page with more about them.
      job: flags that all of them share. The first is a flag file.
      methods: flags of each method, by its name.
      part: the part of the file that was run, in words. "" if all of it was run.
    """

    page: str
    job: tuple[str, ...]
    methods: Mapping[str, tuple[str, ...]]
    part: str = ""


def _strategies(**names: str) -> dict[str, tuple[str, ...]]:
    return {title: (f"--strategy={name}",) for title, name in names.items()}


_THREE = _strategies(FedAvg="fedavg", FedMR="fedmr", FedCross="fedcross")
_CIFAR10 = "notebook/cifar10.md"
_PART, _PART_FLAGS = "150 rounds, Dirichlet(1.0), LeNet-5", ("cifar10.flags", "--alpha=1.0", "--rounds=150")
HEADERS = {
    "cifar10.flags": Header("RESULTS.md", ("cifar10.flags",), _THREE),
    "cifar100.flags": Header("RESULTS.md", ("cifar100.flags",), _THREE),
    "quickstart.flags": Header("notebook/digits.md", ("quickstart.flags",), _THREE),
    "mnist_by_writer.flags": Header(
        "notebook/mnist_by_writer.md",
        ("mnist_by_writer.flags", "--dataset=mnist_by_writer.npz"),
        _THREE,
    ),
    "ablation_indep.flags": Header(_CIFAR10, _PART_FLAGS, _strategies(FedAvg="fedavg", Indep="indep"), _PART),
    "ablation_two_stage.flags": Header(
        _CIFAR10, _PART_FLAGS,
        {
            "no first stage": ("--strategy=fedmr", "--fedmr_stage1_rounds=0"),
            "50 rounds of averaging first": ("--strategy=fedmr", "--fedmr_stage1_rounds=50"),
        },
        _PART,
    ),
    "ablation_fedcross.flags": Header(
        _CIFAR10, _PART_FLAGS,
        {
            name.replace("_", " "): ("--strategy=fedcross", f"--fedcross_selection={name}")
            for name in ("in_order", "highest", "lowest")
        },
        f"{_PART}, alpha 0.99",
    ),
}  # fmt: skip


def up_to_date(folder: Path, kept: Index) -> Iterator[tuple[Path, str]]:
    """The flag files with such a line, each with its text after an update.

    Args:
      folder: folder of the flag files.
      kept: the kept runs.

    Raises:
      UserError: a flag file cannot be read, or has no such line.
    """
    for name, header in HEADERS.items():
        text = documents.read(folder / name)
        before = LINES.search(text)
        if before is None:
            raise UserError(f"{folder / name} has no line that begins with '# Measured:': add one after 'Expected'")
        measured = f"Measured: {_measured(folder, header, kept)}"
        lines = textwrap.wrap(measured, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        yield folder / name, text[: before.start()] + "\n".join(lines) + text[before.end() :]


def _measured(folder: Path, header: Header, kept: Index) -> str:
    """The measured accuracies, and the page with more about them."""
    file, *job = header.job
    parts = []
    for title, flags in header.methods.items():
        accuracies = by_seed(kept.of(configuration.parse([f"--flagfile={folder / file}", *job, *flags])))
        if accuracies:
            accuracy = tables.plus_minus(*Statistic.of(accuracies.values()), digits=1)
            parts.append(f"{title} {accuracy} (seed{'s' * (len(accuracies) > 1)} {', '.join(accuracies)})")
    if not parts:
        return "not yet."
    part = f"{header.part}: " if header.part else ""
    return f"{part}{'; '.join(parts)}; percent, the mean of the last ten evaluations ({header.page})."
