"""The notebooks of docs/notebooks: each is a script in cells (jupytext's percent format), and an executed copy of it.

The copy, which the site shows, is made by ``jupytext --to ipynb --execute docs/notebooks/NAME.py`` (extra `docs`).
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
FIRST = "simulator_in_ten_lines"  # what a newcomer opens first
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def cells(script):
    """The cells of a script: kind and text."""
    _, *parts = CELL.split(script.read_text(encoding="utf-8"))
    for mark, text in zip(parts[::2], parts[1::2], strict=True):
        prose = "\n".join(line[2:] for line in text.strip().splitlines())
        yield ("markdown", prose) if mark else ("code", text.strip())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_executed_copy_is_of_the_script(script):
    copy = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in copy] == list(cells(script))
    code = [cell for cell in copy if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code) and "pip" in code[0]["source"][-1]
    assert not [output for cell in code for output in cell["outputs"] if output["output_type"] == "error"]


def test_the_algorithm_is_written_without_the_package():
    script = list(cells(ROOT / "docs" / "notebooks" / "fedmr_in_60_lines.py"))
    (place,) = [place for place, (_, text) in enumerate(script) if text.startswith("## The algorithm")]
    kind, code = script[place + 1]
    assert kind == "code" and code and "fedjax_mr" not in code


@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="pip install 'fedjax_mr[docs]'")
@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=() if path.stem == FIRST else pytest.mark.slow) for path in SCRIPTS],
)
def test_a_notebook_runs(script, tmp_path):
    """Its cells run as a script, with fewer rounds; what they assert holds."""
    text, count = re.subn(r"^rounds = \d+$", "rounds = 10", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert count == 1
    (tmp_path / script.name).write_text(text, encoding="utf-8")
    ours = ("PYTEST", "XLA_FLAGS", "NPROC")  # the last two make programs that are soon compiled and slow
    known = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    known |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, env=known, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
