"""The pages of results that commands make anew."""

from pathlib import Path

from fedjax_mr.errors import UserError

DOCUMENT = Path("experiments/RESULTS.md")


def read(document: Path) -> str:
    """Return the text of a document.

    Raises:
      UserError: it is not there.
    """
    try:
        return document.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {document} ({error.strerror}); --document names another") from None
