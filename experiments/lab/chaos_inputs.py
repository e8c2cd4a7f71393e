"""Rows ``files`` and ``flags`` of chaos.py: invalid files and flags."""

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chaos_runs import PATIENCE, ROUNDS, Ended, World, Wrong, require_one_line, settings, stopped
from fedjax_mr import main
from fedjax_mr.analysis import __main__ as analysis
from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import Setting, settings_of
from fedjax_mr.experiment.checkpoint import MANIFEST
from fedjax_mr.strategies import STRATEGIES

IN_PROCESS = PATIENCE  # seconds after which a command in this process hangs


def command(function: Callable[[Sequence[str]], int], arguments: Sequence[str], folder: Path) -> Ended:
    """Run a command in this process, in a folder. A traceback is part of its output, with exit code 99."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"hangs: nothing after {IN_PROCESS} seconds")

    log, before = folder.parent / "said", os.getcwd()
    saved, output = (os.dup(1), os.dup(2)), os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    os.chdir(folder)
    signal.signal(signal.SIGALRM, late)
    signal.alarm(IN_PROCESS)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        code = function(arguments)
    except BaseException:
        traceback.print_exc()
        code = 99
    finally:
        signal.alarm(0)
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(output)
        os.chdir(before)
    return Ended(code, log.read_text(errors="replace"))


# --- Files -----------------------------------------------------------------------------------------------------------

TEXTS = (
    b"", b"\n", b"{}", b"[]", b"null", b"0", b"NaN", b"1e999", b'"text"', b"[1, 2]\n", b"{", b"[" * 200_000,
    b'{"a": ' * 100_000, b"9" * 5000, b"\xff\xfe{}", b"\0" * 4096, b"some words\n", b"\x89PNG\r\n\x1a\n", b"x" * 10**6,
    b'{"round": 1e400}\n', b'{"users": [], "num_samples": [], "user_data": {}}', b'{"content": {}, "checksum": 0}',
    pickle.dumps({"a": [1, 2]}), b"cos\nsystem\n(S'exit 1'\ntR.",
)  # fmt: skip
VALUES = (None, True, -1, 2**31, 10**30, 1.5, -1e999, "", "x", "\ud800", [], [1], {}, {"a": 1}, [[[]]], "a" * 5000)
RUN_FILES = ("config.json", "summary.json", "metrics.jsonl", "run.flags", "manifest.json", "partition.npz")


def files(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Forge one file and let a command read it."""
    chance = random.Random(f"{world.seed}/files/{number}")
    place = folder / "place"
    place.mkdir()
    make = (_data_set, _partition, _leaf, _tfds, _run_file, _run_file)[number % 6]
    function, arguments, tried = make(world, chance, folder)
    ended = command(function, arguments, place)
    try:
        require_one_line(ended)
        if ended.code and any(place.iterdir()):
            raise Wrong(f"refused, but left {sorted(path.name for path in place.iterdir())}:\n{ended.said}")
        if ended.code == 0 and "forged" in tried:
            raise Wrong(f"accepted:\n{ended.said}")
    except Wrong as wrong:
        raise Wrong(f"{tried} ({' '.join(arguments)}): {wrong}") from None
    return 1, tried


def spoil(chance: random.Random, content: bytes) -> tuple[bytes, str]:
    """Make one thing wrong in a file's content: its bytes or, in JSON, a value."""
    with contextlib.suppress(ValueError):
        value = json.loads(content)
        if chance.random() < 0.6:
            return json.dumps(_replaced(chance, value)).encode(), "with another value"
    place = chance.randrange(max(1, len(content)))
    kind = chance.choice(("cut", "one byte changed", "another text", "doubled"))
    changed = content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :]
    other = {"cut": content[:place], "one byte changed": changed, "doubled": content * 2}
    return other.get(kind, chance.choice(TEXTS)), kind


def _replaced(chance: random.Random, value: Any) -> Any:
    """Change or remove one place of a JSON value."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(VALUES)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, changed = chance.choice(keys), value.copy()
    if chance.random() < 0.2:
        del changed[key]
    else:
        changed[key] = _replaced(chance, value[key])
    return changed


def _short(world: World) -> list[str]:
    """The flags of a run that is short if it is not rejected."""
    return [flag for flag in settings(world, "fedavg") if not flag.startswith(("--rounds", "--dataset"))] + [
        "--rounds=1"
    ]


def _npz(arrays: dict[str, Any], path: Path) -> None:
    np.savez(path, **arrays)


def _entry(shape: Any, dtype: Any, content: bytes = b"") -> bytes:
    """The file of an array with a given header."""
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def _forged_npz(chance: random.Random, path: Path, name: str) -> str:
    """Write an .npz file whose header does not match its content; return a description."""
    shape = chance.choice(((10**12,), (2**62, 8), (-1,), (3, 10**30), "no shape", (1,) * 70, (2**31, 0, 5)))
    dtype = chance.choice(("|u1", "<f8", "|O", "no type", [("a", "<i8")], "<M8[s]", "<U9999"))
    content = chance.choice((b"", b"12345", pickle.dumps([1])))
    with zipfile.ZipFile(path, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        archive.writestr(f"{name}.npy", _entry(shape, dtype, content))
        for other in ("y", "x_test", "y_test"):
            archive.writestr(f"{other}.npy", _entry((3,), "|u1", b"123"))
    return f"an .npz file with forged {dtype} of shape {shape}"


def _arrays(chance: random.Random, arrays: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Arrays of which one is wrong, and a description of the fault."""
    name = chance.choice(sorted(arrays))
    array = np.asarray(arrays[name])
    number = array if array.dtype.kind in "iuf" and array.ndim else np.arange(5)
    kind, changed = chance.choice((
        ("shorter", array[:-1] if array.ndim else array.reshape(1)), ("of another shape", array.reshape(-1, 1)),
        ("complex", number * 1j - 1), ("negative", -1 - number.astype(np.int64)), ("text", np.full(array.shape, "a")),
        ("not finite", np.full(array.shape, np.nan)), ("huge", np.full(array.shape, 2.0**62)),
        ("empty", array[:0] if array.ndim else np.zeros(0)),
        ("of a huge label", np.full(array.shape, 10**9)), ("without width", np.zeros((*array.shape[:1], 0))),
        ("of bytes", np.full(array.shape, b"a")), ("a single value", np.float32(1)), ("all 0", np.zeros_like(number)),
        ("boolean", np.full(array.shape, True)), ("large and unsigned", np.full(array.shape, 2**64 - 1, np.uint64)),
    ))  # fmt: skip
    if chance.random() < 0.1:
        return {key: value for key, value in arrays.items() if key != name}, f"{name} missing"
    return arrays | {name: changed}, f"{name} {kind}"


def _data_set(world: World, chance: random.Random, folder: Path) -> tuple[Callable, list[str], str]:
    path = folder / "mine.npz"
    kind = chance.randrange(3)
    if kind == 0:
        tried = _forged_npz(chance, path, "x")
    elif kind == 1:
        with np.load(world.folder / "tiny.npz") as archive:
            arrays, tried = _arrays(chance, dict(archive))
        _npz(arrays, path)
    else:
        content, tried = spoil(chance, (world.folder / "tiny.npz").read_bytes())
        path.write_bytes(content)
    return main.main, [*_short(world), f"--dataset={path}"], f"a data set, {tried}"


def _partition(world: World, chance: random.Random, folder: Path) -> tuple[Callable, list[str], str]:
    path, valid = folder / "partition.npz", world.straight / "partition.npz"
    kind = chance.randrange(4)
    if kind == 0:
        tried = _forged_npz(chance, path, "train_index")
    elif kind == 1:
        content, tried = spoil(chance, valid.read_bytes())
        path.write_bytes(content)
    else:
        with np.load(valid) as archive:
            arrays, tried = _arrays(chance, dict(archive))
        _npz(arrays, path)
    flags = [*_short(world), f"--dataset={world.folder / 'tiny.npz'}", f"--partition_file={path}"]
    return main.main, flags, f"a partition, {tried}"


def _leaf(world: World, chance: random.Random, folder: Path) -> tuple[Callable, list[str], str]:
    name, place = chance.choice(("femnist", "shakespeare")), folder / "leaf"
    images = {"x": [[0.0, 0.5] * 392] * 4, "y": [0, 1, 2, 61]}
    sample = images if name == "femnist" else {"x": ["To be, or not to be?".ljust(80)] * 4, "y": list("abcd")}
    for part in ("train", "test"):
        complete = {"users": ["a", "b", "c"], "num_samples": [4] * 3, "user_data": dict.fromkeys("abc", sample)}
        (place / part).mkdir(parents=True)
        (place / part / "all.json").write_text(json.dumps(complete))
    path = place / chance.choice(("train", "test")) / "all.json"
    content, tried = spoil(chance, path.read_bytes())
    path.write_bytes(content)
    remaining = [
        flag for flag in _short(world) if not flag.startswith(("--clients", "--cohort", "--partition", "--model"))
    ]
    model = "logistic" if name == "femnist" else "lstm_shakespeare"
    flags = [*remaining, f"--dataset={name}", f"--data_dir={place}", "--clients=0", "--cohort=2", "--partition=natural"]
    return main.main, [*flags, f"--model={model}"], f"{name}, a file {tried}"


def _tfds(world: World, chance: random.Random, folder: Path) -> tuple[Callable, list[str], str]:
    """The folder has descriptions without records, so none of these datasets can be read."""
    place = folder / "tfds" / "mnist" / "3.0.1"
    place.mkdir(parents=True)
    kind = "tensorflow_datasets.core.features"
    names = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    splits = [
        {"name": part, "shardLengths": ["4"], "numBytes": "9", "filepathTemplate": names} for part in ("train", "test")
    ]
    info = {"name": "mnist", "version": "3.0.1", "splits": splits}
    info["fileFormat"] = chance.choice(("array_record", "tfrecord", "x"))
    image = {"dtype": "uint8", "shape": {"dimensions": ["28", "28", "1"]}}
    features = {
        "image": {"pythonClassName": f"{kind}.image_feature.Image", "image": image},
        "label": {"pythonClassName": f"{kind}.class_label_feature.ClassLabel", "classLabel": {"numClasses": "10"}},
    }
    description = {"pythonClassName": f"{kind}.features_dict.FeaturesDict", "featuresDict": {"features": features}}
    contents = {"dataset_info.json": json.dumps(info).encode(), "features.json": json.dumps(description).encode()}
    name = chance.choice(sorted(contents))
    contents[name], tried = spoil(chance, contents[name])
    for part in ("train", "test"):
        contents[f"mnist-{part}.array_record-00000-of-00001"] = chance.randbytes(chance.choice((0, 10, 70_000)))
    for name, content in contents.items():
        (place / name).write_bytes(content)
    return (
        main.main,
        [*_short(world), "--dataset=mnist", f"--data_dir={folder / 'tfds'}"],
        f"forged TFDS, {name} {tried}",
    )


def _run_file(world: World, chance: random.Random, folder: Path) -> tuple[Callable, list[str], str]:
    run, name = folder / "run", chance.choice(RUN_FILES)
    use = chance.choice(("resume", "resume", "compare", "table", "flags"))
    if use == "resume":
        stopped(world, run, ROUNDS - 1)
    else:
        shutil.copytree(world.straight, run)
    path = run / "checkpoints" / str(ROUNDS - 1) / MANIFEST if name == "manifest.json" else run / name
    if not path.exists():  # the summary of a run that goes on
        path = run / "metrics.jsonl"
    content, tried = spoil(chance, path.read_bytes())
    path.write_bytes(content)
    tried = f"{path.relative_to(run)} of a run, {tried}, read to {use}"
    short = [*_short(world), f"--dataset={world.folder / 'tiny.npz'}"]
    if use == "table":
        return analysis.main, ["table", str(run)], tried
    if use == "resume":
        return main.main, [*settings(world, "fedmr"), f"--run_dir={run}", "--resume"], tried
    if use == "compare":
        return main.main, [*short, f"--compare_to={run}"], tried
    return main.main, [*short, f"--flagfile={run / 'run.flags'}", "--rounds=1", "--overwrite"], tried


# --- Flags -----------------------------------------------------------------------------------------------------------

OWN = {f"{name}_": row.hyper for name, row in STRATEGIES.items()}
EVERY = [(setting, "") for setting in settings_of(Config)] + [
    (setting, prefix[:-1]) for prefix, owner in OWN.items() for setting in settings_of(owner, prefix)
]
TOGETHER = (
    "--resume --overwrite", "--clients=3 --cohort=5", "--num_processes=1 --process_id=5", "--model=mlp,logistic",
    "--model=", "--model=mlp,", "--strategy=fedcross --cohort=1", "--strategy=fedmut --cohort=1", "--cohort=100",
    "--strategy=fedme --cohort=1 --public_share=0.2", "--import=missing.py", "--log=paper", "--picture_format=gif",
    "--strategy=pfedhr --public_share=0.2 --data_placement=host", "--projection=8 --model=logistic", "--clients=5000",
    "--strategy=fedmr --exchange=both --cohort=1", "--public_share=1.5", "--partition=natural",
    "--public_from=missing.npz --public_share=0.5", "--resume --run_dir=missing", "--compare_to=missing",
    "--devices=5000",
    "--architectures_from=missing", "--partition_file=missing.npz", "--architectures=0,1", "--architectures=x",
    "--dataset=./missing.npz", "--dataset=mnist --data_dir=missing", "--flagfile=missing", "--flagfile=", "stray",
    "--=1",
    "--run_dir=/dev/null/run", "--run_dir=/proc/run", "--coordinator=nobody", "--process_id=1", "--num_processes=2",
    "--strategy=moon --model=logistic --projection=8", "--classes_per_client=99 --partition=classes", "-", "---x=1",
)  # fmt: skip


def flags(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Give one bad flag, or flags that do not fit together, among good ones; every hundredth time to a real command."""
    chance = random.Random(f"{world.seed}/flags/{number}")
    bad = TOGETHER[number].split(" ") if number < len(TOGETHER) else _bad(chance)
    place = folder / "place"
    place.mkdir()
    good = chance.sample(("--lr=0.1", "--seed=3", "--batch_size=5", "--weight_decay=0.01", "--eval_every=3"), 2)
    arguments = [*_short(world), f"--dataset={world.folder / 'tiny.npz'}", *good, *bad]
    if number % 100 == 99 and "\0" not in "".join(arguments):
        line = [sys.executable, "-m", "fedjax_mr.main", *arguments]
        done = subprocess.run(line, cwd=place, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
        ended = Ended(done.returncode, done.stdout + done.stderr)
    else:
        ended = command(main.main, arguments, place)
    shown = " ".join(text if len(text) < 100 else f"{text[:80]}... ({len(text):,} characters)" for text in bad)
    left = sorted(path.name for path in place.iterdir())
    try:
        require_one_line(ended)
        if ended.code == 0:
            raise Wrong(f"accepted:\n{ended.said}")
        if left:
            raise Wrong(f"a refusal left {left}:\n{ended.said}")
    except Wrong as wrong:
        raise Wrong(f"{shown!r}: {wrong}") from None
    return 1, shown


def _bad(chance: random.Random) -> list[str]:
    """Flags of which one is invalid."""
    setting, strategy = chance.choice(EVERY)
    flags = [f"--strategy={strategy}"] if strategy else []
    if chance.random() < 0.15:
        return [*flags, f"--{_misspelt(chance, setting.flag)}=1"]
    return [*flags, f"--{setting.flag}={chance.choice(_bad_values(chance, setting))}"]


def _misspelt(chance: random.Random, name: str) -> str:
    """A name that is not a flag."""
    names, place = {setting.flag for setting, _ in EVERY}, chance.randrange(len(name))
    for wrong in (name[:place] + name[place + 1 :], f"{name[:place]}{name}", name.upper(), f"{name}_", f"x{name}"):
        if chance.random() < 0.5 and wrong and wrong.removeprefix("no") not in names:
            return wrong
    return f"{name}é"


def _bad_values(chance: random.Random, setting: Setting) -> list[str]:
    """Texts that are invalid values of a setting."""
    low, high = setting.info.low, setting.info.high
    words = [
        "x" * chance.randint(1, 9),
        "1 2",
        "0x10",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "--",
        "\ud7ff",
        "1,5",
        "None none",
    ]
    if setting.kind is bool:
        return ["perhaps", "2", "", "nan", "-1"]
    if setting.kind is str:
        bad = [" x", "x ", "two\nlines", "\0", "tab\t", "\x1b[31m"]
        bad += ["no such choice", "0", "nan"] if setting.info.choices else []
        return bad + (["a" * 256, "runs/" + "ä" * 128, "a/" * 2000] if setting.info.path else [])
    if setting.kind is int:
        bad = [
            *words,
            "1.5",
            "1e3",
            "9" * 5000,
            str(10**12),
            str(2**31),
            str(-(10**12) if low is not None else 10**400),
        ]
    else:
        bad = [*words, "1e39", "-1e39"]
    bad += [] if low is None else [str(low) if setting.info.open_low else str(low - chance.randint(1, 10**6))]
    bad += [] if high is None else [str(high) if setting.info.open_high else str(high + chance.randint(1, 10**6))]
    return bad + ([] if setting.optional else [""])
