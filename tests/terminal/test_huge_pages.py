"""Commands start again with huge pages where these help, once, and keep what the user says."""

import os
import subprocess
import sys

import pytest

from fedjax_mr.terminal import huge_pages


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """What a command starts again as, on a system that gives huge pages on request."""
    started = []
    mode = tmp_path / "enabled"
    mode.write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "MODE", mode)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36", raising=False)
    monkeypatch.setattr(os, "execv", lambda path, words: started.append((path, words, os.environ[huge_pages.VARIABLE])))
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "fedjax_mr.main", "--lr=0.1"])
    monkeypatch.delenv(huge_pages.VARIABLE, raising=False)
    return started


def test_a_command_starts_again_once_with_the_same_words(starts):
    huge_pages.begin()
    huge_pages.begin()
    assert starts == [(sys.executable, [sys.executable, "-m", "fedjax_mr.main", "--lr=0.1"], huge_pages.VALUE)]


@pytest.mark.parametrize("value", ["", "glibc.malloc.check=0"])
def test_the_users_setting_stays(starts, monkeypatch, value):
    monkeypatch.setenv(huge_pages.VARIABLE, value)
    huge_pages.begin()
    assert not starts


@pytest.mark.parametrize(
    ("mode", "library"),
    [
        ("[always] madvise never", "glibc 2.36"),
        ("always madvise [never]", "glibc 2.36"),
        (None, "glibc 2.36"),  # no such file
        ("always [madvise] never", "glibc 2.31"),
        ("always [madvise] never", None),
    ],
)
def test_nothing_happens_where_it_would_not_help(starts, monkeypatch, mode, library):
    huge_pages.MODE.unlink() if mode is None else huge_pages.MODE.write_text(mode)
    monkeypatch.setattr(os, "confstr", lambda name: library)
    huge_pages.begin()
    assert not starts


def test_without_huge_pages_a_command_works(starts, monkeypatch):
    def refuse(path, words):
        raise PermissionError

    monkeypatch.setattr(os, "execv", refuse)
    huge_pages.begin()


def test_a_command_reports_its_exit_code_and_output_through_the_second_start():
    done = subprocess.run(
        [sys.executable, "-m", "fedjax_mr.main", "--version"],
        env={name: value for name, value in os.environ.items() if name != huge_pages.VARIABLE},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("fedjax_mr ")
    assert not done.stderr
