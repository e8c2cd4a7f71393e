"""The default command: update the pages and the heads of the flag files from the kept runs in results/.

The content between two such lines of a page comes from the kept runs:

    <!-- record PART -->                  and   <!-- end -->   a part of the record: summary, table, pairs, longer,
                                                               longer_pairs, setting, claims, cost or headline
    <!-- table NAME --layout=paper -->    and   <!-- end -->   the runs in results/NAME.jsonl.gz, with options of
                                                               python -m fedjax_mr.analysis table

Pages are RESULTS.md, those in notebook/, and README.md of the repository. The lines "Measured:" in the heads of the
flag files are updated in the same way.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from fedjax_mr import files
from fedjax_mr.analysis import table as accuracies
from fedjax_mr.errors import UserError
from fedjax_mr.results import kept
from record import comparisons, conditions, documents, headers, tuning
from record.comparisons import Record

PARTS = {**comparisons.PARTS, "tuned": tuning.equal_table, "conditions": conditions.table}
PART = re.compile(r"(<!-- record (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- table (\S+)(.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is out of date")
    help = "folder with RESULTS.md, results/ and the flag files (default: experiments/ of this repository)"
    parser.add_argument("--folder", type=Path, default=documents.FOLDER, help=help)


def main(arguments: argparse.Namespace) -> None:
    """Write the pages that have changed, or name them."""
    changed = {path: text for path, text in up_to_date(arguments.folder) if documents.read(path) != text}
    for path, text in changed.items():
        if not arguments.check:
            with files.atomic_write(path) as new:
                new.write_text(text, encoding="utf-8")
        print(f"{path}: {'out of date' if arguments.check else 'written'}")
    if not changed:
        print("all pages and flag files are up to date")
    if changed and arguments.check:
        sys.exit(1)


def up_to_date(folder: Path) -> Iterator[tuple[Path, str]]:
    """All pages and flag files with results, each with its text after an update.

    Args:
      folder: experiments/, or a folder in its form.

    Raises:
      UserError: a file cannot be read, or a page asks for a part or a table that does not exist.
    """
    record = Record.of(folder)
    for page in documents.pages(folder):
        yield page, with_tables(with_parts(documents.read(page), record, page), folder / documents.RESULTS)
    yield from headers.up_to_date(folder, record.kept)


def with_parts(text: str, record: Record, page: Path) -> str:
    """The text of a page with its parts of the record updated.

    Raises:
      UserError: there is no such part.
    """

    def part(match: re.Match) -> str:
        begin, name, end = match.groups()
        if name not in PARTS:
            raise UserError(f"{page}: {begin.strip()} is none of {', '.join(PARTS)}")
        return f"{begin}{PARTS[name](record)}\n{end}"

    return PART.sub(part, text)


def with_tables(text: str, results: Path) -> str:
    """The text of a page with its tables of kept runs updated.

    Args:
      text: in Markdown.
      results: the folder of the tables.

    Raises:
      UserError: a table is missing, or its options are wrong.
    """

    def table(match: re.Match) -> str:
        begin, name, options, end = match.groups()
        parser = argparse.ArgumentParser(exit_on_error=False)
        accuracies.add_arguments(parser)
        path = str(results / f"{name}{kept.SUFFIX}")
        try:
            arguments = parser.parse_args([path, "--format=markdown", *shlex.split(options)])
        except argparse.ArgumentError as error:
            raise UserError(f"{begin.strip()}: {error}") from None
        return f"{begin}{accuracies.text(arguments)}\n{end}"

    return TABLE.sub(table, text)
