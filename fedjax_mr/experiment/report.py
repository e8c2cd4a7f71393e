"""The progress bar of a run, and the summary at its end."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from fedjax_mr.experiment.folder import COLUMNS, MetricsRow, plain_numbers

LAST = 10  # the mean of this many evaluations is reported


def last_evaluations(count: int) -> str:
    """The name of the mean of the last ten of ``count`` evaluations, such as ``last 10``, or ``all 7``."""
    return f"last {LAST}" if count > LAST else f"all {count}"


def summarise(rows: Sequence[MetricsRow], target: float | None = None) -> dict[str, Any]:
    """The summary of the evaluations; None marks a missing value.

    With fewer than ten evaluations, ``accuracy_mean_last_10`` is the mean of all; ``evaluations`` is their number.

    Args:
      rows: the evaluations, ascending.
      target: the test accuracy for ``rounds_to_target``, or None.
    """
    rows = [plain_numbers(row) for row in rows]
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    last: Mapping[str, Any] = rows[-1] if rows else dict.fromkeys(COLUMNS)
    reached = [row["round"] for row in rows if target is not None and (row["accuracy"] or 0.0) >= target]
    ten = [row["accuracy"] for row in rows[-LAST:] if row["accuracy"] is not None]
    return {
        "accuracy_last": last["accuracy"],
        "accuracy_best": max(accuracies, default=None),
        "accuracy_mean_last_10": statistics.fmean(ten) if ten else None,
        "evaluations": len(rows),
        "loss_last": last["loss"],
        "rounds": last["round"] or 0,
        "rounds_to_target": reached[0] if reached else None,
        "bytes_down": last["bytes_down"] or 0,
        "bytes_up": last["bytes_up"] or 0,
        **({"bytes_peer": last["bytes_peer"]} if "bytes_peer" in last else {}),
    }


def summary_table(summary: Mapping[str, Any]) -> str:
    """The short table at the end of a run, without lines whose value is missing."""

    def number(format: str, name: str, unit: float = 1) -> str | None:
        value = summary.get(name)
        return None if value is None else format.format(value / unit if unit != 1 else value)

    last = last_evaluations(summary.get("evaluations", LAST + 1))
    lines = {
        "accuracy, last": number("{:.4f}", "accuracy_last"),
        "accuracy, best": number("{:.4f}", "accuracy_best"),
        f"accuracy, mean of {last}": number("{:.4f}", "accuracy_mean_last_10"),
        "test loss": number("{:.4f} nats", "loss_last"),
        "validation": number("{:.4f}", "validation_accuracy"),
        "clients' own models": number("{:.4f}", "personal_accuracy"),
        "worst tenth of them": number("{:.4f}", "personal_worst10"),
        "after fine-tuning": number("{:.4f}", "finetuned_accuracy"),
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
        "speed": number("{:,.0f} images/s", "images_per_second"),
        "peak memory": number("{:,.0f} MB", "peak_memory_bytes", 1e6),
    }
    shown = {name: text for name, text in lines.items() if text is not None}
    width = max(map(len, shown), default=0)
    return "\n".join(f"  {name.ljust(width)}  {text}" for name, text in shown.items())


class ProgressBar:
    """A bar on standard error: round, accuracy, images per second, time left.

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
        accuracy = row["accuracy"] if row else None
        parts = [] if accuracy is None else [f"accuracy {accuracy:.4f}"]
        self._bar.set_postfix_str(
            ", ".join([*parts, f"{images_per_second:,.0f} images/s", f"{left} left"]), refresh=False
        )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        self._bar.close()
