"""FedMR: recombine the layers of the K uploaded models instead of averaging them.

Hu, Yue, Xie, Chen, Huang, Wei, Lian, Liu, Chen: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model
Recombination, KDD 2024, Algorithm 1 (first version, by Hu, Yue, Ling, Wei, Chen: FedMR: Federated Learning via Model
Recombination, arXiv 2022).

Deviations from the paper, as in the authors' released code: the default unit of recombination is a single tensor
(``leaf``), where the paper recombines whole layers (``layer``). The K models start as copies of one initialisation,
where Algorithm 1 starts from K models (``independent``).

Deviations from the released code:
* Tensors that do not affect any output (a batch counter per BatchNorm, ResNet-20's unused last BatchNorm) are omitted
  unless the setting ``authors_state`` adds them. So there are fewer leaves: 96 instead of 119 in ResNet-20, 84 instead
  of 97 in VGG-16.
* Segments divide the layers, as in the paper, not the leaves (``segment_of``).

Asynchronous clients (``mode=async``) are ours, without a paper: M models circulate, the K that have returned are
recombined among themselves, and they are sent again. With M = K this is FedMR. With K = 1 nothing is recombined.

Secure recombination (KDD'24, Appendix B): the K clients also exchange whole layers among themselves. It is a link for
any method, see channel/exchange.py. The models of the next round have the same distribution with and without it.
"""

import dataclasses
import math

import jax

from fedjax_mr import trees
from fedjax_mr.models.base import Layer, Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import STARTS, circulating, returned, unit_permutations


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedMR."""

    unit: str = field(
        "leaf",
        "unit of recombination: a tensor (leaf), all tensors of a module (layer), or consecutive layers (segment)",
        choices=("leaf", "layer", "segment"),
        source="leaf: authors' code; layer: KDD'24 Algorithm 1; segment: KDD'24 FedMR-p",
    )
    segment: float = field(
        0.5,
        "x of FedMR-p x, share of the layers in one segment (unit=segment): ceil(1/x) segments; 1 keeps models whole",
        static=True,
        low=0,
        open_low=True,
        high=1,
        source="KDD'24, section 5.4.2; the default is our choice",
    )
    segment_of: str = field(
        "layers",
        "objects that segments divide: layers in forward order (paper), or tensors (leaves; the authors' code)",
        choices=("layers", "leaves"),
        source="KDD'24, section 5.4.2",
    )
    stage1_rounds: int = field(
        0,
        "n of the two-stage FedMR-n: rounds of uniform averaging before recombination starts; 0 disables this stage",
        unit="rounds",
        low=0,
        source="KDD'24: 0 for the CNN, 100 for ResNet-20 and VGG-16",
    )
    start: str = field(
        "copies",
        "the K initial models: copies of one initialisation (authors' code), or independent ones (Algorithm 1)",
        choices=tuple(STARTS),
        source="authors' code",
    )
    server_recombines: bool = field(
        True, "recombine the uploaded models on the server, as FedMR does", source="KDD'24, Algorithm 1"
    )


def recombination_units(hyper: Hyper, layers: tuple[Layer, ...]) -> tuple[tuple[int, ...], ...]:
    """The units of recombination as positions of leaves, in forward order.

    Layer j (from 1) of L layers belongs to segment ceil(j / (x L)) (KDD'24, section 5.4.2). In the authors' code, a new
    segment starts at the first leaf i (from 0) of M with i >= c x M, c = 1, 2, ... The two leaves of an adapter (LoRA)
    are one: a leaf of one client and the other leaf of another client are no adapter of either.
    """
    pieces = [unit for layer in layers for unit in layer.units]
    if hyper.unit == "leaf":
        return tuple(pieces)
    if hyper.unit == "layer":
        return tuple(layer.leaves for layer in layers)
    if hyper.segment_of == "leaves":
        numbers = [math.floor(_exact(i / (hyper.segment * len(pieces)))) for i in range(len(pieces))]
    else:
        numbers = [math.ceil(_exact(j / (hyper.segment * len(layers)))) for j in range(1, len(layers) + 1)]
        pieces = [layer.leaves for layer in layers]
    segments: dict[int, tuple[int, ...]] = {}
    for number, piece in zip(numbers, pieces, strict=True):
        segments[number] = segments.get(number, ()) + piece
    return tuple(segments.values())


def _exact(value: float) -> float:
    """Remove the rounding error of a quotient that should be an integer, such as 3 / (0.3 * 10)."""
    return round(value, 9)


def recombine(models: Variables, units: trees.Units, key: jax.Array) -> Variables:
    """Permute the K copies of every unit at random, over K models [K, ...]; consumes ``key``."""
    count = jax.tree.leaves(models)[0].shape[0]
    return trees.mix(models, unit_permutations(key, len(units), count), units=units)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedMR."""
    units = recombination_units(hyper, problem.layers)

    def server_update(state, uploads, cohort, round, key):
        models = jax.lax.cond(
            round < hyper.stage1_rounds,
            lambda models: trees.broadcast(trees.mean(models), problem.cohort_size),
            lambda models: recombine(models, units, key) if hyper.server_recombines else models,
            uploads["model"],
        )
        return state._replace(models=returned(state.models, models, cohort)), {}

    return circulating(problem, start=STARTS[hyper.start])._replace(server_update=server_update)
