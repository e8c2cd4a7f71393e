"""The site: its commands are valid, and where mkdocs is installed it builds."""

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedjax_mr import sweep, tune
from fedjax_mr.analysis.__main__ import COMMANDS
from fedjax_mr.compare import __main__ as compare
from fedjax_mr.config import config
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.terminal import manual
from fedjax_mr.whatif import __main__ as whatif

ROOT = Path(__file__).parent.parent
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "recipes"]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(path):
    text = path.read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^command: (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines if "-m fedjax_mr" in line]


def check(words):
    """Raise if a command would refuse its flags; nothing runs."""
    module, flags = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    if module == "fedjax_mr.sweep":
        sweep.plan(flags)
    elif module == "fedjax_mr.tune":
        tune.plan(flags)
    elif module == "fedjax_mr.whatif":
        config.parse_command(flags, whatif.Settings)
    elif module == "fedjax_mr.compare":
        config.parse_command(flags, compare.Settings)
    elif module == "fedjax_mr.analysis":
        parser = argparse.ArgumentParser(exit_on_error=False)
        COMMANDS[flags[0]].add_arguments(parser)
        parser.parse_args(flags[1:])
    elif module == "fedjax_mr.main" and (topic := manual.help_topic(flags)) is not None:
        manual.page(topic)
    elif module in ("fedjax_mr.main", "fedjax_mr.data"):
        config.parse(flags[2:] if flags[:1] == ["prepare"] else flags)


def test_the_commands_on_the_pages_are_valid(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = [words for path in PAGES for words in commands(path)]
    assert found
    for words in found:
        check(words)


def hook(name):
    """Import a module of docs/hooks that needs no other packages."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_broken_links_and_other_hosts_are_found(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="here">B</h1>')
    good = '<a href="b.html#here">B</a> <a href="https://example.org">elsewhere</a> <img src="data:image/png;base64,">'
    (tmp_path / "a.html").write_text(good)
    assert hook("checks").problems(tmp_path) == []
    (tmp_path / "a.html").write_text('<a href="b.html#there"></a> <a href="c.html"></a> <script src="//cdn/x.js">')
    (tmp_path / "a.css").write_text("@font-face { src: url(https://fonts.example/x.woff) }")
    assert hook("checks").problems(tmp_path) == [
        "a.html: asks another host for //cdn/x.js",
        "a.html: b.html#there names no place of that page",
        "a.html: c.html does not exist",
        "a.css: asks another host for a file",
    ]


def test_sections_of_documents_keep_their_links_and_change_their_level():
    documents = hook("documents")
    text = documents.section("BUILD.md", "Add a dataset", "3", "design.md")
    assert text.startswith("### Add a dataset\n") and "## Clients" not in text
    assert "../recipes/own_method.md" in documents.relinked("BUILD.md", "a/page.md")
    with pytest.raises(KeyError, match="no section 'Nothing'"):
        documents.section("BUILD.md", "Nothing")


def test_links_are_rewritten_also_where_their_text_is_wrapped():
    linked = hook("documents").linked
    assert linked("see [the\nresults](../experiments/RESULTS.md#a)", "docs/a.md", "a.md") == (
        "see [the\nresults](results/index.md#a)"
    )
    assert linked("a list [\n\nb](../BUILD.md)", "docs/a.md", "a.md") == "a list [\n\nb](../BUILD.md)"


LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(path):
    """The anchors of a page, as GitHub derives them from headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).replace(" ", "-") for heading in headings}


def dead_links(path):
    """The relative links of a page whose file or heading does not exist in a clone."""
    found = []
    for target in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))):
        name, _, place = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        leads_to = path.parent / name if name else path
        if not leads_to.exists() or (place and place not in anchors(leads_to)):
            found.append(f"{path.relative_to(ROOT)}: {target}")
    return found


def test_links_in_the_sources_lead_to_what_a_clone_has():
    pages = [
        ROOT / "README.md",
        ROOT / "BUILD.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "experiments").glob("*.md"),
    ]
    pages += (ROOT / "experiments" / "notebook").glob("*.md")
    assert [link for page in sorted(pages) for link in dead_links(page)] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install 'fedjax_mr[docs]'")
def test_the_site_builds_without_a_broken_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "methods" / "fedmr.html").is_file()
    table = (tmp_path / "methods" / "index.html").read_text(encoding="utf-8").split('class="filterable')[1]
    assert table.split("</table>")[0].count("<tr>") == 1 + len(STRATEGIES)
    assert (tmp_path / "search" / "search_index.js").is_file()  # the search works from disk
