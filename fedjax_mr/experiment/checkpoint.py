"""Checkpoints: the state that the next round needs, written by orbax and verified when it is read.

Fills: orbax has no fallback to an older checkpoint.

A checkpoint is the folder ``ROUND`` with orbax's files and their `manifest`. It is written under a
temporary name and renamed after all of it has reached the disk. Older checkpoints are removed after that. So the
process may be killed, or the power may fail, at any moment.
"""

import contextlib
import errno
import functools
import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import files
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.processes import ALONE, Processes
from fedjax_mr.models import Model, parts
from fedjax_mr.results import manifest
from fedjax_mr.results.manifest import MANIFEST, DamageError

SCHEMA = {"round": int, "meta": dict, "leaves": {str: str}}  # of a manifest, beside its files
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what orbax raises for damaged files
_PARTIAL, _DISCARDED, _DAMAGED = ".partial-", ".discarded-", "damaged-"
_ROUND = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)
_OURS = re.compile(rf"({re.escape(_PARTIAL)}|{re.escape(_DISCARDED)}|{_DAMAGED})?\d+(-\d+)?", re.ASCII)
_LEFTOVER = re.compile(rf"({re.escape(_PARTIAL)}|{re.escape(_DISCARDED)})\d+", re.ASCII)


class Checkpoints:
    """The checkpoints of a run.

    Attributes:
      folder: contains one folder per checkpoint, named by its round. Created by the first `save`.
      keep: number of newest checkpoints to keep.
      processes: the processes that save and restore together. All of them see the same folder.
    """

    def __init__(self, folder: Path | str, *, keep: int = 2, processes: Processes = ALONE):
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.processes = processes

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, ascending. Damage is detected only when a checkpoint is read."""
        return [round for round in self._numbered() if (self.folder / str(round) / MANIFEST).exists()]

    def _numbered(self) -> list[int]:
        """The folder names that are numbers, ascending."""
        names = (path.name for path in self.folder.glob("*/"))
        return sorted(int(name) for name in names if _ROUND.fullmatch(name))

    def has_nothing_else(self) -> bool:
        """Whether all names in the folder are names of checkpoints, complete or not."""
        return self.folder.is_dir() and all(_OURS.fullmatch(path.name) for path in self.folder.iterdir())

    def latest(self) -> int | None:
        """The newest round that has a checkpoint, or None."""
        return max(self.rounds(), default=None)

    def meta(self, round: int) -> dict[str, Any]:
        """The dictionary that was saved with a checkpoint, or {} if it is damaged. The arrays are not read."""
        try:
            return _content(self.folder / str(round))["meta"]
        except DamageError:
            return {}

    def kept_memories(self, round: int | None = None) -> int | None:
        """The number of clients whose memory a checkpoint holds, or None if it holds those of all clients.

        Args:
          round: round of the checkpoint. Default: the newest.
        """
        round = self.latest() if round is None else round
        return None if round is None else self.meta(round).get("memories")

    def save(self, round: int, tree: Any, meta: dict[str, Any], *, also: Collection[int] = ()) -> None:
        """Write a checkpoint to the disk, then remove all but the newest ``keep``.

        A checkpoint of the same round is replaced. Those of later rounds belong to an abandoned history and are
        removed.

        Args:
          round: number of rounds trained.
          tree: a pytree of arrays (dicts, NamedTuples, tuples, None).
          meta: a small dictionary that JSON can represent.
          also: earlier rounds whose checkpoints are kept regardless of their age.

        Raises:
          UserError: the disk is full, the folder cannot be written, or orbax cannot read the new checkpoint. Older
            checkpoints are kept in this case.
        """
        leaves = _named(tree)
        partial = self.folder / f"{_PARTIAL}{round}"
        filled = {name: self._saveable(leaf) for name, leaf in leaves.items() if leaf.size}  # orbax refuses empty ones

        def prepare() -> None:
            if not self.folder.is_dir():
                self.folder.mkdir()  # without parents, so a removed run folder is not created again
                files.sync(self.folder.parent)
            self._sweep()
            # Checked before orbax writes, because its threads would answer a full disk with pages of tracebacks.
            needed, free = sum(leaf.nbytes for leaf in filled.values()), shutil.disk_usage(self.folder).free
            if needed > free:
                raise OSError(errno.ENOSPC, f"it takes {needed:,} bytes and {free:,} are free")
            partial.mkdir()

        def write() -> None:
            if filled:
                with _without_logs():
                    _orbax().save(partial / "arrays", filled)

        def complete() -> None:
            if filled:
                _require_readable(partial / "arrays", filled)
            text = manifest.text_of(
                manifest.checksums(partial),
                round=round,
                meta=meta,
                leaves={name: _describe(leaf) for name, leaf in leaves.items()},
            )
            (partial / MANIFEST).write_text(text, encoding="utf-8")
            # Each process's TensorStore has synced its own files, but not the manifest and the names.
            files.sync_tree(partial)
            self._discard(round)
            partial.rename(self.folder / str(round))
            files.sync(self.folder)
            known = [each for each in self.rounds() if each <= round]
            kept = {*known[-self.keep :], *(each for each in known if each in also)}
            for each in set(self.rounds()) - kept:
                self._discard(each)
            self._sweep()

        try:
            self.processes.on_first(lambda: self._in_one_line(prepare))
            self.processes.together(lambda: self._in_one_line(write))
            self.processes.on_first(lambda: self._in_one_line(complete))
        except UserError:
            if self.processes.writes:  # an incomplete checkpoint would keep a full disk full
                _remove_incomplete(partial)
            raise

    def _saveable(self, leaf: Any) -> Any:
        """A leaf for orbax. A single process writes all of it; each of several processes writes its own part."""
        return _host(leaf) if self.processes.count == 1 or not isinstance(leaf, jax.Array) else leaf

    def _in_one_line(self, function: Callable[[], None]) -> None:
        try:
            function()
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else _system_error(error)
            if reason is None:
                raise
            raise UserError(f"cannot write a checkpoint into {self.folder} ({reason})") from error

    def _discard(self, round: int) -> None:
        """Rename a checkpoint, so it is not taken for a complete one while `_sweep` removes it."""
        folder = self.folder / str(round)
        if folder.exists():
            folder.rename(self.folder / f"{_DISCARDED}{round}")

    def _sweep(self) -> None:
        for leftover in self.folder.iterdir():
            if _LEFTOVER.fullmatch(leftover.name):  # other files belong to the user
                shutil.rmtree(leftover)

    def newest_intact(self) -> tuple[int, list[str]]:
        """Find the newest intact checkpoint; return its round and a line about each damaged checkpoint that is newer.

        Damaged checkpoints are renamed ``damaged-ROUND``; they are kept, but not read again. All processes get the
        same result.

        Raises:
          UserError: there is no intact checkpoint (then none is renamed), or a damaged one cannot be renamed.
        """

        def find() -> tuple[int, list[str]]:
            damaged: dict[int, str] = {}
            for round in reversed(self._numbered()):
                try:
                    _verified(self.folder / str(round))
                except DamageError as damage:
                    damaged[round] = str(damage)
                else:
                    names = {each: self._rename_damaged(each) for each in damaged}
                    return round, [
                        f"checkpoint {self.folder / str(each)} is damaged ({damaged[each]}) and kept as {names[each]}"
                        for each in damaged
                    ]
            if not damaged:
                raise UserError(f"{self.folder} holds no checkpoint")
            reasons = "; ".join(f"{round}: {reason}" for round, reason in damaged.items())
            raise UserError(f"all checkpoints in {self.folder} are damaged ({reasons}): start anew with --overwrite")

        round, notes = self.processes.on_first(find)
        return round, notes

    def _rename_damaged(self, round: int) -> str:
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

    def require(self, round: int | None = None) -> int:
        """Return the round of a checkpoint that exists. Default: the newest.

        Raises:
          UserError: it does not exist.
        """
        rounds = self.rounds()
        if not rounds or (round is not None and round not in rounds):
            wanted = "no checkpoint" if round is None else f"no checkpoint of round {round}"
            raise UserError(f"{self.folder} holds {wanted} (rounds there: {', '.join(map(str, rounds)) or 'none'})")
        return rounds[-1] if round is None else round

    def restore(self, template: Any, round: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Read a checkpoint, bit for bit as saved.

        Args:
          template: a tree with the expected structure, shapes and dtypes. Leaves may be ``jax.ShapeDtypeStruct``,
            except for typed keys.
          round: round of the checkpoint. Default: the newest.

        Returns:
          A tree like the template with NumPy leaves (typed keys stay typed), and the dictionary that was saved with it.

        Raises:
          UserError: the checkpoint does not exist, is damaged, or does not fit the template.
        """
        round = self.require(round)
        folder = self.folder / str(round)
        try:
            content = _verified(folder)
            expected = _named(template)
            _compare(folder, {name: _describe(leaf) for name, leaf in expected.items()}, content["leaves"])
            blank = {name: _blank(leaf) for name, leaf in expected.items()}
            filled = {name: leaf for name, leaf in blank.items() if leaf.size}
            saved = {**blank, **(_arrays(folder / "arrays", filled) if filled else {})}
        except DamageError as damage:
            remedy = "--resume continues from the previous checkpoint"
            if round == self.rounds()[0]:
                remedy = "there is no earlier one, so start anew"
            raise UserError(f"checkpoint {folder} is damaged ({damage}): {remedy}") from None
        leaves = [_typed(saved[name], leaf) for name, leaf in expected.items()]
        return jax.tree.unflatten(jax.tree.structure(template), leaves), content["meta"]

    def restore_run(self, template: Any, round: int | None = None, *, model: Model) -> tuple[Any, dict[str, Any]]:
        """Read a checkpoint of a run as `restore` does, and check the frozen variables, which it does not hold.

        Args:
          template: see `restore`.
          round: see `restore`.
          model: the network of the run, with the frozen variables as they are now.

        Raises:
          UserError: as `restore`, or the frozen variables have changed since the run was trained.
        """
        tree, meta = self.restore(template, round)
        known = frozen_digest(model)
        if meta.get("frozen", known) != known:
            raise UserError(
                f"{self.folder.parent} was trained with other frozen variables of {model.name}: put back the weights "
                "that it started from (the folder of pretrained=, or variables=)"
            )
        return tree, meta


def frozen_digest(model: Model) -> str | None:
    """A hash of the frozen variables of a network, or None if all of them train."""
    return parts.digest(model.frozen)[:16] if model.frozen else None


def _arrays(folder: Path, filled: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Read the arrays of a checkpoint; ``filled`` has the same shapes and dtypes."""
    try:
        return _orbax().restore(folder, filled)
    except _UNREADABLE as error:
        raise DamageError(f"orbax cannot read it: {' '.join(str(error).split())[:200]}") from None


def save_arrays(folder: Path, tree: Any) -> None:
    """Write a tree of arrays in the format that ``orbax.checkpoint.StandardCheckpointer().restore(folder)`` reads.

    Raises:
      OSError: the folder cannot be written.
    """
    try:
        with _without_logs():
            _orbax().save(folder.absolute(), jax.tree.map(_host, tree))
    except ValueError as error:
        raise OSError(errno.EIO, _system_error(error) or str(error)) from None
    files.sync_tree(folder)


def read_arrays(folder: Path) -> Any:
    """Read what `save_arrays` has written: a tree of NumPy arrays.

    Raises:
      UserError: the folder is missing or damaged.
    """
    for path in folder.rglob("*"):  # reading a link to a device, or a named pipe, may never end
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is not a file, as all of {folder} must be")
    try:
        return jax.tree.map(np.asarray, _orbax().restore(folder.absolute()))
    except _UNREADABLE as error:
        raise UserError(f"{folder} cannot be read ({' '.join(str(error).split())[:120]})") from None


def _require_readable(arrays: Path, saved: dict[str, Any]) -> None:
    """Check that orbax finds all arrays that it has written, before an older checkpoint is removed.

    Raises:
      OSError: an array is missing. Orbax itself only warns if it cannot merge the parts of a checkpoint.
    """
    written = _orbax().metadata(arrays).item_metadata
    if written is None or set(written.tree) != set(saved):
        raise OSError("orbax cannot read what it has written")


def _system_error(error: BaseException | None) -> str | None:
    """The system's message if TensorStore failed to write, which it reports as a ValueError; otherwise None."""
    code = re.search(r"os_error_code='(\d+)'", str(error)) if isinstance(error, ValueError) else None
    return os.strerror(int(code[1])) if code else None


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Keep orbax from logging a failure, because `Checkpoints.save` reports it."""
    log = logging.getLogger("absl")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


def _is_not_reported(record: logging.LogRecord) -> bool:
    """Filter of asyncio's log, where further arrays that could not be written appear after the first one has failed."""
    return _system_error(record.exc_info[1] if record.exc_info else None) is None


def _remove_incomplete(folder: Path) -> None:
    """Try for two seconds to remove a folder into which TensorStore's threads may still write."""
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
        if not folder.exists():
            return


def import_ahead() -> None:
    """Import orbax, which the first `Checkpoints.save` would do otherwise."""
    _orbax()


@functools.cache
def _orbax() -> Any:
    """Orbax's synchronous checkpointer, imported on first use because that takes half a second."""
    import orbax.checkpoint

    logging.getLogger("asyncio").addFilter(_is_not_reported)

    return orbax.checkpoint.Checkpointer(orbax.checkpoint.StandardCheckpointHandler())


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by path, such as ``state/models/params/conv1/kernel``, in the order of ``jax.tree.leaves``."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/") or "tree": leaf for path, leaf in paths}
    if len(named) < len(paths):
        raise ValueError("two leaves of the tree have the same path")
    return {name: leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for name, leaf in named.items()}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _host(leaf: Any) -> np.ndarray:
    # If memory does not suffice, waiting raises an error, whereas `np.asarray` alone waits without end.
    leaf = jax.block_until_ready(leaf)
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _blank(leaf: Any) -> np.ndarray:
    """An array with the shape and the dtype of the data of a leaf."""
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return np.empty(data.shape, data.dtype)


def _typed(data: np.ndarray, like: Any) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(like)) if _is_key(like) else data


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _compare(folder: Path, expected: dict[str, str], saved: dict[str, str]) -> None:
    for name in (*expected, *saved):
        here, there = expected.get(name, "missing"), saved.get(name, "missing")
        if here != there:
            raise UserError(f"checkpoint {folder} does not fit this run: {name} is {there} there and {here} here")


def _content(folder: Path) -> dict[str, Any]:
    """Read and check the manifest.

    Raises:
      DamageError: it is missing, damaged, or of another checkpoint.
    """
    content = manifest.read(folder, SCHEMA)
    if str(content["round"]) != folder.name:
        raise DamageError(f"it is the checkpoint of round {content['round']}")
    return content


def _verified(folder: Path) -> dict[str, Any]:
    """Read and check the manifest and all files that it names.

    Raises:
      DamageError: one of them is missing or damaged.
    """
    content = _content(folder)
    for name in content["files"]:
        if reason := manifest.fault(folder, content, name):
            raise DamageError(f"{name} {reason}")
    return content
