"""The results of a tuning: the table, the flags of each chosen setting, and the scores of all trials."""

import csv
from collections.abc import Mapping, Sequence

from fedjax_mr import files
from fedjax_mr.analysis import groups, tables
from fedjax_mr.experiment.report import LAST
from fedjax_mr.results import kept
from fedjax_mr.sweep import PlannedRun
from fedjax_mr.tasks import METRICS
from fedjax_mr.tune import scores
from fedjax_mr.tune import space as spaces
from fedjax_mr.tune.plan import Trial, Tuning
from fedjax_mr.tune.rungs import Standing

AT_END = "(least), (largest): the end of the values that were tried; a wider space may hold a better value."


def plan_text(tuning: Tuning) -> str:
    """The plan as text: the rungs, the rounds and, if they are known, the settings of all trials."""
    lines = ["space:", *(f"  {each.line()}" for each in tuning.space)]
    seeds = len(tuning.tuning_seeds)
    total = 0
    for strategy in tuning.strategies:
        known = tuning.drawn(strategy) if tuning.is_drawn(strategy) else None
        count = len(known) if known is not None else tuning.tune.budget
        steps, before, rounds = [], 0, 0
        for rung in tuning.rungs:
            trials = min(count, rung.trials)
            steps.append(f"{trials} trials to round {rung.rounds}")
            rounds += trials * (rung.rounds - before) * seeds
            before = rung.rounds
        total += rounds + tuning.config.rounds * len(tuning.seeds)
        lines.append(f"{strategy}: {', '.join(steps)}; {rounds:,} rounds, and {len(tuning.seeds)} tests")
        for trial in known or ():
            lines.append(f"  {' '.join(f'{flag}={value}' for flag, value in trial.choice.items())}")
        if known is None:
            lines.append(f"  proposed by Optuna's sampler {tuning.tune.sampler}")
    lines.append(f"{total:,} rounds in total for all methods, including the tests")
    return "\n".join(lines)


def table(tuning: Tuning, standing: Standing, tests: Mapping[str, Sequence[PlannedRun]]) -> str:
    """The table of the chosen settings as text, with its title and notes.

    Args:
      tuning: the plan.
      standing: the trials and their scores.
      tests: the tests of each method's chosen setting; methods whose trials all diverged have none.
    """
    unit = " %" if all(score.metric.unit == "fraction" for _, score in standing.values()) else ""
    tested = [f"validation{unit}", f"test, last {LAST}{unit}", f"clients' own{unit}", "tests"]
    rows = [["method", "chosen", "trials", "rounds", *tested]]
    for strategy in tuning.strategies:
        trials = [trial for trial in standing if trial.strategy == strategy]
        chosen = standing.best(strategy)
        diverged = sum(standing[trial][1].diverged for trial in trials)
        different = len({trial.runs[0].folder for trial in trials})
        counts = [str(len(trials)), *([f"{different} different"] if different < len(trials) else [])]
        counts += [f"{diverged} diverged"] if diverged else []
        rounds = sum(map(scores.rounds_trained, {trial.runs[0].folder: trial for trial in trials}.values()))
        row = [strategy, "none", ", ".join(counts), f"{rounds:,}", "", "", "", ""]
        if chosen is not None:
            score = standing[chosen][1]
            validation = tables.shown(groups.Statistic(score.value, None), score.metric)
            row[1], row[4] = _shown(tuning, chosen, trials) or "no flag searched", validation
            row[5:] = _tested(tests[strategy])
        rows.append(row)
    notes = [AT_END] if any(end in row[1] for row in rows[1:] for end in ("(least)", "(largest)")) else []
    return "\n".join(
        [_title(tuning, standing), "", tables.aligned(tables.filled(rows)), *([""] if notes else []), *notes]
    )


def _title(tuning: Tuning, standing: Standing) -> str:
    counts = {sum(trial.strategy == strategy for trial in standing) for strategy in tuning.strategies}
    count = str(*counts) if len(counts) == 1 else f"at most {tuning.tune.budget}"  # a method may have fewer settings
    file = str(tuning.config.partition_file)
    share = f"{100 * tuning.validation_share:g} % of each client's training samples"
    share = f"the validation samples in {file}" if file.endswith(".npz") else share
    test = ", ".join(map(str, tuning.seeds))
    seeds = f"seed{'s' if len(tuning.tuning_seeds) > 1 else ''} {', '.join(map(str, tuning.tuning_seeds))}"
    return (
        f"Best of {count} trials each, chosen on validation ({share}, {seeds}).\n"
        f"Test: mean ± standard deviation over seeds {test}, which chose nothing."
    )


def _shown(tuning: Tuning, chosen: Trial, trials: Sequence[Trial]) -> str:
    """The chosen flags; numbers at the end of those tried are marked."""
    own = {each.flag for each in spaces.of_method(tuning.space, chosen.strategy).values()}
    words = []
    for flag, value in chosen.choice.items():
        tried = [trial.choice[flag] for trial in trials if flag in trial.choice]
        end = groups.end_of(_number(value), [_number(each) for each in tried]) if flag in own else ""
        words.append(f"{flag}={value}" + (f" ({end})" if end else ""))
    return " ".join(words)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _tested(runs: Sequence[PlannedRun]) -> list[str]:
    """The cells of the tests: test accuracy, accuracy of the clients' own models, and number of runs."""
    begun = [run.folder for run in runs if kept.find(run.folder)]
    if not begun:
        return ["", "", f"0, {len(runs)} unfinished"]
    (line,) = tables.accuracy_lines(groups.find(begun))
    values = [tables.shown(line.of(column), line.metric) for column in ("last_10", "personal")]
    return [*values, tables.seeds(line)]


def write(tuning: Tuning, standing: Standing) -> None:
    """Write ``trials.csv``, and ``METHOD.flags`` with the chosen setting of each method, into the tuning's folder."""
    with files.atomic_write(tuning.folder / "trials.csv") as path, path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        metric = next((score.metric for _, score in standing.values()), METRICS["accuracy"])
        column = f"validation_{metric.name}"
        writer.writerow(["strategy", "trial", "flags", "rounds", column, "validation_loss", "state"])
        for trial, (rounds, score) in standing.items():
            flags = " ".join(f"--{flag}={value}" for flag, value in trial.choice.items())
            state = "diverged" if score.diverged else "chosen" if trial is standing.best(trial.strategy) else ""
            writer.writerow([trial.strategy, trial.number, flags, rounds, score.value, score.loss, state])
    for strategy in tuning.strategies:
        if (chosen := standing.best(strategy)) is not None:
            count = sum(trial.strategy == strategy for trial in standing)
            head = f"# {strategy}: best of {count} trials, chosen on validation"
            flags = [f"--{flag}={value}" for flag, value in chosen.choice.items()]
            with files.atomic_write(tuning.folder / f"{strategy}.flags") as path:
                path.write_text("\n".join([head, *flags]) + "\n", encoding="utf-8")
