"""Checkpoints come back bit for bit, survive a kill at any moment, and are never believed when damaged."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fedjax_mr import files
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import checkpoint
from fedjax_mr.experiment.checkpoint import MANIFEST, Checkpoints
from fedjax_mr.results import manifest


class State(NamedTuple):
    models: dict
    memory: object = None


def state(round=0):
    """Return a small state whose every number depends on the round."""
    return State({"params": {"dense": {"kernel": jnp.full((2, 3), round, jnp.float32), "bias": jnp.full(3, round)}}})


def error_of(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bits_dtypes_and_structure_come_back(tmp_path):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, (4, 12), np.uint8)  # among them NaNs with payloads, infinities and subnormals
    tree = {
        "float32": jnp.asarray(bits.view(np.float32)),
        "bfloat16": bits.view(ml_dtypes.bfloat16),
        "float16": bits.view(np.float16),
        "float64": rng.normal(size=3),
        "integers": [bits, bits.view(np.int32), bits.view(np.uint32), np.array(2**40)],
        "flags": np.array([True, False]),
        "scalar": jnp.float32(-0.0),
        "python": 7,
        "empty": np.zeros((0, 3), np.float32),
        "nothing": (None, {}, ()),
        "named": State({"a b/c.d [0] ü": np.arange(3)}),
        "key": jax.random.key(5),
    }
    meta = {"round": 3, "seconds": 0.1, "name": "é", "list": [1, None, True]}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(3, tree, meta)
    restored, restored_meta = Checkpoints(tmp_path / "checkpoints").restore(tree)
    assert restored_meta == meta
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    key, original_key = restored.pop("key"), tree.pop("key")
    assert key.dtype == original_key.dtype and (jax.random.key_data(key) == jax.random.key_data(original_key)).all()
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        theirs = np.asarray(theirs)
        assert isinstance(ours, np.ndarray)
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def test_sharded_arrays_are_saved_whole(tmp_path):
    mesh = jax.make_mesh((2,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.device_put(jnp.arange(8.0).reshape(4, 2), jax.NamedSharding(mesh, jax.P("clients")))
    Checkpoints(tmp_path).save(0, {"rows": rows}, {})
    restored, _ = Checkpoints(tmp_path).restore({"rows": jax.ShapeDtypeStruct((4, 2), jnp.float32)})
    np.testing.assert_array_equal(restored["rows"], np.arange(8.0).reshape(4, 2))


def test_a_tree_without_numbers(tmp_path):
    Checkpoints(tmp_path).save(0, {"nothing": None}, {"a": 1})
    assert Checkpoints(tmp_path).restore({"nothing": None}) == ({"nothing": None}, {"a": 1})


def test_the_newest_two_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none yet")
    assert checkpoints.rounds() == [] and checkpoints.latest() is None
    for round in (0, 5, 10):
        checkpoints.save(round, state(round), {"round": round})
    assert checkpoints.rounds() == [5, 10] and checkpoints.latest() == 10
    for round in (5, 10):
        tree, meta = checkpoints.restore(state(), round)
        assert meta == {"round": round} and (tree.models["params"]["dense"]["kernel"] == round).all()
    assert checkpoints.restore(state())[1] == {"round": 10}
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["10", "5"]


def test_saving_again_replaces_and_later_rounds_go(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for round in (1, 2, 3):
        checkpoints.save(round, state(round), {})
    checkpoints.save(2, state(20), {"again": True})
    assert checkpoints.rounds() == [1, 2]
    tree, meta = checkpoints.restore(state())
    assert meta == {"again": True} and (tree.models["params"]["dense"]["bias"] == 20).all()


def test_nothing_is_printed(tmp_path, capfd):
    Checkpoints(tmp_path).save(0, state(), {})
    Checkpoints(tmp_path).restore(state())
    assert capfd.readouterr() == ("", "")


# --- Half-written ----------------------------------------------------------------------------------------------------

WRITER = """
import sys
import numpy as np
from fedjax_mr.experiment.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1])
for round in range(1, 1_000_000):
    checkpoints.save(round, {str(i): np.full(20_000, round) for i in range(4)}, {"round": round})
"""


def kill_a_writer(folder, *, after, delay):
    """Let another process write checkpoints as fast as it can and kill it ``delay`` seconds after round ``after``."""
    checkpoints, deadline = Checkpoints(folder), time.monotonic() + 120
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], env=os.environ | {"JAX_PLATFORMS": "cpu"})
    try:
        while (checkpoints.latest() or 0) < after:
            assert writer.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(delay)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()


def check_after_a_kill(folder, *, after):
    checkpoints = Checkpoints(folder)
    template = {str(i): np.zeros(20_000, int) for i in range(4)}
    assert checkpoints.latest() >= after
    for round in checkpoints.rounds():
        tree, meta = checkpoints.restore(template, round)
        assert meta == {"round": round}
        assert all((leaf == round).all() for leaf in tree.values())
    newest = checkpoints.latest()
    checkpoints.save(newest + 1, template, {})
    assert checkpoints.latest() == newest + 1
    assert all(path.name.isdecimal() for path in checkpoints.folder.iterdir())  # nothing half-written is left over


@pytest.mark.slow  # quick: test_death_at_every_step
def test_kill_while_writing(tmp_path):
    kill_a_writer(tmp_path, after=3, delay=random.uniform(0, 0.05))
    check_after_a_kill(tmp_path, after=3)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(12))
def test_kill_while_writing_many_times(tmp_path, trial):
    kill_a_writer(tmp_path, after=2, delay=0.005 * trial)
    check_after_a_kill(tmp_path, after=2)


class Death(BaseException):
    """Stands for a process that stops at once."""


# Every step that changes the disk in the course of a save that also replaces and discards.
STEPS = [(Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (shutil, "rmtree")]


@pytest.mark.parametrize(("owner", "name"), STEPS)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("saved", [2, 3])  # a checkpoint again, and a new one
def test_death_at_every_step(tmp_path, monkeypatch, owner, name, before, call, saved):
    checkpoints, calls = Checkpoints(tmp_path), 0
    for round in (1, 2):
        checkpoints.save(round, state(round), {})
    original = getattr(owner, name)

    def die(*arguments, **options):
        nonlocal calls
        if Path(arguments[0]).is_relative_to(tmp_path):  # not orbax's own use of the function elsewhere
            calls += 1
        if calls == call and before:
            raise Death
        result = original(*arguments, **options)
        if calls == call:
            raise Death
        return result

    monkeypatch.setattr(owner, name, die)
    with contextlib.suppress(Death):
        checkpoints.save(saved, state(saved), {})
    monkeypatch.undo()
    assert calls >= call or call > 1  # every kind of step was met at least once
    rounds = checkpoints.rounds()
    assert rounds and rounds[-1] >= saved - 1
    for round in rounds:
        tree, _ = checkpoints.restore(state(), round)
        assert (tree.models["params"]["dense"]["kernel"] == round).all()
    checkpoints.save(4, state(4), {})
    assert checkpoints.latest() == 4 and len(list(tmp_path.iterdir())) == 2


def test_partial_folders_are_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, state(5), {})
    for name in ("6", ".partial-7", "8.orbax-checkpoint-tmp", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("half")
    shutil.copytree(
        tmp_path / "5" / "arrays", tmp_path / "9" / "arrays"
    )  # what orbax calls whole, without our manifest
    shutil.copytree(tmp_path / "5", tmp_path / ".discarded-10")
    assert checkpoints.rounds() == [5]
    assert checkpoints.restore(state())[0].models["params"]["dense"]["bias"].max() == 5


def test_an_interrupted_replacement_of_a_planted_folder(tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "junk").write_text("half")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state(3), {})
    assert checkpoints.rounds() == [3] and not (tmp_path / "3" / "junk").exists()


# --- Damaged ---------------------------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for round in (1, 2):
        Checkpoints(folder).save(round, state(round), {"round": round})
    return folder


@pytest.mark.parametrize("damage", [flip, truncate, empty, Path.unlink])
def test_damage_to_any_file_is_found(two_checkpoints, tmp_path, damage):
    files = [path.relative_to(two_checkpoints) for path in (two_checkpoints / "2").rglob("*") if path.is_file()]
    assert len(files) > 5
    for name in files:
        folder = tmp_path / "copy"
        shutil.copytree(two_checkpoints, folder)
        damage(folder / name)
        if name.name == MANIFEST and damage is Path.unlink:
            assert Checkpoints(folder).rounds() == [1]  # without a manifest it never was a checkpoint
        else:
            message = error_of(Checkpoints(folder).restore, state())
            assert f"{folder / '2'} is damaged" in message
            assert str(name.relative_to("2")) in message
            assert "--resume continues from the previous checkpoint" in message
            shutil.rmtree(folder / "2")
        assert Checkpoints(folder).restore(state())[1] == {"round": 1}
        shutil.rmtree(folder)


def test_every_byte_of_the_manifest_counts(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints / "2", tmp_path / "2")
    manifest = folder / MANIFEST
    data, rng = manifest.read_bytes(), random.Random(0)
    for position in rng.sample(range(len(data)), 150):
        changed = bytearray(data)
        changed[position] ^= 1 << rng.randrange(8)
        manifest.write_bytes(changed)
        error_of(Checkpoints(tmp_path).restore, state())


def test_damage_without_an_earlier_checkpoint(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints / "2", tmp_path / "2")
    flip(folder / MANIFEST)
    assert "there is no earlier one" in error_of(Checkpoints(tmp_path).restore, state())


def reseal(path, change):
    """Change the content of a manifest as somebody would who forges its checksum too."""
    content = json.loads(path.read_text())["content"]
    change(content)
    path.write_text(manifest.text_of(**content))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder_instead(path):
    path.unlink()
    path.mkdir()


def an_array(manifest):
    return next(path for path in sorted((manifest.parent / "arrays").rglob("*")) if path.parent.name == "d")


DAMAGES = {  # of a checkpoint with this manifest -> the reason that is given
    "an empty manifest, as a power failure leaves it": (empty, "manifest.json cannot be read"),
    "no manifest": (Path.unlink, "manifest.json is missing"),
    "a manifest without meta": (
        lambda path: reseal(path, lambda content: content.pop("meta")),
        "content.meta is missing",
    ),
    "leaves of another kind": (
        lambda path: reseal(path, lambda content: content.update(leaves=[])),
        "content.leaves is",
    ),
    "a manifest of another kind": (lambda path: path.write_text("[1]"), "manifest.json cannot be read"),
    "content of another kind": (lambda path: path.write_text('{"content": 1, "checksum": 1}'), "content is 1"),
    "a deeply nested manifest": (lambda path: path.write_text("[" * 200_000), "nested too deeply"),
    "a pipe as manifest": (pipe, "it is not a file"),
    "a folder as manifest": (folder_instead, "it is not a file"),
    "an array cut short": (lambda path: truncate(an_array(path)), "was changed"),
    "a pipe as array": (lambda path: pipe(an_array(path)), "is not a file"),
    "a checksum of another kind": (
        lambda path: reseal(path, lambda content: content["files"].update(x="y")),
        "files.x is 'y', not a whole number",
    ),
    "no arrays": (lambda path: shutil.rmtree(path.parent / "arrays"), "is missing"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_newest_checkpoint_is_kept_aside(two_checkpoints, tmp_path, case):
    damage, reason = DAMAGES[case]
    folder = Path(shutil.copytree(two_checkpoints, tmp_path / "copy"))
    damage(folder / "2" / MANIFEST)
    held = sorted(path.relative_to(folder / "2") for path in (folder / "2").rglob("*"))
    round, (note,) = Checkpoints(folder).newest_intact()
    assert round == 1 and "\n" not in note
    assert f"{folder / '2'} is damaged (" in note and reason in note and "kept as damaged-2" in note
    assert Checkpoints(folder).rounds() == [1] and Checkpoints(folder).newest_intact() == (1, [])
    assert sorted(path.relative_to(folder / "damaged-2") for path in (folder / "damaged-2").rglob("*")) == held


def test_every_damaged_checkpoint_stays(two_checkpoints, tmp_path):
    folder = Path(shutil.copytree(two_checkpoints, tmp_path / "copy"))
    for name in ("damaged-2", "damaged-2-2", "damaged-2-3"):
        shutil.copytree(two_checkpoints / "2", folder / "2", dirs_exist_ok=True)
        truncate(folder / "2" / MANIFEST)
        assert name in Checkpoints(folder).newest_intact()[1][0]
    Checkpoints(folder, keep=1).save(3, state(3), {})
    names = ["3", "damaged-2", "damaged-2-2", "damaged-2-3"]
    assert sorted(path.name for path in folder.iterdir()) == names
    truncate(folder / "3" / MANIFEST)
    message = error_of(Checkpoints(folder).newest_intact)
    assert "all checkpoints in" in message and "start anew with --overwrite" in message
    assert sorted(path.name for path in folder.iterdir()) == names  # nothing to go on from, nothing to set aside
    assert "no checkpoint" in error_of(Checkpoints(tmp_path / "none").newest_intact)


def test_a_forged_manifest_of_no_files_is_one_line(two_checkpoints, tmp_path):
    folder = Path(shutil.copytree(two_checkpoints, tmp_path / "copy"))
    reseal(folder / "2" / MANIFEST, lambda content: content["files"].clear())
    shutil.rmtree(folder / "2" / "arrays")
    assert "orbax cannot read it" in error_of(Checkpoints(folder).restore, state())


# --- Not what was expected -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ({"a": np.zeros((2, 4), np.float32)}, ["a is float32[2,3] there and float32[2,4] here"]),
        ({"a": np.zeros((2, 3), np.float16)}, ["float32[2,3] there", "float16[2,3] here"]),
        ({"b": np.zeros((2, 3), np.float32)}, ["b is missing there"]),
        ({}, ["a is float32[2,3] there and missing here"]),
        ({"a": {"a": np.zeros((2, 3), np.float32)}}, ["a/a is missing there"]),
    ],
)
def test_another_shape_or_structure(tmp_path, template, parts):
    Checkpoints(tmp_path).save(4, {"a": np.zeros((2, 3), np.float32)}, {})
    message = error_of(Checkpoints(tmp_path).restore, template)
    for part in ("does not fit", str(tmp_path / "4"), *parts):
        assert part in message


def test_no_such_checkpoint(tmp_path):
    assert "no checkpoint" in error_of(Checkpoints(tmp_path / "nowhere").restore, state())
    Checkpoints(tmp_path).save(4, state(), {})
    assert "no checkpoint of round 5 (rounds there: 4)" in error_of(Checkpoints(tmp_path).restore, state(), 5)


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write a checkpoint" in error_of(Checkpoints(tmp_path / "file" / "checkpoints").save, 0, state(), {})


def test_two_leaves_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="same path"):
        Checkpoints(tmp_path).save(0, {"a/b": np.ones(1), "a": {"b": np.ones(1)}}, {})


@pytest.mark.parametrize("name", ["[seed=0]", "back\\slash", "what?", "star*"])
def test_what_orbax_leaves_in_pieces_is_noticed(tmp_path, name):
    """Orbax takes such signs for a pattern, finds no part to merge and only warns."""
    tree = {"a": np.arange(3.0, dtype=np.float32)}
    checkpoints = Checkpoints(tmp_path / name)
    try:
        checkpoints.save(1, tree, {})
    except UserError as error:
        assert "cannot write a checkpoint" in str(error)
        assert checkpoints.rounds() == []
    else:  # where it can be written it can be read
        np.testing.assert_array_equal(checkpoints.restore(tree)[0]["a"], tree["a"])


def test_tensorstores_full_disk_is_one_line(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"a": np.arange(3)}, {})

    class Full:
        def save(self, *args):
            raise ValueError(
                "RESOURCE_EXHAUSTED: Error writing local file: (much more) [os_error_code='28' (much more)]"
            )

    monkeypatch.setattr(checkpoint, "_orbax", Full)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device\)$"):
        checkpoints.save(2, {"a": np.arange(3)}, {})
    assert checkpoints.rounds() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]  # half a checkpoint would keep the disk full


def test_everything_is_on_the_disk_before_the_rename_and_that_before_the_older_goes(tmp_path, monkeypatch):
    checkpoints, events = Checkpoints(tmp_path, keep=1), []
    checkpoints.save(1, state(), {})

    def noted(owner, name, ordinary):
        def note(*arguments, **options):
            events.append((name, *(Path(each).relative_to(tmp_path).as_posix() for each in arguments)))
            return ordinary(*arguments, **options)

        monkeypatch.setattr(owner, name, note)

    noted(files, "sync", files.sync)
    noted(checkpoint.shutil, "rmtree", shutil.rmtree)
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda old, new: (events.append(("rename", old.name, new.name)), rename(old, new))
    )
    checkpoints.save(2, state(2), {})
    monkeypatch.undo()
    renamed = events.index(("rename", ".partial-2", "2"))
    synced = {name for _, name, *_ in events[:renamed] if name.startswith(".partial-2")}
    there = {(Path(".partial-2") / path.relative_to(tmp_path / "2")).as_posix() for path in (tmp_path / "2").rglob("*")}
    assert synced == there | {".partial-2"}
    assert events[renamed + 1 :] == [("sync", "."), ("rename", "1", ".discarded-1"), ("rmtree", ".discarded-1")]


# --- Disks that fill and limits of file size, for the real writers ---------------------------------------------------

LIMITED = """
import resource, sys
import numpy as np
from fedjax_mr.errors import UserError
from fedjax_mr.terminal import interrupts
from fedjax_mr.experiment.checkpoint import Checkpoints, shutil

folder, limit, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
plenty = shutil._ntuple_diskusage(10**12, 0, 10**12)  # the disk fills after it was asked
shutil.disk_usage = lambda path: plenty
tree = lambda round: {str(i): np.random.default_rng(round).normal(size=5_000) for i in range(8)}
checkpoints = Checkpoints(folder)
checkpoints.save(0, {"0": tree(0)["0"][:100]}, {})
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

def main():
    try:
        for round in range(1, last):
            checkpoints.save(round, tree(round), {})
    except UserError as error:
        print(error, file=sys.stderr)

interrupts.run(main)
"""


def write_under_a_limit(folder, *, limit=0, last=2):
    command = [sys.executable, "-c", LIMITED, str(folder), str(limit), str(last)]
    return subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1_000, 40_000, 80_000])  # 320 kB may lie in two files
def test_a_limit_of_file_size_is_one_line(tmp_path, limit):
    ended = write_under_a_limit(tmp_path / "c", limit=limit)
    assert ended.stderr == f"cannot write a checkpoint into {tmp_path / 'c'} (File too large)\n"
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["0"]
    assert Checkpoints(tmp_path / "c").newest_intact() == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("size", [250, 450, 900, 1300])
def test_a_disk_that_fills_while_it_is_written_is_one_line(tmp_path, size):
    """A checkpoint has 320 kB, three are there for a moment."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        ended = write_under_a_limit(disk / "c", last=6)
        full = f"cannot write a checkpoint into {disk / 'c'} (No space left on device)\n"
        assert ended.stderr == ("" if size > 1200 else full)
        rounds = Checkpoints(disk / "c").rounds()
        assert Checkpoints(disk / "c").newest_intact() == (rounds[-1], [])
        assert sorted(path.name for path in (disk / "c").iterdir()) == [str(round) for round in rounds]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_memory_that_does_not_suffice_is_an_error_and_not_an_endless_wait(tmp_path):
    """Copying an array whose program has failed would wait without end; waiting for the program raises its error."""

    class Failed:
        dtype, size, nbytes, shape = np.dtype(np.float32), 1, 4, (1,)

        def block_until_ready(self):
            raise MemoryError("RESOURCE_EXHAUSTED")

        def __array__(self, *_, **__):
            raise AssertionError("an endless wait")

    with pytest.raises(MemoryError, match="RESOURCE_EXHAUSTED"):
        Checkpoints(tmp_path / "checkpoints").save(1, {"w": Failed()}, {})


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_arrays_from_another_person_lead_to_no_device_and_no_endless_wait(kind, tmp_path, monkeypatch):
    """A link to /dev/zero filled the memory of the machine."""
    monkeypatch.setattr(checkpoint, "_orbax", lambda: pytest.fail("orbax reads it"))
    (tmp_path / "variables" / "d").mkdir(parents=True)
    path = tmp_path / "variables" / "d" / "0"
    path.symlink_to("/dev/zero") if kind == "link" else os.mkfifo(path)
    with pytest.raises(UserError, match=r"variables/d/0 is not a file, as all of .* must be"):
        checkpoint.read_arrays(tmp_path / "variables")


def test_metadata_of_another_kind_are_one_line(tmp_path):
    """Orbax raises an AttributeError."""
    checkpoint.save_arrays(tmp_path / "variables", {"w": np.ones(2)})
    metadata = tmp_path / "variables" / "_METADATA"
    content = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(dict.fromkeys(content, "another value")))
    with pytest.raises(UserError, match=r"variables cannot be read"):
        checkpoint.read_arrays(tmp_path / "variables")
