"""Checkpoints: everything that the next round needs, written by orbax, whole or not at all, and checked when read.

A checkpoint is the folder ``ROUND`` with orbax's files and a manifest of their checksums. It is written under another
name and renamed when all of it is on the disk; only then an older one is removed. So a process may die, and the power
fail, at any moment. The checksums are our own because neither orbax nor TensorStore notices every flipped byte.
"""

import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.data import files
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.processes import ALONE, Processes

MANIFEST = "manifest.json"
_PARTIAL, _DISCARDED, _DAMAGED = ".partial-", ".discarded-", "damaged-"
_ROUND = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)
_OURS = re.compile(rf"({re.escape(_PARTIAL)}|{re.escape(_DISCARDED)}|{_DAMAGED})?\d+(-\d+)?", re.ASCII)
_LEFTOVER = re.compile(rf"({re.escape(_PARTIAL)}|{re.escape(_DISCARDED)})\d+", re.ASCII)


class Checkpoints:
    """The checkpoints of a run.

    Attributes:
      folder: holds one folder per checkpoint, named by its round; made at the first `save`.
      keep: how many of the newest checkpoints stay.
      processes: those that save and restore together; all of them see the same folder.
    """

    def __init__(self, folder: Path | str, *, keep: int = 2, processes: Processes = ALONE):
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.processes = processes

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, ascending; damage inside is found when it is read."""
        return [round for round in self._numbered() if (self.folder / str(round) / MANIFEST).exists()]

    def _numbered(self) -> list[int]:
        """Return the numbers that are names of folders, ascending."""
        names = (path.name for path in self.folder.glob("*/"))
        return sorted(int(name) for name in names if _ROUND.fullmatch(name))

    def alone(self) -> bool:
        """Return whether the folder holds, to go by the names, nothing but checkpoints: perhaps only half of one."""
        return self.folder.is_dir() and all(_OURS.fullmatch(path.name) for path in self.folder.iterdir())

    def latest(self) -> int | None:
        """Return the newest round that has a checkpoint, or None."""
        return max(self.rounds(), default=None)

    def meta(self, round: int) -> dict[str, Any]:
        """Return the dictionary that was saved with a checkpoint, whose arrays are not read; {} if it is damaged."""
        try:
            return _manifest(self.folder / str(round))["meta"]
        except _DamageError:
            return {}

    def save(self, round: int, tree: Any, meta: dict[str, Any], *, also: Collection[int] = ()) -> None:
        """Write a checkpoint; when this returns it is on the disk, and the oldest ones beyond ``keep`` are gone.

        A checkpoint of the same round is replaced; those of later rounds belong to a history that was given up, and
        are removed.

        Args:
          round: the number of rounds trained.
          tree: a pytree of arrays (dicts, NamedTuples, tuples, None).
          meta: a small dictionary that JSON can hold.
          also: earlier rounds whose checkpoints stay, if they are there, whatever their age.

        Raises:
          UserError: the disk is full, the folder cannot be written, or what was written cannot be read; older
            checkpoints are still there then.
        """
        leaves = _named(tree)
        partial = self.folder / f"{_PARTIAL}{round}"
        filled = {name: self._saveable(leaf) for name, leaf in leaves.items() if leaf.size}  # orbax refuses empty ones

        def prepare() -> None:
            if not self.folder.is_dir():
                self.folder.mkdir()  # not those above it: a run folder that was removed is not made again
                files.sync(self.folder.parent)
            self._sweep()
            # Asked before orbax is: in its threads a full disk ends in many pages of tracebacks.
            needed, free = sum(leaf.nbytes for leaf in filled.values()), shutil.disk_usage(self.folder).free
            if needed > free:
                raise OSError(errno.ENOSPC, f"it takes {needed:,} bytes and {free:,} are free")
            partial.mkdir()

        def write() -> None:
            if filled:
                with _silent():
                    _orbax().save(partial / "arrays", filled)

        def complete() -> None:
            if filled:
                _require_readable(partial / "arrays", filled)
            content = {
                "round": round,
                "meta": meta,
                "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
                "files": {str(path.relative_to(partial)): _checksum(path) for path in _files(partial)},
            }
            manifest = {"content": content, "checksum": _seal(content)}
            (partial / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            # Every process's TensorStore has synced its own files, but nobody the others, the manifest and the names.
            files.sync_tree(partial)
            self._set_aside(round)
            partial.rename(self.folder / str(round))
            files.sync(self.folder)
            known = [each for each in self.rounds() if each <= round]
            kept = {*known[-self.keep :], *(each for each in known if each in also)}
            for each in set(self.rounds()) - kept:
                self._set_aside(each)
            self._sweep()

        try:
            self.processes.on_first(lambda: self._told(prepare))
            self.processes.together(lambda: self._told(write))
            self.processes.on_first(lambda: self._told(complete))
        except UserError:
            if self.processes.writes:  # half a checkpoint would keep a full disk full
                _remove_under_way(partial)
            raise

    def _saveable(self, leaf: Any) -> Any:
        """Return a leaf for orbax: one process writes it whole, of several each writes its own part."""
        return _host(leaf) if self.processes.count == 1 or not isinstance(leaf, jax.Array) else leaf

    def _told(self, function: Callable[[], None]) -> None:
        try:
            function()
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else _system_error(error)
            if reason is None:
                raise
            raise UserError(f"cannot write a checkpoint into {self.folder} ({reason})") from error

    def _set_aside(self, round: int) -> None:
        """Rename a checkpoint before it is removed, so that no half of it is ever taken for a whole one."""
        folder = self.folder / str(round)
        if folder.exists():
            folder.rename(self.folder / f"{_DISCARDED}{round}")

    def _sweep(self) -> None:
        for leftover in self.folder.iterdir():
            if _LEFTOVER.fullmatch(leftover.name):  # other names are not ours to remove
                shutil.rmtree(leftover)

    def newest_whole(self) -> tuple[int, list[str]]:
        """Return the newest round whose checkpoint is whole, and a line on each damaged one that is newer.

        Damaged ones are renamed ``damaged-ROUND``: kept, but never read again. All processes get the same answer.

        Raises:
          UserError: there is no whole checkpoint, and none was renamed; or one cannot be renamed.
        """

        def find() -> tuple[int, list[str]]:
            damaged: dict[int, str] = {}
            for round in reversed(self._numbered()):
                try:
                    _verified(self.folder / str(round))
                except _DamageError as damage:
                    damaged[round] = str(damage)
                else:
                    aside = {each: self._keep_aside(each) for each in damaged}
                    return round, [
                        f"checkpoint {self.folder / str(each)} is damaged ({damaged[each]}) and kept as {aside[each]}"
                        for each in damaged
                    ]
            if not damaged:
                raise UserError(f"{self.folder} holds no checkpoint")
            reasons = "; ".join(f"{round}: {reason}" for round, reason in damaged.items())
            raise UserError(f"all checkpoints in {self.folder} are damaged ({reasons}): start anew with --overwrite")

        round, notes = self.processes.on_first(find)
        return round, notes

    def _keep_aside(self, round: int) -> str:
        """Rename a damaged checkpoint and return its new name."""
        name = f"{_DAMAGED}{round}"
        for number in itertools.count(2):
            if not (self.folder / name).exists():
                break
            name = f"{_DAMAGED}{round}-{number}"
        try:
            (self.folder / str(round)).rename(self.folder / name)
            files.sync(self.folder)
        except OSError as error:
            raise UserError(f"cannot keep the damaged checkpoint as {self.folder / name} ({error.strerror})") from None
        return name

    def restore(self, template: Any, round: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the tree and the meta dictionary of a checkpoint, bit for bit as saved.

        Args:
          template: a tree of arrays with the structure, shapes and dtypes that are expected; a
            ``jax.ShapeDtypeStruct`` will do for all but typed keys.
          round: which checkpoint; None takes the newest.

        Returns:
          A tree like the template with NumPy leaves (typed keys as such), and the dictionary that was saved with it.

        Raises:
          UserError: there is no such checkpoint, it is damaged, or it does not fit the template.
        """
        rounds = self.rounds()
        if not rounds or (round is not None and round not in rounds):
            wanted = "no checkpoint" if round is None else f"no checkpoint of round {round}"
            raise UserError(f"{self.folder} holds {wanted} (rounds there: {', '.join(map(str, rounds)) or 'none'})")
        round = rounds[-1] if round is None else round
        folder = self.folder / str(round)
        try:
            content = _verified(folder)
            expected = _named(template)
            _compare(folder, {name: _describe(leaf) for name, leaf in expected.items()}, content["leaves"])
            blank = {name: np.empty(_data_shape(leaf), _data_dtype(leaf)) for name, leaf in expected.items()}
            filled = {name: leaf for name, leaf in blank.items() if leaf.size}
            saved = {**blank, **(_arrays(folder / "arrays", filled) if filled else {})}
        except _DamageError as damage:
            remedy = "--resume goes on from the previous checkpoint"
            if round == rounds[0]:
                remedy = "there is no earlier one, so start anew"
            raise UserError(f"checkpoint {folder} is damaged ({damage}): {remedy}") from None
        leaves = [_typed(saved[name], leaf) for name, leaf in expected.items()]
        return jax.tree.unflatten(jax.tree.structure(template), leaves), content["meta"]


def _arrays(folder: Path, filled: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint, given some of the same shapes and dtypes."""
    try:
        return _orbax().restore(folder, filled)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamageError(f"orbax cannot read it: {' '.join(str(error).split())[:200]}") from None


def save_arrays(folder: Path, tree: Any) -> None:
    """Write a tree of arrays as ``orbax.checkpoint.StandardCheckpointer().restore(folder)`` reads it.

    Raises:
      OSError: it cannot be written.
    """
    try:
        with _silent():
            _orbax().save(folder.absolute(), jax.tree.map(_host, tree))
    except ValueError as error:
        raise OSError(errno.EIO, _system_error(error) or str(error)) from None
    files.sync_tree(folder)


def _require_readable(arrays: Path, saved: dict[str, Any]) -> None:
    """Ask orbax what it has written, before an older checkpoint is given up for it.

    Raises:
      OSError: not everything can be found; orbax itself only warns where it leaves a checkpoint in pieces.
    """
    found = _orbax().metadata(arrays).item_metadata
    if found is None or set(found.tree) != set(saved):
        raise OSError("orbax cannot read what it has written")


def _system_error(error: ValueError) -> str | None:
    """Return the system's words where TensorStore failed to write, of which it tells by a ValueError; else None."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(found[1])) if found else None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep orbax and TensorStore from printing a failure in their threads, which `Checkpoints.save` reports."""
    log, tasks, hook = logging.getLogger("absl"), logging.getLogger("asyncio"), sys.unraisablehook

    def unless_reported(record: logging.LogRecord) -> bool:
        """Leave out tasks that failed as the write did: asyncio tells of those that nobody asked."""
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, ValueError) and _system_error(error))

    def unless_late(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    disabled, log.disabled, sys.unraisablehook = log.disabled, True, unless_late
    tasks.addFilter(unless_reported)
    try:
        yield
        # Not after a failure: other threads and tasks then end later than the loop that has it.
        sys.unraisablehook = hook
        tasks.removeFilter(unless_reported)
    finally:
        log.disabled = disabled


def _remove_under_way(folder: Path) -> None:
    """Remove a folder, if possible, although TensorStore's threads go on to write into it for a moment."""
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
        if not folder.exists():
            return


class _DamageError(Exception):
    """A checkpoint is not what was written."""


@functools.cache
def _orbax() -> Any:
    """Return orbax's synchronous checkpointer; the import takes half a second, so it waits until it is needed."""
    import orbax.checkpoint

    return orbax.checkpoint.Checkpointer(orbax.checkpoint.StandardCheckpointHandler())


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves by path, such as ``state/models/params/conv1/kernel``, in the order of ``jax.tree.leaves``."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/") or "tree": leaf for path, leaf in paths}
    if len(named) < len(paths):
        raise ValueError("two leaves of the tree have the same path")
    return {name: leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for name, leaf in named.items()}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _host(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _data_shape(leaf: Any) -> tuple[int, ...]:
    return jax.eval_shape(jax.random.key_data, leaf).shape if _is_key(leaf) else leaf.shape


def _data_dtype(leaf: Any) -> np.dtype:
    return np.dtype(np.uint32) if _is_key(leaf) else leaf.dtype


def _typed(data: np.ndarray, like: Any) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(like)) if _is_key(like) else data


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _compare(folder: Path, expected: dict[str, str], saved: dict[str, str]) -> None:
    for name in (*expected, *saved):
        here, there = expected.get(name, "missing"), saved.get(name, "missing")
        if here != there:
            raise UserError(f"checkpoint {folder} does not fit this run: {name} is {there} there and {here} here")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _checksum(path: Path) -> int:
    if path.exists() and not path.is_file():  # a named pipe has no end
        raise _DamageError(f"{path.name} is not a file")
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _seal(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the content of the manifest after checking it."""
    try:
        manifest = files.parse_json(files.read_text(folder / MANIFEST))
        content = manifest["content"]
        if manifest["checksum"] != _seal(content):
            raise _DamageError(f"{MANIFEST} was changed")
        if missing := [name for name in ("meta", "leaves", "files") if not isinstance(content.get(name), dict)]:
            raise _DamageError(f"{MANIFEST} has no {' and no '.join(missing)}")
        if str(content.get("round")) != folder.name:
            raise _DamageError(f"it is the checkpoint of round {content.get('round')}")
        return content
    except FileNotFoundError:
        raise _DamageError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _DamageError(f"{MANIFEST} cannot be read: {' '.join(str(error).split())}") from None


def _verified(folder: Path) -> dict[str, Any]:
    """Return the content of the manifest after checking it and every file that it names."""
    content = _manifest(folder)
    try:
        for name, checksum in content["files"].items():
            if _checksum(folder / name) != checksum:
                raise _DamageError(f"{name} was changed")
    except FileNotFoundError as error:
        raise _DamageError(f"{os.path.relpath(error.filename, folder)} is missing") from None
    except (OSError, ValueError) as error:
        raise _DamageError(f"{name} cannot be read: {' '.join(str(error).split())}") from None
    return content
