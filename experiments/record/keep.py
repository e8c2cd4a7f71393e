"""Add ended runs to a table of kept runs, results/NAME.jsonl.gz: settings, summary and evaluations, no weights.

A run replaces a kept run with the same settings. Settings contain no folders, so the same runs give the same file on
every machine.
"""

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import files, untrusted
from fedjax_mr.analysis import groups
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError
from fedjax_mr.results import kept
from fedjax_mr.results.kept import KeptRun
from record import documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    groups.add_arguments(parser)
    parser.add_argument("--name", required=True, help="name of the table, without .jsonl.gz")
    parser.add_argument(
        "--sharpness", type=Path, metavar="FILE", help="sharpness.json that studies/landscape.py wrote about the runs"
    )
    help = "folder with results/ (default: experiments/ of this repository)"
    parser.add_argument("--folder", type=Path, default=documents.FOLDER, help=help)


def main(arguments: argparse.Namespace) -> None:
    """Add the runs and print how many there are."""
    runs = groups.find(arguments.runs)
    table = arguments.folder / documents.RESULTS / f"{arguments.name}{kept.SUFFIX}"
    sharpness = {} if arguments.sharpness is None else read_sharpness(arguments.sharpness)
    count = keep(runs, table, sharpness)
    print(f"kept {len(runs)} runs in {table}, which has {count}")


def keep(runs: Sequence[RunRecord], table: Path, sharpness: Mapping[str, dict[str, Any]] | None = None) -> int:
    """Add runs to a table, which is created if necessary, and return the number of its runs.

    Adding the same runs again does not change the file.

    Args:
      runs: ended runs.
      table: the file.
      sharpness: numbers of ``studies/landscape.py`` by `configuration.portable_name` of the run.

    Raises:
      UserError: a run has not ended or its files are damaged, or the table cannot be read or written.
    """
    before = kept.read(table) if table.exists() else {}
    by_settings = {configuration.digest(configuration.load(table / name)): name for name in before}
    after = dict(before)
    for run in runs:
        name, digest = configuration.portable_name(run.config), configuration.digest(configuration.portable(run.config))
        old = after.pop(by_settings.get(digest, name), None)  # earlier versions used other names
        numbers = (sharpness or {}).get(name) or (old.sharpness if old else None)
        after[name] = _content(run)._replace(sharpness=numbers)
        by_settings[digest] = name
    if after != before:
        table.parent.mkdir(parents=True, exist_ok=True)
        write(after, table)
    return len(after)


def _content(run: RunRecord) -> KeptRun:
    if run.state not in ("finished", "diverged"):
        raise UserError(f"{run.path} has not ended ({run.state}): finish it, or leave it out")
    config = configuration.portable(run.config)
    summary = run.summary() | {"dataset": config.dataset} if run.state == "finished" else None
    return KeptRun(configuration.to_json(config), summary, run.rows_so_far())


def write(runs: Mapping[str, KeptRun], table: Path) -> None:
    """Write a table; the same runs give the same bytes.

    Raises:
      UserError: the file cannot be written.
    """
    lines = []
    for name in sorted(runs):
        values = {"run": name, **runs[name]._asdict()}
        if values["sharpness"] is None:
            del values["sharpness"]
        lines.append(json.dumps(values, allow_nan=False) + "\n")
    with files.atomic_write(table) as path:
        path.write_bytes(gzip.compress("".join(lines).encode(), 9, mtime=0))


def read_sharpness(path: Path) -> dict[str, dict[str, Any]]:
    """The numbers in a ``sharpness.json`` by name of the run, each with the options of the command.

    Raises:
      UserError: the file cannot be read.
    """
    try:
        values = untrusted.parse_json(untrusted.read_text(path))
        runs = values.pop("runs")
        return {name: values | numbers for name, numbers in runs.items()}
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is not a file of studies/landscape.py ({error})") from None
