"""Small files of Llama's architecture, as others write them: a folder of safetensors, and GGUF with a tokenizer."""

import json
from pathlib import Path

import numpy as np

VOCABULARY, WIDTH, HIDDEN, DEPTH, HEADS, GROUPS = 288, 64, 128, 2, 4, 2
THETA, EPSILON = 10_000.0, 1e-5
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHANGED = {  # names in GGUF by those in safetensors
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm", "model.layers": "blk",
}  # fmt: skip


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by their names in safetensors. Matrices are [out, in]."""
    random = np.random.default_rng(seed)
    matrix = lambda *shape: (random.standard_normal(shape) * 0.1).astype(np.float32)
    group = WIDTH // HEADS * GROUPS
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (group, WIDTH), "self_attn.v_proj": (group, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN), "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
    }  # fmt: skip
    found = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH), "model.norm.weight": 1 + matrix(WIDTH)}
    for layer in range(DEPTH):
        for name, shape in shapes.items():
            found[f"model.layers.{layer}.{name}.weight"] = matrix(*shape) + (len(shape) == 1)
    return found


def config(**changes: object) -> dict[str, object]:
    """The content of ``config.json``."""
    return {
        "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "intermediate_size": HIDDEN, "rope_theta": THETA, "rms_norm_eps": EPSILON,
        "tie_word_embeddings": True, "hidden_act": "silu", "vocab_size": VOCABULARY,
    } | changes  # fmt: skip


def write_folder(folder: Path, tensors: dict[str, np.ndarray], **changes: object) -> None:
    """Write ``config.json`` and ``model.safetensors``."""
    from safetensors.numpy import save_file  # pyright: ignore[reportMissingImports]

    (folder / "config.json").write_text(json.dumps(config(**changes)), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], kinds: dict[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Write a GGUF file with a tokenizer of bytes and a few merges, and return its weights, as they are dequantised.

    Args:
      path: the new file.
      tensors: those of `weights`.
      kinds: the quantisation of a tensor by the end of its name. Default: F32.
    """
    import gguf  # pyright: ignore[reportMissingImports]

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(DEPTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPSILON)
    names, merges = tokens_and_merges()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_merges(merges)
    writer.add_token_types([3 if name in SPECIAL else 1 for name in names])
    writer.add_chat_template(TEMPLATE)
    stored = {}
    for name, tensor in tensors.items():
        kind = next((kind for end, kind in (kinds or {}).items() if name.endswith(f"{end}.weight")), "F32")
        heads = {"q_proj.weight": HEADS, "k_proj.weight": GROUPS}.get(name.rpartition(".self_attn.")[2], 0)
        changed = name
        for ours, theirs in _CHANGED.items():
            changed = changed.replace(ours, theirs)
        if heads:  # in GGUF the two numbers that are rotated together are neighbours
            rows = tensor.reshape(heads, 2, -1, tensor.shape[1])
            tensor = rows.swapaxes(1, 2).reshape(tensor.shape)
        number = gguf.GGMLQuantizationType[kind]
        data = gguf.quantize(np.ascontiguousarray(tensor), number)
        writer.add_tensor(changed, data, raw_dtype=number)
        back = gguf.dequantize(data, number).reshape(tensor.shape)
        if heads:
            back = back.reshape(heads, len(back) // (2 * heads), 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        stored[name] = back.astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def tokens_and_merges() -> tuple[list[str], list[str]]:
    """The tokens of a tokenizer of bytes, as GPT-2 writes them, and pairs that are merged."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    merges = ["t h", "th e", "Ġ the", "a n", "an d"]
    merged = [pair.replace(" ", "") for pair in merges]
    names = [*SPECIAL, *(letters[byte] for byte in range(256)), *merged]
    names += [f"<unused{number}>" for number in range(VOCABULARY - len(names))]
    return names, merges


def logits(tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """The logits [B, T, V] of tokens [B, T], one head and one position at a time, in float64."""
    w = {name.removesuffix(".weight"): tensor.astype(np.float64) for name, tensor in tensors.items()}
    size = WIDTH // HEADS

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + EPSILON) * w[name]

    def turned(vector: np.ndarray, place: int) -> np.ndarray:
        out = np.empty(size)
        for i in range(size // 2):
            angle = place / THETA ** (2 * i / size)
            a, b = vector[i], vector[i + size // 2]
            out[i], out[i + size // 2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return out

    results = []
    for row in ids:
        x = [w["model.embed_tokens"][token] for token in row]
        for layer in range(DEPTH):
            p = f"model.layers.{layer}."
            normed = [norm(each, p + "input_layernorm") for each in x]
            q, k, v = ([w[f"{p}self_attn.{n}_proj"] @ each for each in normed] for n in "qkv")
            for t in range(len(row)):
                heads = []
                for head in range(HEADS):
                    own, other = slice(head * size, head * size + size), head // (HEADS // GROUPS)
                    shared = slice(other * size, other * size + size)
                    query = turned(q[t][own], t)
                    scores = np.array([query @ turned(k[s][shared], s) for s in range(t + 1)]) / np.sqrt(size)
                    shares = np.exp(scores - scores.max())
                    shares /= shares.sum()
                    heads.append(sum(share * v[s][shared] for s, share in enumerate(shares)))
                x[t] = x[t] + w[p + "self_attn.o_proj"] @ np.concatenate(heads)
            for t in range(len(row)):
                normed_t = norm(x[t], p + "post_attention_layernorm")
                gate = w[p + "mlp.gate_proj"] @ normed_t
                inner = gate / (1 + np.exp(-gate)) * (w[p + "mlp.up_proj"] @ normed_t)
                x[t] = x[t] + w[p + "mlp.down_proj"] @ inner
        results.append([w["model.embed_tokens"] @ norm(each, "model.norm") for each in x])
    return np.array(results)
