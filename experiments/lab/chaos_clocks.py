"""Rows ``clocks`` and ``adapters`` of chaos.py: runs in simulated time, and runs on a frozen base."""

import functools
import os
import random
import shutil
from pathlib import Path

from chaos_folders import ended_in
from chaos_inputs import spoil
from chaos_runs import (
    ROUNDS,
    Child,
    World,
    Wrong,
    fingerprint,
    killed,
    require_bits,
    require_one_line,
    settings,
    stopped_from,
    to_the_end,
)
from fedjax_mr import export, main
from fedjax_mr.strategies import STRATEGIES, on_any_network

# --- Clocks ----------------------------------------------------------------------------------------------------------

CLOCKS = (
    "--fleet=classes", "--fleet=lognormal --over_select=1.3", "--fleet=classes --deadline=200",
    "--fleet=lognormal --deadline=0.6 --late=partial", "--mode=async --in_flight=2",
    "--mode=async --in_flight=3 --fleet=classes --staleness=hinge", "--mode=async --in_flight=2 --refill=arrival",
    "--mode=async --fleet=lognormal --in_flight=2 --compress=topk --compress_ratio=0.1 --error_feedback=ef",
)  # fmt: skip
OF_LATE = [name for name in on_any_network() if STRATEGIES[name].group == "asynchronous"]


def clocks(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Kill a run in simulated time and resume it: it has the bits of an undisturbed one, the clock among them."""
    chance = random.Random(f"{world.seed}/clocks/{number}")
    clock = CLOCKS[number % len(CLOCKS)]
    strategy = chance.choice(("fedavg", "scaffold", *(OF_LATE if "async" in clock else ("fedmr",))))
    flags = [*settings(world, strategy), "--clients=6", f"--cohort={chance.choice((1, 2))}", *clock.split()]
    what = f"{strategy} {clock}"
    refused = Child(
        lambda: main.main([*flags, "--rounds=1", f"--run_dir={folder / 'first'}"]), log=folder / "said"
    ).wait()
    assert refused is not None
    if refused.code == 2:  # not every method takes every clock
        require_one_line(refused)
        return 1, f"{what}: refused"
    return killed(world, chance, what, flags, chance.randint(1, 3), folder), what


# --- Adapters --------------------------------------------------------------------------------------------------------


@functools.cache
def _trained(folder: Path, process: int) -> tuple[Path, Path, str]:
    """An exported base, a run of adapters on it and its fingerprint; made once in each process."""
    place = folder / f"adapters-{process}"
    place.mkdir()
    ended = ended_in(export.main, [str(folder / "straight"), str(place / "base")], place)
    if ended.code:
        raise Wrong(f"the base cannot be exported: {ended}")
    run = place / "trained"
    to_the_end([*_flags(World(folder, 0, {}), place / "base"), "--keep_checkpoints=100"], run)
    return place / "base", run, fingerprint(run)


def _flags(world: World, base: Path) -> list[str]:
    more = ["--adapter=lora", "--lora_rank=2", "--lora_targets=*/kernel", f"--pretrained={base}"]
    return [*settings(world, "fedavg"), *more]


def adapters(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Spoil one file of a frozen base: it is rejected in one line, or the results equal those without damage."""
    chance = random.Random(f"{world.seed}/adapters/{number}")
    base, trained, expected = _trained(world.folder, os.getpid())
    whole, run, place = folder / "whole", folder / "run", folder / "place"
    place.mkdir()
    shutil.copytree(base, whole)
    use = chance.choice(("resume", "export", "start"))
    path = chance.choice(sorted(entry for entry in base.rglob("*") if entry.is_file()))
    how = chance.choice(("spoiled", "spoiled", "spoiled", "gone", "a link", "a pipe"))
    tried = f"{path.relative_to(base)} of a base {how}, read by {use}"
    try:
        if how == "spoiled":
            content, kind = spoil(chance, path.read_bytes())
            path.write_bytes(content)
            tried = f"{tried} ({kind})"
        else:
            path.unlink()
            if how == "a link":
                path.symlink_to("/dev/zero")
            elif how == "a pipe":
                os.mkfifo(path)
        if use == "resume":
            stopped_from(trained, run, ROUNDS - 1)
            ended = ended_in(main.main, [*_flags(world, base), f"--run_dir={run}", "--resume"], place)
        elif use == "export":
            ended = ended_in(export.main, [str(trained), str(place / "new"), "--merged"], place)
        else:
            ended = ended_in(main.main, [*_flags(world, base), "--rounds=1", f"--run_dir={run}"], place)
        require_one_line(ended)
        if use == "resume" and not ended.code:
            require_bits(run, expected)
        if use == "export" and not ended.code:
            _require_equal(trained, place, whole, base)
    except Wrong as wrong:
        raise Wrong(f"{tried}: {wrong}") from None
    finally:
        shutil.rmtree(base)
        whole.rename(base)
    return 1, tried


def _require_equal(trained: Path, place: Path, whole: Path, base: Path) -> None:
    """Require that the exported network is that of the whole base."""
    spoiled = base.with_name("spoiled")
    base.rename(spoiled)
    shutil.copytree(whole, base)
    try:
        expected = ended_in(export.main, [str(trained), str(place / "expected"), "--merged"], place)
    finally:
        shutil.rmtree(base)
        spoiled.rename(base)
    if expected.code:
        raise Wrong(f"the whole base cannot be exported: {expected}")

    def compare() -> int:
        from fedjax_mr.experiment.checkpoint import read_arrays
        from fedjax_mr.models import parts

        one, two = (parts.flat(read_arrays(place / name / "variables")) for name in ("new", "expected"))
        return int(one.keys() != two.keys() or any(one[name].tobytes() != two[name].tobytes() for name in one))

    equal = Child(compare, log=place.parent / "compared").wait()
    if equal is None or equal.code:
        raise Wrong(f"another network was exported: {equal}")
