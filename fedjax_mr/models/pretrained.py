"""Pretrained weights: a folder in the format of Hugging Face (``config.json``, ``model.safetensors``), or a GGUF file.

Both need the extra ``text``. Nothing is downloaded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_mr import files, gguf_files, untrusted
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


class _Names(NamedTuple):
    """The names of a tensor of Llama elsewhere. The number of the layer replaces {}."""

    safetensors: str
    gguf: str


_LLAMA = {
    "embedding/embedding": _Names("model.embed_tokens", "token_embd"),
    "norm/scale": _Names("model.norm", "output_norm"),
}
_LLAMA_LAYER = {
    "attention_norm/scale": _Names("model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    "attention/query/kernel": _Names("model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    "attention/key/kernel": _Names("model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    "attention/value/kernel": _Names("model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    "attention/out/kernel": _Names("model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    "perceptron_norm/scale": _Names("model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    "perceptron/gate/kernel": _Names("model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    "perceptron/up/kernel": _Names("model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    "perceptron/down/kernel": _Names("model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
}
_SIZES = {  # from the fields of `llama.Llama` to the names elsewhere
    "width": _Names("hidden_size", "llama.embedding_length"),
    "depth": _Names("num_hidden_layers", "llama.block_count"),
    "heads": _Names("num_attention_heads", "llama.attention.head_count"),
    "groups": _Names("num_key_value_heads", "llama.attention.head_count_kv"),
    "hidden": _Names("intermediate_size", "llama.feed_forward_length"),
    "theta": _Names("rope_theta", "llama.rope.freq_base"),
    "epsilon": _Names("rms_norm_eps", "llama.attention.layer_norm_rms_epsilon"),
}
_LLAMA_CONFIG = {  # of what `llama.Llama` cannot change; each may be missing
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
}  # fmt: skip


def llama(path: Path | str, *, sizes: Mapping[str, float]) -> Variables:
    """Read the weights of a network of Llama's architecture with tied embeddings, for `llama.Llama`.

    Args:
      path: a GGUF file, or a folder with `CONFIG` and `WEIGHTS`.
      sizes: the fields of the network.

    Raises:
      UserError: a file or a tensor is missing, or the weights are those of another network.
    """
    path = Path(path)
    of_gguf = gguf_files.is_gguf(path)
    found = _gguf_sizes(path) if of_gguf else _config_sizes(path)
    for name, value in sizes.items():
        if not np.isclose(found.get(name, np.nan), value, rtol=1e-5):  # GGUF has float32
            raise UserError(f"{path} has {name}={found.get(name, 'unknown')}, but the network has {name}={value}")
    tensors = gguf_files.read_tensors(path) if of_gguf else _tensors(path)
    params: dict[str, Any] = {}
    for leaf, names in _llama_names(int(sizes["depth"])).items():
        name = f"{names.gguf if of_gguf else names.safetensors}.weight"
        if (tensor := tensors.pop(name, None)) is None:
            raise UserError(f"{path} has no tensor {name}: it is not a network of Llama's architecture")
        heads = {"query": "heads", "key": "groups"}.get(leaf.split("/")[-2])
        tensor = _halves(tensor, int(sizes[heads])) if of_gguf and heads else tensor
        _put(params, leaf, np.ascontiguousarray(tensor.T if leaf.endswith("kernel") else tensor, np.float32))
    if unused := [name for name in tensors if not name.startswith("rope_freqs")]:
        raise UserError(f"{path} has a tensor {unused[0]}, which networks of Llama's architecture here do not have")
    return {"params": params}


def write_llama(module: Any, variables: Variables, folder: Path) -> None:
    """Write a `llama.Llama` as `CONFIG` and `WEIGHTS` that the package transformers loads.

    Args:
      module: the network.
      variables: all its variables, with adapters merged.
      folder: an existing folder.

    Raises:
      UserError: the package safetensors is not installed.
    """
    try:
        from safetensors import numpy  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("this export needs safetensors: pip install 'fedjax-mr[text]'") from None
    tensors = {}
    for leaf, names in _llama_names(module.depth).items():
        tensor = variables["params"]
        for key in leaf.split("/"):
            tensor = tensor[key]
        tensor = np.asarray(tensor, np.float32)
        tensors[f"{names.safetensors}.weight"] = np.ascontiguousarray(tensor.T if leaf.endswith("kernel") else tensor)
    sizes = {names.safetensors: getattr(module, field) for field, names in _SIZES.items()}
    theta = sizes["rope_theta"]
    config = sizes | _LLAMA_CONFIG | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": module.num_classes,
        "tie_word_embeddings": True, "max_position_embeddings": 8192, "dtype": "float32",
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
    }  # fmt: skip
    with files.atomic_write(folder / CONFIG) as new:
        new.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with files.atomic_write(folder / WEIGHTS) as new:
        numpy.save_file(tensors, new, metadata={"format": "pt"})


def _llama_names(depth: int) -> dict[str, _Names]:
    """The names elsewhere of all tensors by our paths. Layers are layer1, layer2, ... here, and 0, 1, ... there."""
    layers = {
        f"layer{number + 1}/{path}": _Names(*(name.format(number) for name in names))
        for number in range(depth)
        for path, names in _LLAMA_LAYER.items()
    }
    return _LLAMA | layers


def _config_sizes(folder: Path) -> dict[str, Any]:
    config = _config(folder)
    expected = {"model_type": "llama", "tie_word_embeddings": True} | _LLAMA_CONFIG
    for name, value in expected.items():
        if config.get(name, _LLAMA_CONFIG.get(name)) != value:
            raise UserError(f"{folder}/{CONFIG} has {name}={config.get(name)}, but the network has {value}")
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"{folder}/{CONFIG} has rope_type={rope['rope_type']}, but the network has default")
    config = {"rope_theta": rope.get("rope_theta", 10_000.0)} | config
    return {field: config[names.safetensors] for field, names in _SIZES.items() if names.safetensors in config}


def _gguf_sizes(path: Path) -> dict[str, Any]:
    keys = {names.gguf: field for field, names in _SIZES.items()}
    fields = gguf_files.read_fields(path, "general.architecture", *keys)
    if (kind := fields.get("general.architecture")) != "llama":
        raise UserError(f"{path} holds a network of the architecture {kind}, not llama")
    return {field: fields[key] for key, field in keys.items() if key in fields}


def _halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys [O, I] in our order: the pair of numbers that is rotated is i and i + D / 2 of a head.

    In GGUF, the two are neighbours.
    """
    rows = tensor.reshape(heads, -1, 2, tensor.shape[-1])
    return rows.swapaxes(1, 2).reshape(tensor.shape)


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
