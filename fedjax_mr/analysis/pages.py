"""The pages of results that commands make anew."""

from pathlib import Path

from fedjax_mr.errors import UserError

DOCUMENT = Path("experiments/RESULTS.md")
NOTEBOOK = "notebook"  # the folder of archived pages beside it


def with_notebook(document: Path) -> list[Path]:
    """Return a document and the pages of the notebook beside it."""
    return [document, *sorted((document.parent / NOTEBOOK).glob("*.md"))]


def read(document: Path) -> str:
    """Return the text of a document.

    Raises:
      UserError: it is not there.
    """
    try:
        return document.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {document} ({error.strerror}); --document names another") from None
