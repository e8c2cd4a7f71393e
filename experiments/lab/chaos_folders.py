"""Row ``folders`` of chaos.py: links and damage in the files of a run folder, read by every reader."""

import functools
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos_runs import (
    ROUNDS,
    Child,
    Ended,
    World,
    Wrong,
    fingerprint,
    require_bits,
    require_one_line,
    settings,
    stopped,
)
from fedjax_mr import export, main
from fedjax_mr.analysis import __main__ as analysis
from fedjax_mr.experiment.folder import CONTENTS
from fedjax_mr.terminal import interrupts

LINKS = (*CONTENTS, f"checkpoints/{ROUNDS - 1}", "info/3.npz", "imports/own.py", ".lock")
DIGITS = ("metrics.jsonl", "summary.json", "config.json", "samples.json")
SWAPS = ("checkpoints", "rows", "round", "impossible")


def folders(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Put one link, changed digit or swap into a run folder and let a command read it.

    A link is rejected, and its target is unchanged. Damage is rejected in one line, or has no effect: the
    command says the same as without it, and a run that goes on reaches the same bits.
    """
    chance = random.Random(f"{world.seed}/folders/{number}")
    place, run = folder / "place", folder / "run"
    place.mkdir()
    kind = ("link", "digit", "digit", "swap")[number % 4]
    use = chance.choice(("resume", "table", "export"))
    if use == "resume":
        stopped(world, run, ROUNDS - 1)
    else:
        shutil.copytree(world.straight, run)
    function, arguments = _command(world, use, run, place)
    if kind == "link":
        what, outside = _link(chance, run, folder / "outside")
    else:
        what = _digit(chance, run, use) if kind == "digit" else _swap(chance, run)
        outside = {}
    tried = f"{what}, read by {use}"
    ended = ended_in(function, arguments, place)
    try:
        require_one_line(ended)
        if kind == "link":
            if ended.code == 0:
                raise Wrong(f"a link was followed:\n{ended.said}")
            if outside != _content(folder / "outside"):
                raise Wrong(f"what the link leads to has changed:\n{ended.said}")
        elif ended.code == 0:
            _require_no_effect(world, use, run, place, folder)
    except Wrong as wrong:
        raise Wrong(f"{tried}: {wrong}") from None
    return 1, tried


def ended_in(function: Callable[[Sequence[str]], int], arguments: Sequence[str], place: Path) -> Ended:
    """Run a command in a fork of its own, in a folder: this process must not start JAX, as it forks again."""

    def inside() -> int:
        os.chdir(place)
        # Errors that Python cannot raise are handled as by the command.
        return interrupts.run(functools.partial(function, arguments)) or 0

    ended = Child(inside, log=place.parent / "said").wait()
    assert ended is not None
    return ended


def _command(world: World, use: str, run: Path, place: Path) -> tuple[Callable[[Sequence[str]], int], list[str]]:
    if use == "resume":
        return main.main, [*settings(world, "fedmr"), f"--run_dir={run}", "--resume"]
    if use == "export":
        return export.main, [str(run), str(place / "exported")]
    return analysis.main, ["table", str(run)]


def _link(chance: random.Random, run: Path, outside: Path) -> tuple[str, dict[str, bytes]]:
    """Replace a file or folder of a run by a link to it, with files next to the target; return it and its content."""
    name = chance.choice(LINKS)
    path = run / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.touch() if path.suffix or name == ".lock" else path.mkdir()
    outside.mkdir()
    target = outside / path.name
    path.rename(target)
    if target.is_dir():
        for other in (".partial-thesis", ".partial-3", ".discarded-1"):
            (target / other).mkdir()
            (target / other / "kept").write_text("mine")
        (target / "1.npz").write_text("mine")
    path.symlink_to(target)
    return f"{name} as a link", _content(outside)


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _digit(chance: random.Random, run: Path, use: str) -> str:
    """Change one digit of a text file that holds results."""
    name = chance.choice([name for name in DIGITS if (run / name).exists()])
    text = (run / name).read_text()
    place = chance.choice([place for place, sign in enumerate(text) if sign.isdigit()])
    other = chance.choice([digit for digit in "0123456789" if digit != text[place]])
    (run / name).write_text(text[:place] + other + text[place + 1 :])
    return f"{name}, digit {place} changed from {text[place]} to {other}"


def _swap(chance: random.Random, run: Path) -> str:
    """Exchange two checkpoints or two evaluations, move one to another round, or give it an impossible accuracy."""
    kind, path = chance.choice(SWAPS), run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    if kind == "checkpoints":
        first, second = chance.sample(sorted(entry.name for entry in (run / "checkpoints").iterdir()), 2)
        for name, new in ((first, "x"), (second, first), ("x", second)):
            (run / "checkpoints" / name).rename(run / "checkpoints" / new)
        return f"checkpoints {first} and {second} exchanged"
    one, two = chance.sample(range(len(lines)), 2)
    row = json.loads(lines[one])
    if kind == "rows":
        lines[one], lines[two] = lines[two], lines[one]
    else:
        change = {"round": row["round"] + 1} if kind == "round" else {"accuracy": row["accuracy"] + 1.01}
        lines[one] = json.dumps(row | change)
    path.write_text("".join(f"{line}\n" for line in lines))
    return f"evaluation {one}: {kind}"


def _require_no_effect(world: World, use: str, run: Path, place: Path, folder: Path) -> None:
    """Require the results of an undamaged run."""
    if use == "resume":
        require_bits(run, world.expected)
        return
    if use == "table":
        said = []
        for source in (run, world.straight):
            same = folder / "same" / "run"  # the table names folders
            shutil.rmtree(same.parent, ignore_errors=True)
            shutil.copytree(source, same)
            said.append(ended_in(analysis.main, ["table", str(same)], place).said)
        if said[0] != said[1]:
            raise Wrong(f"another table:\n{said[0]}\nwithout the damage:\n{said[1]}")
        return
    expected = folder / "expected"
    ended_in(export.main, [str(world.straight), str(expected)], place)
    descriptions = [json.loads((folder / "network.json").read_text()) for folder in (place / "exported", expected)]
    if descriptions[0] != descriptions[1] and fingerprint(run) != world.expected:
        raise Wrong(f"another network was exported: {descriptions[0]}\nwithout the damage: {descriptions[1]}")
    if descriptions[0] != descriptions[1]:
        raise Wrong(f"other facts were exported: {descriptions[0]}\nwithout the damage: {descriptions[1]}")
