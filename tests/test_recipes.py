"""The first page, docs/recipes and the channel: every block of Python or of a console runs as printed.

A page's blocks run in order, in one empty folder.

``<!-- needs: pandas, datasets -->`` under a heading names what the blocks up to the next heading import that is not
among this package's dependencies: without it they are skipped. Under the title of a page it is for all of its blocks.
Lines of a console after ``$`` are commands; a block without any is all commands. A block with ``title="NAME"`` is a
file of that name and is not run.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / "index.md", ROOT / "docs" / "channel.md", *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
PARTS = re.compile(
    r"^(#+) .*?$|^<!-- needs: (.*?) -->$|^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A block of a page."""

    line: int
    language: str
    code: str
    needs: tuple[str, ...]
    file: str | None = None


def blocks(text):
    """The blocks of a page."""
    found, page, section, depth = [], (), (), 0
    for part in PARTS.finditer(text):
        heading, needs, language, file, code = part.groups()
        if heading:
            section, depth = (), len(heading)
        elif needs:
            names = tuple(name.strip() for name in needs.split(","))
            page, section = (names, ()) if depth <= 1 else (page, names)
        elif language in ("python", "console"):
            found.append(Block(text[: part.start(5)].count("\n"), language, code, page + section, file))
    return found


def runnable(block):
    """The block as Python, in as many lines or fewer."""
    if block.file:
        return f"import pathlib; pathlib.Path({block.file!r}).write_text({block.code!r})"
    if block.language == "python":
        return block.code
    lines = block.code.replace("\\\n", " ").splitlines()
    commands = "\n".join([line[2:] for line in lines if line.startswith("$ ")] or lines)
    return f"import subprocess; subprocess.run(['bash', '-euo', 'pipefail', '-c', {commands!r}], check=True)"


def script(page, missing):
    """The blocks of a page as one script with the page's line numbers, and the missing packages of skipped blocks."""
    lines, left_out = [], set()
    for block in blocks(page.read_text(encoding="utf-8")):
        if absent := missing & set(block.needs):
            left_out |= absent
            continue
        lines += [""] * (block.line - len(lines))
        lines += runnable(block).splitlines()
    return "\n".join(lines), left_out


def test_blocks():
    text = "# Page\n<!-- needs: a -->\n```python\n1\n```\n## Part\n<!-- needs: b, c -->\n"
    text += "```console\n$ python \\\n-V\nout\n```\n## Other\n```sh\n# no\n```\n```python\n2\n```\n"
    found = blocks(text)
    assert [(block.line, block.needs) for block in found] == [(3, ("a",)), (8, ("a", "b", "c")), (17, ("a",))]
    assert "'-c', 'python  -V']" in runnable(found[1])
    (file,) = blocks('```python title="a.py"\nx = 1\n```\n')
    assert runnable(file) == "import pathlib; pathlib.Path('a.py').write_text('x = 1\\n')"
    for page in PAGES:  # what is printed is Python
        compile(script(page, set())[0], page.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_as_printed(page, tmp_path):
    needed = {name for block in blocks(page.read_text(encoding="utf-8")) for name in block.needs}
    code, left_out = script(page, {name for name in needed if importlib.util.find_spec(name) is None})
    (tmp_path / f"{page.stem}.py").write_text(code, encoding="utf-8")
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    known |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": path}
    done = subprocess.run(
        [sys.executable, f"{page.stem}.py"], cwd=tmp_path, capture_output=True, text=True, env=known, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    if left_out:
        pytest.skip(f"all but the blocks that need {', '.join(sorted(left_out))} ran")
