"""Every link of the channel with every method: which work, and the reasons of those that are refused.

Writes a page with a table: one row per method, one column per link of `fedjax_mr.testing.links`. A round of each pair
is traced, which takes minutes.
"""

import argparse
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedjax_mr import files
from fedjax_mr.analysis import tables
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing import federations, links
from record import documents

PAGE = documents.FOLDER.parent / "docs" / "channel_matrix.md"
HEAD = """# Every link with every method

✓: works. A number: refused, for the reason below the table. Each pair is tried with a network without BatchNorm and the
method's default hyper-parameters. Settings such as `weights=uniform` can lift a refusal. [The channel](channel.md)
explains the links. `python experiments/record.py channel` writes this page.
"""
WORKS = "✓"
NETWORK = "perceptron"  # some methods keep the last layer at the clients, so a single layer would leave nothing to send
NUMBER = re.compile(r"\b\d+(\.\d+)?\b")  # not those in names such as ef21

Refusals = Mapping[tuple[str, str], str | None]
"""Why a link, or a task, refuses a method, by (method, link). None: it works."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/channel_matrix.md of this repository")


def main(arguments: argparse.Namespace) -> None:
    """Write the page."""
    refusals = tried(STRATEGIES, links.LINKS, functools.partial(links.refusal, network=NETWORK))
    with files.atomic_write(arguments.page) as new:
        new.write_text(page(refusals), encoding="utf-8")
    print(f"{arguments.page}: written")


def tried(strategies: Iterable[str], names: Iterable[str], refusal: Callable[[str, str], str | None]) -> Refusals:
    """Try each link with each method, and print the progress."""
    strategies, outcomes = list(strategies), {}
    for link in names:
        for strategy in strategies:
            outcomes[strategy, link] = refusal(strategy, link)
            federations.drop_programs()
        works = sum(outcomes[strategy, link] is None for strategy in strategies)
        print(f"{link}: {works} of {len(strategies)} methods", flush=True)
    return outcomes


def page(refusals: Refusals, head: str = HEAD) -> str:
    """The page in Markdown, below its ``head``. Reasons that differ in numbers only are one."""
    strategies, names = (list(dict.fromkeys(part)) for part in zip(*refusals, strict=True))
    reasons: dict[str, int] = {}

    def cell(reason: str | None) -> str:
        return WORKS if reason is None else str(reasons.setdefault(NUMBER.sub("n", reason), len(reasons) + 1))

    rows = [[strategy, *(cell(refusals[strategy, link]) for link in names)] for strategy in strategies]
    table = tables.FORMATS["markdown"]([["method", *names], *rows])
    works = sum(reason is None for reason in refusals.values())
    count = f"{works} of {len(refusals)} pairs work."
    listed = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return f"{head}\n{count}\n\n{table}\n" + (f"\n## Reasons\n\n{listed}\n" if listed else "")
