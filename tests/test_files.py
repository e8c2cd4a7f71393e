"""Files are synced before they are renamed; other kinds of files are never waited for."""

import errno
import os
from pathlib import Path

import pytest

from fedjax_mr import files, untrusted
from fedjax_mr.errors import UserError


@pytest.fixture
def events(monkeypatch, tmp_path):
    """Record the order in which files are synced and renamed."""
    events, sync, replace = [], files.sync, os.replace
    monkeypatch.setattr(files, "sync", lambda path: (events.append(("sync", path)), sync(path)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(("rename", old, new)), replace(old, new)))
    return events


def test_content_is_on_the_disk_before_its_name(tmp_path, events):
    with files.atomic_write(tmp_path / "a.txt") as path:
        path.write_text("new")
    assert events == [("sync", path), ("rename", path, tmp_path / "a.txt"), ("sync", tmp_path)]
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_two_processes_with_one_number_write_at_once(tmp_path, monkeypatch):
    """Containers that share a folder number their processes from 1."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with files.atomic_write(tmp_path / "a.txt") as first, files.atomic_write(tmp_path / "a.txt") as second:
        first.write_text("first"), second.write_text("second")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_older_file(tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a.txt").write_text("old")
    monkeypatch.setattr(os, step, full)
    full_disk = pytest.raises(UserError, match=r"cannot write .*a\.txt \(No space left on device\)$")
    with full_disk, files.atomic_write(tmp_path / "a.txt") as path:
        path.write_text("new")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_folders_that_cannot_be_synced_are_passed_over_and_failing_disks_are_not(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    code = errno.EINVAL

    def fail(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    files.sync(tmp_path)
    for code, path in ((errno.EINVAL, tmp_path / "file"), (errno.EIO, tmp_path)):
        with pytest.raises(OSError, match=os.strerror(code)):
            files.sync(path)


def test_a_tree_is_synced_from_its_leaves(tmp_path, events):
    made = files.make_folder(tmp_path / "a" / "b")
    assert made == [tmp_path / "a" / "b", tmp_path / "a"] and files.make_folder(tmp_path / "a") == []
    assert events == [("sync", tmp_path / "a"), ("sync", tmp_path)]
    events.clear()
    (tmp_path / "a" / "b" / "file").touch()
    files.sync_tree(tmp_path / "a")
    assert [str(path) for _, path in events] == [str(tmp_path / "a" / name) for name in ("b/file", "b")] + [
        str(tmp_path / "a")
    ]


def test_what_is_no_file_is_an_error_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        with pytest.raises(OSError):
            untrusted.read_text(path)


@pytest.mark.parametrize("text", ["", "{", "[" * 200_000, '{"a":' * 200_000, "1" * 5000])
def test_json_is_read_or_is_a_value_error(text):
    assert untrusted.parse_json('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError):
        untrusted.parse_json(text)


def test_without_a_home_there_is_no_cache_and_a_path_in_it_is_one_line(monkeypatch):
    """For a user without HOME and without an entry in the user database."""
    assert files.expand_home("a/~b") == Path("a/~b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert files.cache_folder() == Path("/cache/fedjax_mr")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder() is None
    with pytest.raises(UserError, match="~/data: the home folder is unknown; set HOME, or use an absolute path"):
        files.expand_home("~/data")
