"""The command says each mistake in one line and leaves with the promised code."""

import os
import subprocess
import sys
import types

import pytest

from fedjax_mr import main
from fedjax_mr.errors import DivergedError, Interrupted, UserError


@pytest.fixture
def run(monkeypatch):
    """Replace the experiment by a function that a test chooses; it sees the configuration."""
    return lambda function: monkeypatch.setattr(main, "run", function)


def test_flags_become_a_configuration_that_is_run(run, capsys):
    seen = []

    def succeed(config):
        seen.append(config)
        return types.SimpleNamespace(summary={"accuracy_last": 0.5}, folder="runs/x-1", writes=True)

    run(succeed)
    assert main.main(["--strategy=fedavg", "--lr=0.3"]) == 0
    assert (seen[0].strategy, seen[0].lr) == ("fedavg", 0.3)
    out, shown = capsys.readouterr()
    assert "0.5000" in out and "runs/x-1" in out.splitlines()[-1] and shown == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no such thing"), 2),
        (DivergedError("round 3 diverged"), 3),
        (Interrupted("stopped after round 3; go on with --resume", 130), 130),
    ],
)
def test_what_the_user_can_mend_is_one_line(run, capsys, error, code):
    def fail(config):
        raise error

    run(fail)
    assert main.main([]) == code
    assert capsys.readouterr() == ("", f"fedjax-mr: {error}\n")


def test_keyboard_interrupt(run, capsys):
    def interrupt(config):
        raise KeyboardInterrupt

    run(interrupt)
    assert main.main([]) == 130
    assert capsys.readouterr().err == "fedjax-mr: interrupted\n"


def test_our_own_mistakes_keep_their_traceback(run):
    run(lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main.main([])


@pytest.mark.parametrize("arguments", [["--lrr=1"], ["--flagfile=missing.flags"], ["--rounds=many"], ["stray"]])
def test_bad_flags_never_reach_the_run(run, capsys, arguments):
    run(lambda config: pytest.fail("ran"))
    assert main.main(arguments) == 2
    out, shown = capsys.readouterr()
    assert out == "" and shown.startswith("fedjax-mr: ") and shown.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["--lr=1", "-h"], ["--help", "--lrr=1"]])
def test_help(run, capsys, arguments):
    run(lambda config: pytest.fail("ran"))
    assert main.main(arguments) == 0
    out, shown = capsys.readouterr()
    assert out.startswith("usage: ") and shown == ""


def command(*arguments, **options):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "80"}
    return subprocess.Popen(
        [sys.executable, "-m", "fedjax_mr.main", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_the_real_command_refuses_in_one_line():
    with command("--stratgy=fedavg") as process:
        out, shown = process.communicate()
    assert process.returncode == 2
    assert (out, shown) == (
        "",
        "fedjax-mr: unknown flag --stratgy; did you mean --strategy? (--help=all lists all flags)\n",
    )
