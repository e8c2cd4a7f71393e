"""The evaluations of runs as a pandas data frame."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_mr.analysis import groups
from fedjax_mr.config import titles
from fedjax_mr.errors import UserError

if TYPE_CHECKING:
    import pandas


def frame(paths: Path | str | Iterable[Path | str]) -> "pandas.DataFrame":
    """A data frame with one row per run and evaluation.

    Its columns are ``run`` (the folder), ``method`` (its name in plots), ``strategy``, ``seed``, ``state`` of the run,
    the settings in which the runs differ (by flag; missing if a run does not have it), and the metrics, ``round``
    first. Runs without an evaluation have no rows.

    Args:
      paths: a run folder, a table of kept runs or a folder that holds some, or several of these.

    Raises:
      UserError: pandas is missing, a path holds no run, or its files cannot be read.
    """
    try:
        import pandas
    except ImportError:
        raise UserError("a data frame needs pandas: pip install 'fedjax-mr[pandas]'") from None
    chosen = groups.find(paths)
    known = [titles.facts(run.config) for run in chosen]
    varied = [flag for flag in titles.varied(known) if flag != "strategy"]
    rows: list[dict[str, Any]] = []
    for run, facts in zip(chosen, known, strict=True):
        same = {
            "run": str(run.path),
            "method": titles.method(facts),
            "strategy": run.config.strategy,
            "seed": run.config.seed,
            "state": run.state,
            **{flag: facts.get(flag) for flag in varied},
        }
        rows += [same | row for row in run.rows_so_far()]
    return pandas.DataFrame(rows)
