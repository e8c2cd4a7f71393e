"""Files of data inside installed packages: read without an import of the package, and only with known content."""

import hashlib
import importlib.util
from pathlib import Path

from fedjax_mr.errors import UserError

EXTRA = "pip install 'fedjax-mr[data]'"


def read(name: str, package: str, file: str, *, digest: str, install: str = EXTRA) -> bytes:
    """The content of a file of an installed package.

    The digest makes every run use the same samples, and allows a file to be unpickled: its content is known.

    Args:
      name: name of the dataset in errors.
      package: the package, as it is imported.
      file: path of the file inside the package.
      digest: SHA-256 of its content.
      install: the command that installs the package.

    Raises:
      UserError: the package is not installed, or its file has another content.
    """
    path = find(package, file)
    if path is None:
        raise UserError(f"{name} is read from the package {package}, which is not installed: {install}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(f"{path} has another content than expected: install the version of constraints.txt, {install}")
    return content


def find(package: str, file: str) -> Path | None:
    """The path of a file of a package, or None if there is none. Nothing is imported."""
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders if (path := Path(folder) / file).is_file()), None)
