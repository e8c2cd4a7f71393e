"""A command works whatever its standard streams and its current folder are, or says in one line what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedjax_mr.experiment.report import ProgressBar
from fedjax_mr.terminal import streams

ROOT = Path(__file__).parents[2]
ALONE = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("streams", {streams.__file__!r})
streams = importlib.util.module_from_spec(spec)
spec.loader.exec_module(streams)
streams.prepare()

def main():
    number = os.open("file", os.O_CREAT | os.O_WRONLY)
    sys.stderr.write("progress " * 1000)
    print("result")
    open("absent/file" if len(sys.argv) > 1 else "file").close()
    print("number", number)
    return 5

sys.exit(streams.run(main))
"""


def shell(line, folder, *arguments, limit=120):
    """Run a line of the shell, in which $0 is this Python and $@ are the arguments."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        ["sh", "-c", line, sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=limit,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "code", "out", "said"),
    [
        ("", 5, "result\nnumber 3\n", "progress " * 1000),
        ("2>&-", 5, "result\nnumber 3\n", ""),
        ("2>/dev/full", 5, "result\nnumber 3\n", ""),
        (">&-", 5, "", "progress " * 1000),
        ("<&- >&- 2>&-", 5, "", ""),
        (">/dev/full 2>/dev/full", 2, "", ""),
        (">/dev/full", 2, "", "fedjax-mr: cannot write to standard output (No space left on device); files written"),
    ],
)
def test_streams_that_are_closed_or_full(how, code, out, said, tmp_path):
    """No file gets the number of a stream, and only output that was asked for is missed."""
    ended = shell(f'"$0" "$@" {how}', tmp_path, "-c", ALONE)
    assert (ended.returncode, ended.stdout) == (code, out)
    assert said in ended.stderr if said else ended.stderr == ""
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("before", "code"), [("", 1), ("mkdir gone; cd gone; rmdir ../gone;", 2)])
def test_a_file_that_is_missing_keeps_its_traceback_unless_the_current_folder_is(before, code, tmp_path):
    ended = shell(f'{before} exec 2>&1; "$0" "$@"', tmp_path, "-c", ALONE, "open")
    told = "fedjax-mr: the current folder has been deleted; " in ended.stdout
    assert (ended.returncode, told, "FileNotFoundError" in ended.stdout) == (code, code == 2, code == 1)


def test_a_real_command_whose_output_cannot_be_written(tmp_path):
    ended = shell('"$0" "$@" >/dev/full', tmp_path, "-m", "fedjax_mr.main", "--help")
    assert ended.returncode == 2
    assert ended.stderr.startswith("fedjax-mr: cannot write to standard output") and ended.stderr.count("\n") == 1


def test_a_program_without_standard_error_shows_no_bar(monkeypatch):
    """As a library is used: the streams are the program's own affair."""
    monkeypatch.setattr(sys, "stderr", None)
    bar = ProgressBar(3)
    bar.update(1, seconds=1.0, images_per_second=1.0)
    bar.close()


@pytest.mark.slow
def test_a_run_without_any_stream_is_whole(tmp_path):
    rng, y = np.random.default_rng(0), np.arange(48) % 3
    x = rng.normal(size=(48, 4, 4, 1)).astype(np.float32)
    np.savez(tmp_path / "tiny.npz", x=x[:36], y=y[:36], x_test=x[36:], y_test=y[36:])
    flags = "--dataset=./tiny.npz --partition=iid --model=mlp --clients=2 --cohort=2 --local_epochs=1 --rounds=2"
    ended = shell(f'"$0" -m fedjax_mr.main {flags} --devices=1 --run_dir=run <&- >&- 2>&-', tmp_path, limit=300)
    assert ended.returncode == 0
    assert (tmp_path / "run" / "summary.json").exists()
