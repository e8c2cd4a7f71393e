"""Make the tables of RESULTS.md and the notebook anew from the kept metrics, after keeping those of RUN as --name.

RUN (none, one or more) may also be a folder of run folders. Kept are settings, evaluations and summary, no weights and
no paths of this machine. In a page a table stands between

    <!-- table NAME --target=0.5 -->   and   <!-- end -->

where NAME is a folder beside RESULTS.md in results/, and the options are those of the table command.
"""

import argparse
import json
import re
import shlex
import shutil
from pathlib import Path

from fedjax_mr.analysis import groups, layouts, pages
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.data import files
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.folder import run_state, runs_by_settings
from fedjax_mr.experiment.kept import folder_name, portable
from fedjax_mr.experiment.rows import checksums, write_summary

TABLE = re.compile(r"(<!-- table (\S+)(.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folder to keep, or a folder that holds some")
    parser.add_argument("--name", help="name of the kept runs; runs of that name are replaced one by one")
    help = f"the file with the tables ({pages.DOCUMENT})"
    parser.add_argument("--document", type=Path, default=pages.DOCUMENT, help=help)


def main(arguments: argparse.Namespace) -> None:
    """Keep runs and write the tables."""
    if bool(arguments.runs) != bool(arguments.name):
        raise UserError("--name=NAME says where the metrics of RUN are kept: give both or none")
    document = arguments.document
    texts = {page: pages.read(page) for page in pages.with_notebook(document)}
    for run in groups.find(arguments.runs) if arguments.runs else []:
        print(f"kept {keep(run, document.parent / 'results' / arguments.name)}")
    for page, text in texts.items():
        with files.atomic_write(page) as path:
            path.write_text(fill(text, document.parent / "results"), encoding="utf-8")
        print(f"{len(TABLE.findall(text))} tables in {page}")


def keep(run: RunRecord, folder: Path) -> Path:
    """Copy the small files of an ended run into a folder of its own, named by its settings; return that.

    Raises:
      UserError: the run has not ended.
    """
    state = run_state(run.path)
    if state not in ("finished", "diverged"):
        raise UserError(f"{run.path} has not ended ({state}): finish it, or leave it out")
    summary = run.summary() if state == "finished" else {}  # before kept ones are replaced, as it may be damaged
    config = portable(run.config)
    digest = configuration.digest(config)
    kept = folder / folder_name(config)
    for before in (kept, *runs_by_settings(folder).get(digest, [])):  # kept under the name of an earlier version, too
        shutil.rmtree(before, ignore_errors=True)
    kept.mkdir(parents=True)
    settings = json.dumps(files.sealed(configuration.to_json(config)), indent=2)
    (kept / "config.json").write_text(settings + "\n", encoding="utf-8")
    if (run.path / "metrics.jsonl").exists():
        shutil.copyfile(run.path / "metrics.jsonl", kept / "metrics.jsonl")
    if state == "finished":
        write_summary(kept, summary | {"dataset": config.dataset}, checksums(run.rows())[-1])
    if state == "diverged":  # its message names folders of this machine
        (kept / "diverged.txt").write_text("diverged\n", encoding="utf-8")
    return kept


def fill(text: str, folder: Path) -> str:
    """Return a document with its tables made anew.

    Args:
      text: the document.
      folder: where the kept runs are.

    Raises:
      UserError: a table's runs are not there, or its options are wrong.
    """

    def fresh(found: re.Match) -> str:
        begin, name, options, end = found.groups()
        parser = argparse.ArgumentParser(exit_on_error=False)
        layouts.add_arguments(parser)
        try:
            chosen = parser.parse_args([str(folder / name), "--format=markdown", *shlex.split(options)])
        except argparse.ArgumentError as error:
            raise UserError(f"{begin.strip()}: {error}") from None
        return f"{begin}{layouts.accuracy_text(chosen)}\n{end}"

    return TABLE.sub(fresh, text)
