"""The progress bar of a run, and the summary at its end."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from fedjax_mr.experiment.folder import COLUMNS, MetricsRow, plain_numbers
from fedjax_mr.results.rows import metric_of
from fedjax_mr.tasks import METRICS, Metric

LAST = 10  # the mean of this many evaluations is reported


def last_evaluations(count: int) -> str:
    """The name of the mean of the last ten of ``count`` evaluations, such as ``last 10``, or ``all 7``."""
    return f"last {LAST}" if count > LAST else f"all {count}"


def summarise(rows: Sequence[MetricsRow], target: float | None = None) -> dict[str, Any]:
    """The summary of the evaluations; None marks a missing value.

    The values are those of the first metric (`rows.metric_of`), such as ``accuracy_last``; other metrics have their
    last value, such as ``auroc_last``. With fewer than ten evaluations, ``accuracy_mean_last_10`` is the mean of all;
    ``evaluations`` is their number.

    Args:
      rows: the evaluations, ascending.
      target: the value for ``rounds_to_target``, or None.
    """
    rows = [plain_numbers(row) for row in rows]
    metric = metric_of(rows)
    name, sign = metric.name, 1 if metric.higher_is_better else -1
    values = [sign * row[name] for row in rows if row[name] is not None]
    last: Mapping[str, Any] = rows[-1] if rows else dict.fromkeys(COLUMNS)
    reached = [row["round"] for row in rows if reaches(row[name], target, metric)]
    ten = [row[name] for row in rows[-LAST:] if row[name] is not None]
    return {
        f"{name}_last": last[name],
        f"{name}_best": sign * max(values) if values else None,
        f"{name}_mean_last_10": statistics.fmean(ten) if ten else None,
        **{f"{other}_last": value for other, value in last.items() if other in METRICS and other != name},
        "evaluations": len(rows),
        "loss_last": last["loss"],
        "rounds": last["round"] or 0,
        "rounds_to_target": reached[0] if reached else None,
        "bytes_down": last["bytes_down"] or 0,
        "bytes_up": last["bytes_up"] or 0,
        **({"bytes_peer": last["bytes_peer"]} if "bytes_peer" in last else {}),
    }


def reaches(value: float | None, target: float | None, metric: Metric) -> bool:
    """Whether a value is as good as a target. Missing ones are not."""
    if target is None or value is None:
        return False
    return value >= target if metric.higher_is_better else value <= target


def summary_table(summary: Mapping[str, Any]) -> str:
    """The short table at the end of a run, without lines whose value is missing."""

    def number(format: str, name: str, unit: float = 1) -> str | None:
        value = summary.get(name)
        return None if value is None else format.format(value / unit if unit != 1 else value)

    last = last_evaluations(summary.get("evaluations", LAST + 1))
    name = next((key.removesuffix("_last") for key in summary if key.endswith("_last")), "accuracy")
    title = METRICS[name].title if name in METRICS else name
    others = [each for each in METRICS if each != name and f"{each}_last" in summary]
    lines = {
        f"{title}, last": number("{:.4f}", f"{name}_last"),
        f"{title}, best": number("{:.4f}", f"{name}_best"),
        f"{title}, mean of {last}": number("{:.4f}", f"{name}_mean_last_10"),
        **{f"{METRICS[other].title}, last": number("{:.4f}", f"{other}_last") for other in others},
        "test loss": number("{:.4f} nats" if name == "accuracy" else "{:.4f}", "loss_last"),
        "validation": number("{:.4f}", f"validation_{name}"),
        "clients' own models": number("{:.4f}", f"personal_{name}"),
        "worst tenth of them": number("{:.4f}", "personal_worst10"),
        "after fine-tuning": number("{:.4f}", f"finetuned_{name}"),
        "rounds": number("{:,}", "rounds"),
        "ended early by": None if summary.get("ended_by") == "rounds" else number("--{}", "ended_by"),
        "best checkpoint": number("round {:,}", "best_checkpoint"),
        "rounds to the target": number("{:,}", "rounds_to_target"),
        "sent to clients": number("{:,.1f} MB", "bytes_down", 1e6),
        "sent to the server": number("{:,.1f} MB", "bytes_up", 1e6),
        "sent among clients": number("{:,.1f} MB", "bytes_peer", 1e6),
        "compilation": number("{:.1f} s", "compile_seconds"),
        "per round": number("{:.3f} s", "seconds_per_round"),
        "of this the server": number("{:.3f} s", "server_seconds_per_round"),
        "speed": number("{:,.0f} samples/s", "images_per_second"),
        "peak memory": number("{:,.0f} MB", "peak_memory_bytes", 1e6),
    }
    shown = {name: text for name, text in lines.items() if text is not None}
    width = max(map(len, shown), default=0)
    return "\n".join(f"  {name.ljust(width)}  {text}" for name, text in shown.items())


class ProgressBar:
    """A bar on standard error: round, the first metric, samples per second, time left.

    The time left is estimated from the pace of this process without compilation. The first call also warms up, so it
    counts only until the second one ends.
    """

    def __init__(self, total: int, done: int = 0, *, quiet: bool = False):
        """Show the bar at ``done`` of ``total`` rounds, unless ``quiet`` is set or there is no standard error."""
        self._since = (done, 0.0)  # rounds and seconds that are not part of the pace
        self._calls = 0
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=quiet or sys.stderr is None,
            file=sys.stderr,
            dynamic_ncols=True,
            smoothing=0,
            mininterval=0.2 if sys.stderr is not None and sys.stderr.isatty() else 5.0,  # a log file needs fewer lines
            bar_format="round {n_fmt}/{total_fmt} |{bar}| {percentage:3.0f}%{postfix}",
            postfix="compiling, then the first rounds",
        )

    def update(self, done: int, *, seconds: float, images_per_second: float, row: MetricsRow | None = None) -> None:
        """Move the bar to ``done`` rounds.

        Args:
          done: rounds.
          seconds: since the start of this process's first round, without compilation.
          images_per_second: of training.
          row: the newest evaluation.
        """
        rounds, before = self._since
        pace = (seconds - before) / max(done - rounds, 1)
        left = tqdm.format_interval(max(0.0, pace * ((self._bar.total or 0) - done)))
        self._calls += 1
        if self._calls == 1:
            self._since = done, seconds
        metric = metric_of([row] if row else [])
        value = row[metric.name] if row else None
        parts = [] if value is None else [f"{metric.title} {value:.4f}"]
        self._bar.set_postfix_str(
            ", ".join([*parts, f"{images_per_second:,.0f} samples/s", f"{left} left"]), refresh=False
        )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        self._bar.close()
