"""The start of a network from the weights in a folder or file (``--pretrained``), and the tokenizer of its texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from fedjax_mr import untrusted
from fedjax_mr.config.config import Config
from fedjax_mr.data import tokens
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import read_arrays
from fedjax_mr.experiment.trained import NETWORK, VARIABLES
from fedjax_mr.models import MODELS, Model, Variables, parts
from fedjax_mr.results import manifest

EXPORT = "python -m fedjax_mr.export"


def start_from(model: Model, folder: str, key: jax.Array) -> Variables:
    """The variables of a network that starts from those in a folder. A classifier for other classes is at random.

    Args:
      model: the network, of which everything trains.
      folder: an exported network, or what `models.ModelRow.pretrained` of the network reads.
      key: consumed.

    Raises:
      UserError: the variables cannot be read, or are those of another network.
    """
    needed = parts.flat(model.shapes())
    known = _exported(folder, needed) if _is_exported(folder) else _from_elsewhere(folder, model.name)
    for path, leaf in parts.flat(known).items():
        if path not in needed or needed[path].shape != leaf.shape:
            name, shape = parts.path_name(path), needed[path].shape if path in needed else "no such tensor"
            of_texts = np.issubdtype(model.input_dtype, np.integer)
            words = f": number the texts by the {tokens.TOKENIZER} of that network" if of_texts else ""
            raise UserError(f"{folder} has {name} of shape {leaf.shape}, but {model.name} needs {shape} here{words}")
    others = jax.jit(lambda key: parts.without(model.init(key), known))(key)
    return parts.joined(known, jax.tree.map(np.asarray, others))


def tokenizer_of(config: Config) -> str | None:
    """The tokenizer that numbers the tokens of texts, see `tokens.encode`; None if hashes of words do.

    An exported network has no tokenizer, unless the user has copied that of its texts into the folder.
    """
    folder = config.pretrained
    if config.tokenizer is not None:
        return config.tokenizer
    if folder is None or (_is_exported(folder) and not (Path(folder) / tokens.TOKENIZER).is_file()):
        return None
    return folder


def _is_exported(folder: str) -> bool:
    return (Path(folder) / NETWORK).is_file()


def _exported(folder: str, needed: Mapping[tuple, Any]) -> Variables:
    """An exported network, without what has one column per class if the network here has other classes."""
    path = Path(folder)
    try:
        classes = untrusted.read_json(path / NETWORK, {"num_classes": int}, "export the network again")["num_classes"]
    except FileNotFoundError:
        raise UserError(f"{path / NETWORK} is missing: export the network again") from None

    def of_other_classes(name: tuple, leaf: np.ndarray) -> bool:
        there, here = leaf.shape, needed[name].shape if name in needed else leaf.shape
        return there != here and there[:-1] == here[:-1] and there[-1:] == (classes,)

    _require_whole(path)
    leaves = parts.flat(read_arrays(path / VARIABLES)).items()
    return unflatten_dict({name: leaf for name, leaf in leaves if not of_other_classes(name, leaf)})


def _require_whole(path: Path) -> None:
    """Compare the variables with the manifest of the export, if it has one: those of 0.4.0 have none.

    Raises:
      UserError: a file is missing or has changed. Orbax does not notice each changed byte.
    """
    if not (path / manifest.MANIFEST).exists():
        return
    try:
        content = manifest.read(path)
    except manifest.DamageError as error:
        raise UserError(f"{path} is damaged ({error}): export the network again") from None
    for name in content["files"]:
        if reason := manifest.fault(path, content, name):
            raise UserError(f"{path / name} is damaged (it {reason}): export the network again")


def _from_elsewhere(folder: str, network: str) -> Variables:
    row = MODELS.get(network)
    if row is not None and row.pretrained is not None:
        return row.pretrained(folder)
    if Path(folder).is_file():
        raise UserError(f"pretrained={folder} is a file, which {network} cannot read: pass a folder")
    if not Path(folder).is_dir():
        raise UserError(f"pretrained={folder}: there is no such folder")
    if (Path(folder) / "run.flags").exists():
        raise UserError(f"pretrained={folder} is a run folder: run {EXPORT} {folder} NEW and pass NEW")
    able = ", ".join(name for name, each in MODELS.items() if each.pretrained is not None)
    raise UserError(
        f"pretrained={folder} was not written by {EXPORT}; of the folders from elsewhere, only those for {able} are "
        f"known, not for {network}"
    )
