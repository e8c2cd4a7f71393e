"""Tokens per second and memory of LoRA over one frozen language model: this engine, and PyTorch with peft.

    python experiments/lab/language.py speed --weights=FILE.gguf [--clients=1] [--batch=4] [--length=64] [--repeats=3]
    python experiments/lab/language.py memory --weights=FILE.gguf [--clients=8] [--batch=1] [--length=32]

SmolLM2-135M in float32, LoRA of rank 8 on attention and perceptron, Adam, synthetic tokens without padding, and
``--steps`` batches per client. ``ours`` is a round of K clients in one program as users run it (FedAvg), ``peft`` a
plain loop over the batches of the same clients, one after another, in transformers with peft, with the weights of the
same file; without ``--weights``, both have random weights. The two take turns in one process, and medians are printed.
``share`` is the share of the limit: four operations per multiply-add of the network (two forward and two backward,
because the base has no gradient) over the rate of a large matrix product that takes turns with the two.

``memory`` runs ours alone. Its memory is the peak of the device, on CPUs that of the process. ``--network=llama_tiny``
has no opponent.

It needs transformers and peft for ``speed``, best in a separate environment:

    pip install -c constraints.txt -e '.[parity,text]' transformers peft
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedjax_mr as fmr
from benchmark import Contestant, Product, take_turns
from fedjax_mr import trees
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.models.__main__ import multiply_adds
from fedjax_mr.tasks import Language, with_metrics

RANK, LR, VOCABULARY = 8, 1e-4, 49_152


class Peft:
    """The opponent: its steps and its timings."""

    def __init__(self, weights: Path | None, x: np.ndarray, y: np.ndarray, batch: int) -> None:
        """Read the network, or make one of SmolLM2's sizes on the GPU if there is one, and add its adapters."""
        import torch
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
        from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

        self.torch = torch
        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        if weights is None:
            sizes = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
            more = {"intermediate_size": 1536, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
            base = LlamaForCausalLM(LlamaConfig(**sizes, **more)).to(device)
        else:
            base = LlamaForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
            base = base.to(device)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names)
        self.network: Any = get_peft_model(base, config).train()
        parameters = [each for each in self.network.parameters() if each.requires_grad]
        self.trained = sum(each.numel() for each in parameters)
        self.optimizer = torch.optim.Adam(parameters, lr=LR)
        self.x, self.y = (torch.as_tensor(each).long().to(device) for each in (x, y))
        self.batch = batch
        self.timings: list[tuple[int, float]] = []  # samples and seconds of each timing

    def race(self) -> None:
        """Train one epoch and note its samples and seconds."""
        started = time.perf_counter()
        for rows in self.torch.randperm(len(self.y)).split(self.batch):
            logits = self.network(input_ids=self.x[rows]).logits
            loss = self.torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.y[rows].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        loss.item()  # waits for a GPU
        self.timings.append((len(self.y), time.perf_counter() - started))


def contestant(options: argparse.Namespace, x: np.ndarray, y: np.ndarray) -> Contestant:
    """Our engine with K clients, and its compiled round."""
    config = fmr.Config(
        strategy="fedavg", model=options.network, pretrained=options.weights, adapter="lora", lora_rank=RANK,
        lora_targets="*/kernel", partition="iid", clients=options.clients, cohort=options.clients, local_epochs=1,
        batch_size=options.batch, optimizer="adam", lr=LR, precision=options.precision,
        frozen_dtype=options.frozen_dtype, remat=options.remat,
    )  # fmt: skip
    task = with_metrics(Language(width=VOCABULARY))
    dataset = fmr.Dataset("tokens", x, y, x[:1], y[:1], vocabulary=VOCABULARY, task=task)
    return Contestant("ours", config, dataset=dataset, devices=1, warm_up=1, lanes=options.lanes)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory"))
    parser.add_argument("--network", default="smollm2_135m")
    parser.add_argument("--weights")
    for flag, default in (("--clients", 1), ("--batch", 4), ("--length", 64), ("--steps", 4), ("--repeats", 3)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--frozen_dtype", default="float32")
    parser.add_argument("--remat", action="store_true")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each contestant: tokens per second, and the peak memory of the device (on CPUs of the process)."""
    set_up_jax(devices=1, cohort_size=options.clients)
    count = options.clients * options.batch * options.steps
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (count, options.length + 1)).astype(np.int32)
    x, y = tokens[:, :-1], tokens[:, 1:]
    ours = contestant(options, x, y)
    racers: list[Any] = [ours]
    if options.what == "speed" and options.network == "smollm2_135m":
        opponent = Peft(Path(options.weights) if options.weights else None, x, y, options.batch)
        opponent.torch.set_num_threads(options.threads)
        opponent.race()  # warms up
        opponent.timings.clear()
        racers.append(opponent)
    product = Product(1)
    take_turns([*racers, product], options.repeats)
    operations = 4 * multiply_adds(ours.model) / options.length  # per token
    for racer in racers:
        rates = [samples * options.length / seconds for samples, seconds in racer.timings]
        trained = trees.num_bytes(ours.model.init(jax.random.key(0))["params"]) // 4 if racer is ours else racer.trained
        yield {
            "clients": options.clients, "engine": "ours" if racer is ours else "peft", "trained": trained,
            "tokens_per_second": statistics.median(rates), "lowest": min(rates), "highest": max(rates),
            "share": statistics.median(rates) * operations / product.rate(),
            "memory_gib": (ours.peak_memory_bytes or 0) / 1024**3 if racer is ours else None,
            "compile_seconds": ours.compile_seconds if racer is ours else None,
        }  # fmt: skip


def main() -> None:
    """Measure and print."""
    for row in measure(options_of()):
        print(
            "  ".join(
                f"{name} {value:,.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )


if __name__ == "__main__":
    main()
