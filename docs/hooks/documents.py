"""Pages and sections that the site takes from the documents of the repository, so that no text exists twice."""

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Document of the repository: the page of the site that shows it.
PAGES = {
    "experiments/RESULTS.md": "results/index.md",
    "experiments/README.md": "results/commands.md",
    "CHANGELOG.md": "changes.md",
    **{
        f"experiments/notebook/{path.name}": f"results/notebook/{path.name.replace('README', 'index')}"
        for path in sorted((ROOT / "experiments" / "notebook").glob("*.md"))
    },
}
CODE = {"fedjax_mr/strategies/interface.py": "api/strategies.md"}  # pages of the site that are made from code
LINK = re.compile(r"(!?)\[((?:[^\]\n]|\n(?!\n))*)\]\(([^)\s]+)\)")  # its text may be wrapped, but not over a blank line
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)


def navigation() -> list[str]:
    """The entries of the navigation: the pages of the archived notebook."""
    archived = [page for page in PAGES.values() if page.startswith("results/notebook/")]
    return sorted(archived, key=lambda page: (not page.endswith("index.md"), page))


def pages() -> dict[str, str]:
    """The pages that show whole documents, by their path in the site."""
    return {page: relinked(document, page) for document, page in PAGES.items() if (ROOT / document).exists()}


@functools.cache
def relinked(document: str, page: str) -> str:
    """A document with the links of the site; see `linked`."""
    return linked((ROOT / document).read_text(encoding="utf-8"), document, page)


def linked(text: str, document: str, page: str) -> str:
    """Convert the links of a text to links in the site: to pages and pictures. Links to other files become plain text.

    Args:
      text: in Markdown.
      document: path in the repository of the file that contains the text.
      page: path in the site of the page that shows it.
    """
    depth = "../" * page.count("/")

    def link(found: re.Match) -> str:
        picture, text, target = found.groups()
        path, _, place = target.partition("#")
        if re.match(r"\w+:", target) or not path:
            return found[0]
        inside = (ROOT / document).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()
        if picture and not inside.startswith("docs/"):
            return f"![{text}]({depth}pictures/{Path(path).name})"
        if inside.startswith("docs/"):
            return f"{picture}[{text}]({depth}{inside.removeprefix('docs/')}{'#' * bool(place)}{place})"
        if shown := PAGES.get(inside) or CODE.get(inside):
            return f"[{text}]({depth}{shown}{'#' * bool(place)}{place})"
        return f"`{inside}`" if text.strip("`") in (inside, Path(inside).name) else f"{text} (`{inside}`)"

    return _outside_code(LINK, link, text)


def _outside_code(pattern: re.Pattern, replace: object, text: str) -> str:
    """Replace matches outside of fenced code blocks."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if position % 2 else pattern.sub(replace, part) for position, part in enumerate(parts))  # type: ignore[arg-type]


def pictures() -> dict[str, Path]:
    """The pictures of the results by their path in the site."""
    return {f"pictures/{path.name}": path for path in sorted((ROOT / "experiments").glob("*.png"))}


def section(document: str, title: str, level: str = "2", page: str = "scaling.md") -> str:
    """A section of a document, with another heading level.

    Args:
      document: path of the document in the repository.
      title: title of the section.
      level: heading level of the section on the page.
      page: path of the page in the site.

    Raises:
      KeyError: the document has no such section.
    """
    text = relinked(document, page)
    fences = [match.span() for match in re.finditer(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)]
    headings = [
        each for each in HEADING.finditer(text) if not any(start <= each.start() < end for start, end in fences)
    ]
    position = next((at for at, heading in enumerate(headings) if heading[2] == title), None)
    if position is None:
        raise KeyError(f"{document} has no section {title!r}")
    begin, depth = headings[position].start(), len(headings[position][1])
    end = next((each.start() for each in headings[position + 1 :] if len(each[1]) <= depth), len(text))
    shift = int(level) - depth
    return _outside_code(HEADING, lambda found: f"{'#' * (len(found[1]) + shift)} {found[2]}", text[begin:end])
