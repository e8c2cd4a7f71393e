"""Samples per second of training an adapter: this engine, and PyTorch with transformers and peft, on the same core.

    python experiments/lab/adapters.py [--threads=1] [--batch=16] [--length=32] [--repeats=5]

BERT in the size of MiniLM-L6 with random weights, LoRA of rank 8 beside the queries and values of attention, a trained
classifier of two classes, SGD with momentum, without dropout; sentences of ``--length`` tokens without padding.
``ours`` is a round of one client as users run it (FedIT), ``peft`` a plain loop over its batches. The two take turns in
one process; medians are printed. It needs transformers and peft, best in a separate environment:

    pip install -c constraints.txt -e '.[parity]' transformers peft
"""

import argparse
import functools
import statistics
import time

import jax
import numpy as np
import torch
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from transformers import BertConfig, BertModel  # pyright: ignore[reportMissingImports]

import fedjax_mr as fmr
from benchmark import LR, MOMENTUM, Contestant, take_turns
from fedjax_mr import trees
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.models import MODELS, ModelRow
from fedjax_mr.models.transformer import BERT

VOCABULARY, SAMPLES, RANK = 30_522, 160, 8


class Peft:
    """The opponent: its steps and its timings."""

    def __init__(self, x: np.ndarray, y: np.ndarray, batch: int) -> None:
        """Build the network and its adapters."""
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value"])
        self.encoder = get_peft_model(BertModel(config, add_pooling_layer=False), adapters).train()
        self.head = torch.nn.Linear(384, 2)
        parameters = [parameter for parameter in self.encoder.parameters() if parameter.requires_grad] + list(
            self.head.parameters()
        )
        self.trained = sum(parameter.numel() for parameter in parameters)
        self.optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
        self.x, self.y, self.batch = torch.as_tensor(x).long(), torch.as_tensor(y).long(), batch
        self.timings: list[tuple[int, float]] = []  # samples and seconds of each timing

    def race(self) -> None:
        """Train one epoch and note its samples and seconds."""
        started = time.perf_counter()
        for rows in torch.randperm(len(self.y)).split(self.batch):
            x = self.x[rows]
            states = self.encoder(input_ids=x, attention_mask=torch.ones_like(x)).last_hidden_state
            loss = torch.nn.functional.cross_entropy(self.head(states.mean(1)), self.y[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.timings.append((len(self.y), time.perf_counter() - started))


def ours(x: np.ndarray, y: np.ndarray, batch: int) -> Contestant:
    """Our engine with one client, and its compiled round."""
    MODELS["encoder"] = ModelRow(functools.partial(BERT, dropout=0.0), input_dtype=np.int32)
    config = fmr.Config(
        strategy="fedit", model="encoder", adapter="lora", lora_rank=RANK, partition="iid", clients=1, cohort=1,
        local_epochs=1, batch_size=batch, lr=LR, momentum=MOMENTUM,
    )  # fmt: skip
    dataset = fmr.Dataset("sentences", x, y, x[:batch], y[:batch], 2, vocabulary=VOCABULARY)
    return Contestant("ours", config, dataset=dataset, devices=1)


def main() -> None:
    """Let both train and print their speeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("--threads", 1), ("--batch", 16), ("--length", 32), ("--repeats", 5)):
        parser.add_argument(flag, type=int, default=default)
    options = parser.parse_args()
    set_up_jax(devices=1, cohort_size=1)
    torch.set_num_threads(options.threads)
    random = np.random.default_rng(0)
    x = random.integers(1000, VOCABULARY, (SAMPLES, options.length)).astype(np.int32)
    y = random.integers(0, 2, SAMPLES).astype(np.int32)
    contestant, opponent = ours(x, y, options.batch), Peft(x, y, options.batch)
    for racer in (contestant, opponent):
        racer.race()  # warms up
        racer.timings.clear()
    take_turns([contestant, opponent], options.repeats)
    speeds = {
        "ours": contestant.speed(),
        "peft": statistics.median(samples / seconds for samples, seconds in opponent.timings),
    }
    trained = trees.num_bytes(contestant.model.init(jax.random.key(0))["params"]) // 4
    print(f"trained parameters: ours {trained:,}, peft {opponent.trained:,}")
    print(*(f"{name} {speed:.1f} samples/s" for name, speed in speeds.items()), sep=", ", end="; ")
    print(f"ratio {speeds['ours'] / speeds['peft']:.2f}; {options.threads} thread(s), jax {jax.__version__},", end=" ")
    print(f"PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
