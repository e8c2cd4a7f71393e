"""Every task with every method: which work, and the reasons of those that are refused.

Writes a page with a table: one row per method, one column per task. A round of each pair is traced, which takes about
three minutes. The slow tests train each pair (tests/test_tasks.py).
"""

import argparse
from pathlib import Path

from fedjax_mr import files
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing import tasks
from record import channel, documents

PAGE = documents.FOLDER.parent / "docs" / "task_matrix.md"
HEAD = """# Every task with every method

✓: works. A number: refused, for the reason below the table. Each pair is tried with a network of two layers and the
method's default hyper-parameters. [Tasks and metrics](tasks.md) explains the tasks.
`python experiments/record.py tasks` writes this page; the slow tests train each pair.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/task_matrix.md of this repository")


def main(arguments: argparse.Namespace) -> None:
    """Write the page."""
    tried = channel.tried(STRATEGIES, tasks.KINDS, tasks.refusal)
    refusals = {pair: reason and without_names(reason, *pair) for pair, reason in tried.items()}
    with files.atomic_write(arguments.page) as new:
        new.write_text(channel.page(refusals, HEAD), encoding="utf-8")
    print(f"{arguments.page}: written")


def without_names(reason: str, strategy: str, task: str) -> str:
    """A reason without the names of the method and of the task, so that equal reasons are one."""
    reason = reason.replace(f"the task is {task}", "the task is another one").removesuffix(": choose another method")
    start = next((name for name in (strategy, task) if reason.startswith(f"{name} ")), "")
    return f"The {'method' if start == strategy else 'network'}{reason.removeprefix(start)}" if start else reason
