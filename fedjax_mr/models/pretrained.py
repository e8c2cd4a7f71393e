"""Pretrained weights from a folder in the format of Hugging Face: ``config.json`` and ``model.safetensors``.

Reading safetensors needs the extra ``text``. Nothing is downloaded.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr import untrusted
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables

WEIGHTS, CONFIG = "model.safetensors", "config.json"

# From our paths to the names of BERT's tensors. The number of the layer replaces {}.
_EMBEDDING = {
    "word/embedding": "embeddings.word_embeddings.weight",
    "position": "embeddings.position_embeddings.weight",
    "type": "embeddings.token_type_embeddings.weight",
    "norm": "embeddings.LayerNorm",
}
_LAYER = {
    "attention/query": "encoder.layer.{}.attention.self.query",
    "attention/key": "encoder.layer.{}.attention.self.key",
    "attention/value": "encoder.layer.{}.attention.self.value",
    "attention/out": "encoder.layer.{}.attention.output.dense",
    "attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "perceptron/hidden": "encoder.layer.{}.intermediate.dense",
    "perceptron/out": "encoder.layer.{}.output.dense",
    "perceptron_norm": "encoder.layer.{}.output.LayerNorm",
}


def bert(folder: Path | str, *, heads: int, depth: int) -> Variables:
    """Read the weights of an encoder of BERT's architecture, for `transformer.BERT`. It has no classifier.

    Args:
      folder: the folder with `CONFIG` and `WEIGHTS`.
      heads: number of heads of the network, which the shapes of the weights do not show.
      depth: number of layers of the network.

    Raises:
      UserError: the folder, a file or a tensor is missing, or the weights are those of another network.
    """
    config = _config(Path(folder))
    expected = {
        "model_type": "bert", "hidden_act": "gelu", "num_attention_heads": heads, "num_hidden_layers": depth,
        "layer_norm_eps": 1e-12,
    }  # fmt: skip
    for name, value in expected.items():
        if config.get(name) != value:
            raise UserError(f"{folder}/{CONFIG} has {name}={config.get(name)}, but the network has {value}")
    tensors = _tensors(Path(folder))
    params: dict[str, Any] = {}
    for block, names in [("embedding", _EMBEDDING), *((f"layer{i + 1}", _LAYER) for i in range(depth))]:
        for path, name in names.items():
            # Layers are named layer1, layer2, ... here, and 0, 1, ... there.
            name = name.format(int(block[5:]) - 1) if names is _LAYER else name
            for leaf, tensor in _leaves(path, name, tensors, Path(folder)).items():
                _put(params, f"{block}/{leaf}", tensor)
    return {"params": params}


def _leaves(path: str, name: str, tensors: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a layer by our paths. PyTorch's matrices [O, I] are transposed."""

    def tensor(name: str) -> np.ndarray:
        found = tensors.get(name, tensors.get(f"bert.{name}"))
        if found is None:
            raise UserError(f"{folder / WEIGHTS} has no tensor {name}: it is not an encoder of BERT's architecture")
        return found.astype(np.float32)

    if name.endswith("weight"):
        return {path: tensor(name)}
    weight, bias = tensor(f"{name}.weight"), tensor(f"{name}.bias")
    kernel = {f"{path}/kernel": np.ascontiguousarray(weight.T)} if weight.ndim == 2 else {f"{path}/scale": weight}
    return {**kernel, f"{path}/bias": bias}


def _put(tree: dict[str, Any], path: str, leaf: np.ndarray) -> None:
    *parents, name = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = leaf


def _config(folder: Path) -> dict[str, Any]:
    try:
        return untrusted.read_json(folder / CONFIG, dict)
    except FileNotFoundError:
        raise UserError(f"{folder} is not a folder with pretrained weights: it has no {CONFIG}") from None


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    try:
        from safetensors import numpy  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("pretrained weights need safetensors: pip install 'fedjax-mr[text]'") from None
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder} has no {WEIGHTS}")
    try:
        return numpy.load_file(path)
    except Exception as error:  # safetensors and NumPy raise many kinds for the headers that a file may have
        raise UserError(f"{path} is damaged or of another kind ({' '.join(str(error).split())[:120]})") from None
