"""The version in every place that names it, and the wheel and the source distribution that `python -m build` makes."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fedjax_mr as fmr

ROOT = Path(__file__).parent.parent


def test_the_version_is_the_same_everywhere():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cited and newest and fmr.__version__ == cited[1] == newest[1]


@pytest.mark.slow
def test_an_installed_wheel_runs_with_the_flag_files(tmp_path):
    """The source distribution makes the wheel, which runs in an empty folder and has the flag files and the tables."""
    pytest.importorskip("build")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=ignored)

    def call(*words, **variables):
        known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
        done = subprocess.run(words, cwd=tmp_path, env=known | variables, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    call(sys.executable, "-m", "build", "--outdir", "made", str(source))
    (wheel,), (archive,) = (tmp_path / "made").glob("*.whl"), (tmp_path / "made").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"README.md", "LICENSE", "fedjax_mr/trees.py", "fedjax_mr/exp/cifar10.flags"} <= names
    with zipfile.ZipFile(wheel) as packed:
        assert not [name for name in packed.namelist() if re.search(r"(^|/)(record|results|docs|tests)/", name)]
    call(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target=site", str(wheel))
    installed = {"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}
    command = str(tmp_path / "site" / "bin" / "fedjax-mr")
    assert call(command, "--version", **installed).startswith(f"fedjax_mr {fmr.__version__} (JAX")
    assert "run folder: one" in call(
        command, "--flagfile=exp/quickstart.flags", "--rounds=2", "--run_dir=one", **installed
    )
    script = "import fedjax_mr.analysis.papers as papers; print(papers.__file__, len(papers.rows()))"
    place, rows = call(sys.executable, "-c", script, **installed).split()
    assert Path(place).is_relative_to(tmp_path / "site") and int(rows) > 500
