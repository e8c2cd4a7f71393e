"""Hooks of the site: pages from the registry, from the kept results and from the repository's documents; equations.

A line that ends with ``<!-- site: NAME ARGUMENTS -->`` is replaced by the result of a function in `PARTS`. The text
before it on the line is for readers of a clone. Links to documents of the repository become links to their pages.
Equations between dollar signs become MathML, which browsers draw with a font of the site: no script, no other host.
"""

import re
import shlex
from collections.abc import Callable
from html import unescape

import api
import checks
import divisions
import documents
import drawings
import leaderboard
import mathfont
import methods
import notebooks
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PARTS: dict[str, Callable[..., str]] = {
    "drawing": drawings.drawing,
    "division": divisions.picture,
    "leaderboard": leaderboard.page,
    "method_facts": methods.facts,
    "method_sentences": methods.sentences,
    "section": documents.section,
}
WIDE = {
    "comparison.md",
    "channel_matrix.md",
    "task_matrix.md",
    "methods/index.md",
}  # wide tables: no table of contents beside them
PART = re.compile(r"^.*<!-- site: (\w+)(.*?) -->$", re.MULTILINE)
# The converter writes what belongs under "min" or "arg max" beside it, and knows no \\arg.
OPTIMUM = re.compile(r"(\\arg)?\\(min|max)_(?:\{(.*?)\}|(\w))")
BAR = re.compile(r"<mo>(&#x02016;|&#x0007C;|\|)</mo>")  # of norms: as high as letters
CODE = re.compile(r"<code[ >].*?</code>", re.DOTALL)
WORD = re.compile(r"<code>([^<\s]{1,30})</code>")
FLAG = re.compile(r"(?<![\w-])--[\w-]*\w(?![^<]*>)")
SEEDS = re.compile(r"\(n = (\d)")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Insert the lists of generated pages into the navigation."""
    lists = {
        "@methods": methods.navigation, "@notebooks": notebooks.navigation, "@notebook": documents.navigation,
        "@api": api.navigation,
    }  # fmt: skip

    def fill(entries: list) -> None:
        for entry in entries:
            for title, target in entry.items():
                if isinstance(target, list):
                    fill(target)
                elif target in lists:
                    entry[title] = lists[target]()

    fill(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and their pictures."""
    for path, content in (api.pages() | documents.pages() | notebooks.pages() | notebooks.pictures()).items():
        files.append(File.generated(config, path, content=content))
    for path, source in documents.pictures().items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    files.append(File.generated(config, mathfont.PATH, content=mathfont.font()))
    methods.check_prose()
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the generated parts into a page."""
    path = page.file.src_uri
    if path in WIDE:
        page.meta["hide"] = ["toc"]
    if path.startswith("methods/") and path != "methods/index.md":
        markdown = methods.page(path.removeprefix("methods/").removesuffix(".md"))
    elif page.file.abs_src_path == str(documents.ROOT / "docs" / path):  # written in the repository, not generated
        markdown = documents.linked(markdown, f"docs/{path}", path)

    def part(found: re.Match) -> str:
        name, arguments = found.groups()
        if name not in PARTS:
            raise PluginError(f"{path}: {found[0]} is unknown; the parts are {', '.join(PARTS)}")
        return PARTS[name](*shlex.split(arguments))

    return PART.sub(part, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert equations to MathML. Keep flags, short names, and numbers with their deviation on one line."""

    def optimum(found: re.Match) -> str:
        arg, name, under, letter = found.groups()
        return rf"\underset{{{under or letter}}}{{\text{{{'arg ' if arg else ''}{name}}}}}"

    def equation(found: re.Match) -> str:
        written = unescape(found[2]).strip()
        made = convert(OPTIMUM.sub(optimum, written), display="block" if found[1] == "div" else "inline")
        if "\\" in made:
            raise PluginError(f"{page.file.src_uri}: unknown command in the equation {written}")
        return BAR.sub(r'<mo stretchy="false">\1</mo>', made)

    html = WORD.sub(r'<code class="whole">\1</code>', html)
    html = CODE.sub(lambda found: FLAG.sub(r'<span class="whole">\g<0></span>', found[0]), html)
    html = html.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    html = SEEDS.sub("(n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}\\1", html)
    return EQUATION.sub(equation, html)


def on_post_build(config: MkDocsConfig) -> None:
    """Check every link of the built pages."""
    if problems := checks.problems(config.site_dir):
        raise PluginError("\n".join(["the built pages have broken links:", *problems]))
