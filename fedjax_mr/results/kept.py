"""Tables of kept runs: the settings and metrics of many ended runs in one file, without weights.

A table is a gzipped file ``NAME.jsonl.gz`` with one line of JSON per run, sorted by name:
``{"run": NAME, "config": {...}, "summary": {...}, "rows": [{"round": 5, "accuracy": 0.1, ...}, ...]}``. A diverged run
has the summary null. A run may also have ``"sharpness"``, numbers about the loss around the deployed model.

Everything that reads run folders reads tables, too: a table counts as a folder of run folders, and the path
``NAME.jsonl.gz/RUN`` as the folder of one run. `configuration.load`, `read_rows`, `read_summary` and `run_state` look
here first.
"""

import fnmatch
import functools
import gzip
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr import untrusted
from fedjax_mr.errors import UserError

SUFFIX = ".jsonl.gz"


class KeptRun(NamedTuple):
    """One line of a table: what the files of a run folder say, as plain values."""

    config: dict[str, Any]
    summary: dict[str, Any] | None
    rows: list[dict[str, Any]]
    sharpness: dict[str, Any] | None = None


def is_table(path: Path) -> bool:
    """Whether a path names a table of kept runs."""
    return path.name.endswith(SUFFIX) and not path.is_dir()


def is_kept(path: Path) -> bool:
    """Whether a path names a table of kept runs, or runs in it."""
    return is_table(path) or is_table(path.parent)


def read(table: Path) -> dict[str, KeptRun]:
    """Read the runs of a table by name.

    Raises:
      UserError: the table cannot be read, or it is damaged.
    """
    try:
        status = table.stat()
        return _read(table.absolute(), status.st_mtime_ns, status.st_size)
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise UserError(f"{table} is damaged ({error})") from None
    except OSError as error:
        raise UserError(f"cannot read {table} ({error.strerror})") from None


@functools.lru_cache(maxsize=256)
def _read(table: Path, _modified: int, _size: int) -> dict[str, KeptRun]:
    runs: dict[str, KeptRun] = {}
    for number, line in enumerate(untrusted.lines(table), 1):
        name, kept_run = _parse(untrusted.parse_json(line), number)
        if name in runs:
            raise ValueError(f"it has two runs {name}")
        runs[name] = kept_run
    return runs


def _parse(values: Any, number: int) -> tuple[str, KeptRun]:
    """The name and the content of line ``number``."""
    match values:
        case {"run": str(name), "config": dict(config), "summary": dict() | None as summary, "rows": list(rows)}:
            return name, KeptRun(config, summary, rows, values.get("sharpness"))
    raise ValueError(f"line {number} is not a kept run")


def run(path: Path | str) -> KeptRun | None:
    """The kept run at a path ``TABLE/RUN``, or None if the path does not lie in a table.

    Raises:
      UserError: the table is damaged, or it has no such run.
    """
    path = Path(path)
    if not is_table(path.parent):
        return None
    runs = read(path.parent)
    if path.name not in runs:
        raise UserError(f"{path.parent} has no run {path.name}")
    return runs[path.name]


def find(path: Path | str) -> list[Path]:
    """The sorted paths of the runs at a path: run folders, and kept runs as ``TABLE/RUN``.

    Args:
      path: a run folder, a table, ``TABLE/PATTERN`` for the runs of a table whose names match, or a folder that holds
        run folders or tables at any depth.

    Raises:
      UserError: a table cannot be read, is damaged, or has no run that matches.
    """
    path = Path(path)
    if is_table(path):
        return sorted(path / name for name in read(path))
    if is_table(path.parent):
        if not (names := fnmatch.filter(read(path.parent), path.name)):
            known = sorted(read(path.parent))
            example = f"; it has {len(known)}, the first is {known[0]}" if known else ""
            raise UserError(f"{path.parent} has no run {path.name}{example}")
        return sorted(path.parent / name for name in names)
    folders = [each.parent for each in path.rglob("config.json")]
    return sorted([*folders, *(run for table in path.rglob(f"*{SUFFIX}") for run in find(table))])
