"""FedMR: shuffle the layers of the K uploaded models instead of averaging them.

Hu, Yue, Xie, Chen, Huang, Wei, Lian, Liu, Chen: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model
Recombination, KDD 2024, Algorithm 1 (first version, by Hu, Yue, Ling, Wei, Chen: FedMR: Federated Learning via Model
Recombination, arXiv 2022).

Deviations. From the paper: the default unit is a single tensor (``leaf``), as in the authors' released code; the paper
recombines whole layers (``layer``). The K models start as copies of one initialisation, as released; Algorithm 1
writes K models (``independent``). From the released code: of the tensors there, those that change no output (a batch
counter per BatchNorm, ResNet-20's unused last BatchNorm) are left out unless ``--authors_state`` adds them, so leaves
are fewer: 96 against 119 in ResNet-20, 84 against 97 in VGG-16. Segments divide layers as in the paper, not leaves as
released (``segment_of``).

Secure recombination (``secure``; KDD'24, Appendix B): the K clients exchange whole layers among themselves beside what
the server does, so the models of the next round have the same distribution with and without it: see `secure_exchange`
in transforms.py.
"""

import dataclasses
import math
from typing import NamedTuple

import jax

from fedjax_mr import trees
from fedjax_mr.models.base import Layer, Variables
from fedjax_mr.strategies.base import (
    Problem,
    Strategy,
    copies_of_one,
    independent_starts,
    plain_training,
    unit_permutations,
    view,
)
from fedjax_mr.strategies.hyper import field
from fedjax_mr.strategies.transforms import secure_exchange


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedMR's own settings."""

    unit: str = field(
        "leaf",
        "what is exchanged in one piece: a tensor (leaf), all tensors of a module (layer), a run of layers (segment)",
        choices=("leaf", "layer", "segment"),
        source="leaf: authors' code; layer: KDD'24 Algorithm 1; segment: KDD'24 FedMR-p",
    )
    segment: float = field(
        0.5,
        "x of FedMR-p x, the share of the layers in one segment (unit=segment): ceil(1/x) segments, 1 = whole models",
        low=0,
        open_low=True,
        high=1,
        source="KDD'24, section 5.4.2; the default is our choice",
    )
    segment_of: str = field(
        "layers",
        "what a segment divides: the layers in forward order (paper), or the tensors (authors' code)",
        choices=("layers", "leaves"),
        source="KDD'24, section 5.4.2",
    )
    stage1_rounds: int = field(
        0,
        "n of the two-stage FedMR-n: rounds of uniform averaging before recombination starts",
        unit="rounds",
        low=0,
        source="KDD'24: 0 for the CNN, 100 for ResNet-20 and VGG-16",
    )
    start: str = field(
        "copies",
        "the K initial models: copies of one initialisation (authors' code), or independent ones (Algorithm 1)",
        choices=("copies", "independent"),
        source="authors' code",
    )
    secure: bool = field(
        False,
        "secure recombination: the clients exchange layers among themselves beside what the server does",
        source="KDD'24, Appendix B",
    )
    secure_when: str = field(
        "before_upload",
        "when layers are exchanged: before_upload (encrypted for the server), before_training (in clear), or both",
        choices=("before_upload", "before_training", "both"),
        source="KDD'24, Appendix B, names the first two; the default is our choice",
    )
    secure_share: float = field(
        0.5,
        "the share of its layers that a client sends in one exchange: each with this probability",
        low=0,
        high=1,
        source="KDD'24, Figure 13, shows 2 of 4",
    )
    secure_repetitions: int = field(
        1,
        "exchanges each time",
        low=1,
        high=1000,
        source="KDD'24, Appendix B, allows several; the default is our choice",
    )
    server_recombines: bool = field(
        True, "the server recombines the uploaded models, which is FedMR itself", source="KDD'24, Algorithm 1"
    )


class State(NamedTuple):
    """K models, leaves [K, ...]."""

    models: Variables


def recombination_units(hyper: Hyper, layers: tuple[Layer, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the units as positions of leaves, in forward order.

    Segments: layer j (from 1) of L layers belongs to segment ceil(j / (x L)) (KDD'24, section 5.4.2). In the authors'
    code a new segment starts at the first leaf i (from 0) of M with i >= c x M, c = 1, 2, ...
    """
    leaves = [leaf for layer in layers for leaf in layer.leaves]
    if hyper.unit == "leaf":
        return tuple((leaf,) for leaf in leaves)
    if hyper.unit == "layer":
        return tuple(layer.leaves for layer in layers)
    if hyper.segment_of == "leaves":
        numbers = [math.floor(_exact(i / (hyper.segment * len(leaves)))) for i in range(len(leaves))]
        pieces = [(leaf,) for leaf in leaves]
    else:
        numbers = [math.ceil(_exact(j / (hyper.segment * len(layers)))) for j in range(1, len(layers) + 1)]
        pieces = [layer.leaves for layer in layers]
    segments: dict[int, tuple[int, ...]] = {}
    for number, piece in zip(numbers, pieces, strict=True):
        segments[number] = segments.get(number, ()) + piece
    return tuple(segments.values())


def _exact(value: float) -> float:
    """Remove the rounding error of a quotient that is meant to be whole, such as 3 / (0.3 * 10)."""
    return round(value, 9)


def recombine(models: Variables, units: trees.Units, key: jax.Array) -> Variables:
    """Return the K models [K, ...] with the copies of every unit randomly permuted; consumes ``key``."""
    count = jax.tree.leaves(models)[0].shape[0]
    return trees.permute(models, units=units, permutations=unit_permutations(key, len(units), count))


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return FedMR."""
    units = recombination_units(hyper, problem.layers)

    def init(key):
        start = copies_of_one if hyper.start == "copies" else independent_starts
        return State(start(problem, key))

    def dispatch(state, cohort, key):
        return {"model": state.models}

    def server_update(state, uploads, cohort, round, key):
        models = jax.lax.cond(
            round < hyper.stage1_rounds,
            lambda models: trees.broadcast(trees.mean(models), problem.cohort_size),
            lambda models: recombine(models, units, key) if hyper.server_recombines else models,
            uploads["model"],
        )
        return State(models), {}

    strategy = Strategy(
        init,
        dispatch,
        plain_training(problem),
        server_update,
        global_model=lambda state: trees.mean(state.models),
        models=view("models", stacked=True),
    )
    if not hyper.secure:
        return strategy
    when, share, repetitions = hyper.secure_when, hyper.secure_share, hyper.secure_repetitions
    return secure_exchange(strategy, problem, when=when, share=share, repetitions=repetitions)
