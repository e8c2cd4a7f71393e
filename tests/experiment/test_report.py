"""Summary and progress bar say what happened."""

import math
import re

import pytest

from fedjax_mr.experiment.folder import COLUMNS
from fedjax_mr.experiment.report import ProgressBar, summarise, summary_table


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def row(round, **changes):
    values = {"accuracy": round / 100, "loss": 1 / round, "bytes_down": 10 * round, "bytes_up": 20 * round}
    return dict.fromkeys(COLUMNS, 0.5) | {"round": round} | values | changes


# --- Summary ---------------------------------------------------------------------------------------------------------


def test_summary():
    rows = [row(round, accuracy=accuracy) for round, accuracy in enumerate([0.1, 0.6, 0.5, 0.9, 0.7] * 4, start=1)]
    assert summarise(rows, 0.6) == {
        "accuracy_last": 0.7,
        "accuracy_best": 0.9,
        "accuracy_mean_last_10": pytest.approx(0.56),
        "evaluations": 20,
        "loss_last": 1 / 20,
        "rounds": 20,
        "rounds_to_target": 2,
        "bytes_down": 200,
        "bytes_up": 400,
    }
    assert summarise(rows)["rounds_to_target"] is None
    assert summarise(rows, 0.95)["rounds_to_target"] is None
    assert summarise(rows[:3])["accuracy_mean_last_10"] == pytest.approx(0.4)


def test_the_other_metrics_are_at_the_end_of_a_run_too():
    first = {"round": 3, "macro_f1": 0.5, "auroc": 0.75, "f1_of_a": 0.2} | row(3)
    del first["accuracy"]
    summary = summarise([first])
    assert next(iter(summary)) == "macro_f1_last" and summary["auroc_last"] == 0.75 and "f1_of_a_last" not in summary
    shown = summary_table(summary)
    assert re.search(r"^  macro F1, last +0.5000$", shown, re.M) and re.search(r"^  AUROC, last +0.7500$", shown, re.M)


def test_summary_of_nothing_and_of_a_diverged_run():
    nothing = summarise([], 0.5)
    assert nothing["rounds"] == nothing["bytes_down"] == 0 and nothing["accuracy_best"] is None
    diverged = summarise([row(1), row(2, accuracy=math.nan, loss=math.nan)], 0.01)
    assert diverged["accuracy_last"] is None and diverged["loss_last"] is None
    assert diverged["accuracy_best"] == diverged["accuracy_mean_last_10"] == 0.01 and diverged["rounds_to_target"] == 1


def test_summary_table():
    text = summary_table(
        summarise([row(150, accuracy=0.97123, bytes_down=2_500_000)], 0.9)
        | {"compile_seconds": 4.26, "seconds_per_round": 0.1234, "images_per_second": 8123.4, "peak_memory_bytes": 5e8}
    )
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert dict(lines)["accuracy, last"] == "0.9712"
    assert dict(lines)["rounds"] == dict(lines)["rounds to the target"] == "150"
    assert dict(lines)["sent to clients"] == "2.5 MB"
    assert dict(lines)["speed"] == "8,123 samples/s"
    assert len({line.index(value) for line, (_, value) in zip(text.splitlines(), lines, strict=True)}) == 1
    assert "target" not in summary_table(summarise([row(1)]))
    assert "among" not in text
    assert "sent among clients       1.5 MB" in summary_table(summarise([row(1) | {"bytes_peer": 1.5e6}]))
    assert summary_table({}) == ""


@pytest.mark.parametrize(("count", "words"), [(1, "all 1"), (3, "all 3"), (10, "all 10"), (11, "last 10")])
def test_a_mean_of_all_evaluations_is_not_called_that_of_the_last_ten(count, words):
    summary = summarise([row(round) for round in range(1, count + 1)])
    assert f"accuracy, mean of {words} " in summary_table(summary) and summary["evaluations"] == count
    del summary["evaluations"]  # as older versions wrote it
    assert "mean of last 10 " in summary_table(summary)


# --- While it runs ---------------------------------------------------------------------------------------------------


def test_progress_shows_round_accuracy_speed_and_time_left(capsys):
    bar = ProgressBar(20, 5)
    bar.update(10, seconds=1, images_per_second=8123.4)
    bar.update(20, seconds=2, images_per_second=8000, row=row(20, accuracy=0.5))
    bar.close()
    out, shown = capsys.readouterr()
    assert out == ""
    last = shown.replace("\r", "\n").strip().splitlines()[-1]
    for part in ("round 20/20", "accuracy 0.5000", "8,000 samples/s", "00:00 left"):
        assert part in last
    assert "round 5/20" in shown


@pytest.mark.parametrize(
    ("calls", "left"),
    [
        ([(1, 2.0)], "03:20"),  # one round so far, which took two seconds
        ([(1, 20.0), (11, 30.0)], "01:30"),  # the first call warms up and is left out: then one second per round
        ([(1, 20.0), (11, 30.0), (31, 40.0)], "00:46"),
        ([(101, 50.0)], "00:00"),
    ],
)
def test_time_left_is_that_of_the_rounds_alone(capsys, monkeypatch, calls, left):
    """Seconds are without compilation; the clock, which has them all, does not matter."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    for before in (0, 100):  # a run from its start, and one that is resumed
        bar = ProgressBar(101 + before, before)
        for done, seconds in calls:
            now[0] += 600
            bar.update(before + done, seconds=seconds, images_per_second=1)
        bar.close()
        assert f"{left} left" in capsys.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]


def test_progress_of_a_diverged_model_and_quiet(capsys):
    bar = ProgressBar(20)
    bar.update(20, seconds=1, images_per_second=1, row={"round": 20, "accuracy": None})
    bar.close()
    assert "accuracy" not in capsys.readouterr().err
    bar = ProgressBar(20, quiet=True)
    bar.update(20, seconds=1, images_per_second=1, row=row(20))
    bar.close()
    assert capsys.readouterr() == ("", "")
