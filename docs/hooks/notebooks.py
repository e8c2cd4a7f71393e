"""Pages from the executed notebooks: text and code, and below each cell its output and plots."""

import base64
import functools
import json
import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "notebooks"
LINKS = {  # in the repository: in the site
    "../../experiments/RESULTS.md": "../results/index.md", "../../experiments/notebook/": "../results/notebook/",
    ".ipynb)": ".md)",
}  # fmt: skip
ORDER = ["simulator_in_ten_lines", "fedmr_in_60_lines", "own_method_in_20_lines"]  # the first to read; then by name


def navigation() -> list[dict[str, str]]:
    """The entries of the navigation: one per notebook."""
    titles = {page: text.partition("\n")[0].removeprefix("# ") for page, text in pages().items()}
    first = [f"notebooks/{name}.md" for name in ORDER]
    return [{titles[page]: page} for page in [*first, *(page for page in titles if page not in first)]]


def pages() -> dict[str, str]:
    """The pages by their path in the site."""
    return {f"notebooks/{path.stem}.md": _rendered(path)[0] for path in sorted(FOLDER.glob("*.ipynb"))}


def pictures() -> dict[str, bytes]:
    """The pictures that the cells drew, by their path in the site."""
    found: dict[str, bytes] = {}
    for path in sorted(FOLDER.glob("*.ipynb")):
        found |= {f"notebooks/{name}": picture for name, picture in _rendered(path)[1].items()}
    return found


@functools.cache
def _rendered(path: Path) -> tuple[str, dict[str, bytes]]:
    """Convert a notebook to Markdown, and collect its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for written, shown in LINKS.items():
                text = text.replace(written, shown)
            parts.append(text if parts else _with_badge(text, path.stem))
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
        for drawn in (
            output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {})
        ):
            name = f"{path.stem}-{len(pictures) + 1}.png"
            pictures[name] = base64.b64decode("".join(drawn))
            parts.append(f"![The plot of the cell above]({name})")
    return "\n\n".join(parts), pictures


def _with_badge(text: str, name: str) -> str:
    """Put the badge below the title. Colab opens files on GitHub; GitHub Actions set the name of the repository."""
    title, _, rest = text.partition("\n")
    repository = os.environ.get("GITHUB_REPOSITORY")
    opened = f"github/{repository}/blob/main/docs/notebooks/{name}.ipynb" if repository else ""
    badge = f"[![Open in Colab](../assets/colab.svg)](https://colab.research.google.com/{opened})"
    return f"{title}\n\n{badge} [The notebook]({name}.ipynb)\n{rest}"
