"""The house's rules: who may import whom, what flag files may hold, what README says."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedjax_mr import config
from fedjax_mr.strategies import STRATEGIES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fedjax_mr"
FREE = {"errors", "fields", "files"}  # leaves of the tree: everybody may use them, they use nobody

MAY_IMPORT = {
    "": {"config", "data", "local", "models", "run", "strategies", "trees"},
    "main": {"config", "distributed", "record", "run"},
    "sweep": {"analysis", "config", "record"},
    "run": {
        "checkpoint", "config", "data", "distributed", "evaluation", "local", "models", "parallel", "plots", "record",
        "rounds", "strategies", "trees",
    },
    "config": {"data", "models", "strategies"},  # for the names and settings that flags are made of
    "record": {"checkpoint", "config"},
    "rounds": {"local", "parallel", "strategies", "trees"},
    "evaluation": {"local", "models", "parallel"},
    "strategies": {"exchange", "local", "models", "trees"},
    "local": {"models", "trees"},
    "models": {"config"},
    "data": {"config", "models", "plots"},
    # Beside the drawing: a run folder's settings (config), and what rebuilds the template of its checkpoints (run,
    # parallel), so that every strategy's state can be read without a second description of it.
    "analysis": {"checkpoint", "config", "data", "local", "models", "parallel", "plots", "record", "run", "trees"},
    "secure": {"models"},
    "plots": set(),
    "checkpoint": {"distributed"},
    "distributed": set(),
    "parallel": set(),
    "trees": set(),
    "exchange": set(),
}  # fmt: skip
ONLY_IN = {
    "matplotlib": {"plots"},
    "orbax": {"checkpoint"},
    "tensorflow_datasets": {"data/tfds"},
    "absl.flags": {"config"},
    "cryptography": {"secure"},
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).with_suffix("").as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree):
    """Return the dotted names that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_who_imports_whom():
    rooms = {path.stem for path in PACKAGE.iterdir()} - {"__init__", "__pycache__"}
    for name, tree in modules():
        room = name.split("/")[0].removesuffix("__init__").removesuffix("/")
        found = {dotted.split(".")[1] for dotted in imported(tree) if dotted.startswith("fedjax_mr.")} & rooms
        assert found - FREE - {room} <= MAY_IMPORT.get(room, set()), f"{name} may not import {found}"


def test_strategies_never_import_each_other():
    for name, tree in modules():
        if name.startswith("strategies/") and not name.endswith(("__init__", "base")):
            others = {dotted.split(".")[2] for dotted in imported(tree) if dotted.startswith("fedjax_mr.strategies.")}
            assert others <= {"base"}, name


@pytest.mark.parametrize("library", ONLY_IN)
def test_one_door_for_each_heavy_library(library):
    uses = lambda tree: any(f"{dotted}.".startswith(f"{library}.") for dotted in imported(tree))
    users = {name for name, tree in modules() if uses(tree)}
    assert users <= ONLY_IN[library] | {f"{name}/__main__" for name in ("data", "models", "analysis")}


def test_shared_flag_files_never_choose_the_strategy():
    files = list((ROOT / "experiments").glob("*.flags"))
    assert files
    for path in files:
        chosen = [line for line in path.read_text().splitlines() if re.match(r"\s*--strategy\b", line)]
        assert chosen == [], path


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.flags")), ids=lambda path: path.name)
def test_every_flag_file_is_valid_and_names_its_sources(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config.validate(config.parse([f"--flagfile=exp/{path.name}"]))
    assert "python -m fedjax_mr.main" in path.read_text() or "included by" in path.read_text()
    assert "ource" in path.read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_readme_lists_every_strategy():
    rows = re.findall(
        r"^\| `(\w+)` \| .*\| \[\w+\.py\]\((.*)\) \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE
    )
    assert {name for name, _ in rows} == set(STRATEGIES)
    assert all((ROOT / path).is_file() for _, path in rows)


def test_the_readmes_python_runs(tmp_path):
    """Every Python block of the README runs as printed, in order, as one script in an empty folder."""
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")), encoding="utf-8")
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(Path.home())}
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_readmes_own_strategy_is_short():
    (block,) = [block for block in blocks("python") if "fmr.Strategy(" in block]
    assert len([line for line in block.splitlines() if line.strip()]) < 30
