"""The documents that hold results: pages, and the README of the repository."""

from pathlib import Path

from fedjax_mr.errors import UserError

FOLDER = Path(__file__).parents[1]  # experiments/
RESULTS = "results"  # the tables of kept runs in it


def pages(folder: Path) -> list[Path]:
    """The pages that hold results: RESULTS.md, the notebook's, and the README of the repository if there is one.

    Args:
      folder: experiments/, or a folder in its form.
    """
    readme = folder.resolve().parent / "README.md"
    notebook = sorted((folder / "notebook").glob("*.md"))
    return [folder / "RESULTS.md", *notebook, *([readme] if readme.is_file() else [])]


def read(path: Path) -> str:
    """The text of a document.

    Raises:
      UserError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); --folder names the folder of RESULTS.md") from None
