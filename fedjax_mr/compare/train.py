"""Train blocks of paired seeds until all pairs of methods are decided."""

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import files, untrusted
from fedjax_mr.analysis import paired, verdicts
from fedjax_mr.analysis.ledger import LEDGER, Comparison, look
from fedjax_mr.analysis.paired import ALPHA, UNDECIDED
from fedjax_mr.analysis.runs import bytes_sent
from fedjax_mr.compare import methods as contenders
from fedjax_mr.compare.methods import Method
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.errors import DivergedError, UserError, unknown_name
from fedjax_mr.experiment.experiment import versions
from fedjax_mr.experiment.folder import is_leftover, run_state
from fedjax_mr.experiment.report import LAST
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.run import run
from fedjax_mr.experiment.trials import run_together
from fedjax_mr.results.rows import MetricsRow, metric_of, read_rows
from fedjax_mr.settings import LARGEST_INT32
from fedjax_mr.sweep import PlannedRun
from fedjax_mr.sweep.runs import batches
from fedjax_mr.sweep.together import pays
from fedjax_mr.terminal import interrupts

BLOCK, MOST_SEEDS = 5, 30
UNTIL = ("decided", "budget")
FIXED = ("methods", "metric", "error", "equal", "block", "first_seed", "tuning")  # of a folder; more seeds may follow
Train = Callable[[Sequence[PlannedRun]], None]
"""Trains runs to their ends."""


def compare(
    *methods: Config | str,
    config: Config | None = None,
    metric: str | None = None,
    margin: float | None = None,
    error: float = ALPHA,
    until: str = "decided",
    most_seeds: int = MOST_SEEDS,
    block: int = BLOCK,
    equal: str = "rounds",
    folder: Path | str = "runs/compare",
    tuning: Mapping[str, Any] | None = None,
    batch: bool = True,
    train: Train | None = None,
    progress: bool = False,
    **objects: Any,
) -> Comparison:
    """Compare methods on paired seeds until it is decided which one is better, or that they are equal.

    Runs of one seed share the partition, the initial model and the cohorts. The value of a run is the mean of its last
    ten evaluations. The test of `fedjax_mr.analysis.paired` may be looked at after each block of seeds. A pair that is
    decided gets no further seeds.

    Args:
      methods: at least two configurations that describe one problem, or names of strategies.
      config: the configuration of strategies that are given by name. Default: ``Config()``.
      metric: column of the evaluations, such as ``accuracy``, ``loss`` or ``personal_accuracy``. Default: the first
        metric of the task.
      margin: difference that does not matter, in units of the metric. Default: 0.01 for fractions such as the accuracy,
        0 for others, which are then equal only if they are the same.
      error: probability of any wrong verdict. Each of several pairs has an equal share of it.
      until: ``decided``, or ``budget`` to train all seeds.
      most_seeds: number of seeds after which a pair is undecided.
      block: seeds between two looks.
      equal: what runs have the same amount of: ``rounds``, ``images``, ``bytes`` or ``clock``. A longer run counts up
        to its last evaluation within the amount of the shorter one.
      folder: folder of the runs and of the ledger. An interrupted call continues in it.
      tuning: facts about the choice of the settings, for the ledger.
      batch: whether the runs of a method in a block train in one program where that pays. Such a program compiles
        longer, so False is faster for runs of a few seconds.
      train: trains runs to their ends. Default: in this process.
      progress: whether to write the progress to standard error.
      **objects: ``dataset``, ``model`` and ``variables``, as in `fedjax_mr.run`; the same for all methods.

    Raises:
      UserError: bad input, or a folder of another comparison.
      DivergedError: a run diverged, so its method has no value with this seed.
    """
    _check(until=until, most_seeds=most_seeds, block=block, error=error, margin=margin)
    if metric is not None:
        verdicts.lower_is_better(metric)  # an unknown name is refused before the training
    common = config or Config()
    asked = [
        dataclasses.replace(common, strategy=each, hyper=None) if isinstance(each, str) else each for each in methods
    ]
    if any(each.run_dir or each.overwrite or each.resume for each in asked):
        raise UserError("a comparison chooses its run folders: leave out run_dir, overwrite and resume")
    first_seed = asked[0].seed if asked else 0
    same = [resolve(dataclasses.replace(each, seed=first_seed), **objects).config for each in asked]
    known = contenders.of_configs(same, budget=equal)
    if first_seed + most_seeds > LARGEST_INT32:
        raise UserError(f"there are no {most_seeds} seeds from {first_seed} on")
    folder = files.expand_home(folder)
    ledger: dict[str, Any] = {
        "methods": [{"name": each.name, "settings": _settings(each)} for each in known],
        "different": contenders.different(known),
        "metric": metric,
        "higher_is_better": True,
        "margin": margin,
        "error": error,
        "pairs_that_share_the_error": math.comb(len(known), 2),
        "spread_of_effects": paired.SPREAD,
        "equal": equal,
        "until": until,
        "block": block,
        "most_seeds": most_seeds,
        "first_seed": first_seed,
        "partition_seed": known[0].config.partition_seed,
        "tuning": None if tuning is None else dict(tuning),
        "versions": versions(),
        "pairs": [
            {"methods": list(pair), "looks": [], "seeds": [], "values": []}
            for pair in itertools.combinations(range(len(known)), 2)
        ],
    }
    _require_same(folder, ledger)
    train = train or (lambda runs: train_here(runs, objects, batch=batch))
    for first in range(first_seed, first_seed + most_seeds, block):
        undecided = [pair for pair in ledger["pairs"] if until == "budget" or _outcome(pair) == UNDECIDED]
        if not undecided:
            break
        seeds = range(first, min(first + block, first_seed + most_seeds))
        _add_block(known, undecided, seeds, folder, train, ledger)
        result = Comparison(ledger)
        result.write(folder)
        if progress:
            done = [sentence for sentence in result.sentences() if len(ledger["pairs"]) == 1 or "undecided" in sentence]
            print(f"fedjax-mr: {seeds[-1] + 1 - first_seed} seeds; {'; '.join(done) or 'decided'}", file=sys.stderr)
    return Comparison(ledger)


def _add_block(
    known: Sequence[Method],
    pairs: Sequence[dict[str, Any]],
    seeds: Sequence[int],
    folder: Path,
    train: Train,
    ledger: dict[str, Any],
) -> None:
    """Train seeds of the methods of some pairs, and add their values and a look to the ledger."""
    active = sorted({place for pair in pairs for place in pair["methods"]})
    planned = {(place, seed): known[place].run(seed, folder) for place in active for seed in seeds}
    train(list({run.folder: run for run in planned.values()}.values()))
    rows: dict[tuple[int, int], list[MetricsRow]] = {}
    for (place, seed), each in planned.items():
        if each.state() == "diverged":
            raise DivergedError(
                f"{known[place].name} diverged with seed {seed} ({each.folder}), so the methods cannot be compared: a "
                "smaller lr or a clip_norm may help"
            )
        rows[place, seed] = read_rows(each.folder)
    _complete(ledger, rows)
    for pair in pairs:
        for seed in seeds:
            both = [rows[place, seed] for place in pair["methods"]]
            pair["values"].append(values_of(both, ledger["metric"], ledger["equal"]))
            pair["seeds"].append(seed)
        pair["looks"].append(look(pair, len(pair["seeds"]), ledger))


def values_of(several: Sequence[Sequence[MetricsRow]], metric: str, budget: str) -> list[float]:
    """The value of each run: the mean of its last ten evaluations within the budget that all of them have.

    Args:
      several: the evaluations of each run.
      metric: the column.
      budget: a key of `ledger.BUDGETS`. For rounds, all evaluations count.

    Raises:
      UserError: a run has no such column, or no evaluation within the budget.
    """
    places = [[_place(row, budget) for row in rows] for rows in several]
    limit = math.inf if budget == "rounds" else min(max(each) for each in places)
    found = []
    for rows, places_of in zip(several, places, strict=True):
        within = [row for row, place in zip(rows, places_of, strict=True) if place <= limit]
        values = [row[metric] for row in within[-LAST:] if row.get(metric) is not None]
        if not within:
            raise UserError(
                f"no evaluation is within the {budget} of the other method: evaluate more often (eval_every)"
            )
        if len(values) < len(within[-LAST:]):
            raise UserError(f"an evaluation has no {metric}, or one that is not finite")
        found.append(statistics.fmean(values))
    return found


def _place(row: MetricsRow, budget: str) -> float:
    if budget == "rounds":
        return row["round"]
    if budget == "bytes":
        return bytes_sent(row)
    if row.get(budget) is None:
        remedy = ": train with --fleet" if budget == "clock" else ""
        raise UserError(f"equal={budget}, but the runs have no column {budget}{remedy}")
    return row[budget]


def _complete(ledger: dict[str, Any], rows: Mapping[Any, list[MetricsRow]]) -> None:
    """Fill in the metric and the margin, which are those of the first run if they are not set."""
    first = next(iter(rows.values()))
    primary = metric_of(first)
    metric = ledger["metric"] = ledger["metric"] or primary.name
    for each in rows.values():
        if metric not in each[-1]:
            numbers = [name for name, value in each[-1].items() if isinstance(value, float)]
            raise unknown_name("metric", metric, numbers)
    own = metric == primary.name  # perhaps a metric of the user, which is no row
    ledger["higher_is_better"] = primary.higher_is_better if own else not verdicts.lower_is_better(metric)
    if ledger["margin"] is None:
        ledger["margin"] = verdicts.MARGIN if verdicts.Unit.of(metric).words else 0.0


def _outcome(pair: Mapping[str, Any]) -> str:
    return pair["looks"][-1]["outcome"] if pair["looks"] else UNDECIDED


def _settings(method: Method) -> dict[str, Any]:
    """The settings of a method that can change results; the seed is that of the first run."""
    return configuration.decisive(configuration.portable(method.config))


def _check(*, until: str, most_seeds: int, block: int, error: float, margin: float | None) -> None:
    if until not in UNTIL:
        raise unknown_name("until", until, UNTIL)
    for name, value in (("most_seeds", most_seeds), ("block", block)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name}={value!r} must be a whole number of at least 1")
    if not 0 < error < 1:
        raise UserError(f"error={error} is out of range (allowed: > 0 and < 1)")
    if margin is not None and not 0 <= margin < math.inf:
        raise UserError(f"margin={margin} is out of range (allowed: >= 0)")


def _require_same(folder: Path, ledger: Mapping[str, Any]) -> None:
    """Check that a folder holds no other comparison, and create it.

    Raises:
      UserError: it does, or it cannot be written.
    """
    try:
        files.make_folder(folder)
        text = untrusted.read_text(folder / LEDGER) if (folder / LEDGER).exists() else "{}"
        before = untrusted.parse_json(text)
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{folder / LEDGER} is damaged ({error}): choose another folder") from None
    wanted = json.loads(json.dumps(ledger))
    names = [name for name in FIXED if name in before and not (name == "metric" and wanted[name] is None)]
    if different := [name for name in names if before[name] != wanted[name]]:
        raise UserError(f"{folder} holds another comparison (its {different[0]} differ): choose another folder")


# --- In this process -------------------------------------------------------------------------------------------------


def train_here(runs: Sequence[PlannedRun], objects: Mapping[str, Any], *, batch: bool = True) -> None:
    """Train runs in this process, or resume them: with ``batch``, those of a method in one program where that pays.

    Raises:
      UserError: bad input.
    """
    for several in batches([each for each in runs if each.state() not in ("finished", "diverged")]):
        interrupts.check()
        ready = [_ready(each) for each in several]
        if batch and len(ready) > 1 and pays(ready[0]):
            try:
                run_together(ready, **objects)
                continue
            except UserError:  # such as a method that works on the host between rounds
                ready = [_ready(each) for each in several if each.state() not in ("finished", "diverged")]
        for each in ready:
            try:
                run(each, record=False, **objects)
            except DivergedError:
                continue  # its folder says so


def _ready(planned: PlannedRun) -> Config:
    """The configuration of a run in its folder: new, or resumed from its last checkpoint."""
    folder = planned.folder
    resume = run_state(folder) != "new"
    overwrite = not resume and ((folder / "config.json").exists() or is_leftover(folder))
    return dataclasses.replace(planned.config, run_dir=str(folder), resume=resume, overwrite=overwrite, progress=False)
