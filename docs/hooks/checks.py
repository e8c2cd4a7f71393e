"""The checks of the built site: no broken link, no request to another host."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("source", "src"),
    ("iframe", "src"),
    ("link", "href"),
    ("object", "data"),
}
HOST = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")  # in style sheets


class Links(HTMLParser):
    """The links, the fetched files and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the targets of an element."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        for name, value in values.items():
            if (tag, name) in FETCHED and values.get("rel") != "canonical":
                self.fetched.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


def problems(folder: str) -> list[str]:
    """One line for every broken link and for every file that a page would request from another host.

    Args:
      folder: folder of the built site.
    """
    root = Path(folder).resolve()
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute
            continue
        name = path.relative_to(root)
        found += [f"{name}: asks another host for {link}" for link in page.fetched if urlsplit(link).netloc]
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{name}: {link} does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link} names no place of that page")
    for path in sorted(root.rglob("*.css")):
        if HOST.search(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(root)}: asks another host for a file")
    return found
