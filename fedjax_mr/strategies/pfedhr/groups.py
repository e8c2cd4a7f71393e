"""Grouping of blocks into K groups by function (pFedHR, equation 2: minimise the sum of distances to the centres)."""

from collections.abc import Sequence

import numpy as np

from fedjax_mr.client.samples import Array
from fedjax_mr.strategies.pfedhr import similarity

ITERATIONS = 10  # of k-means in the authors' code


def k_medoids(distances: np.ndarray, count: int) -> np.ndarray:
    """k-medoids: the group 0..K-1 of each of L blocks, K = min(count, L). The centre of a group is one of its blocks.

    The algorithm is PAM (Kaufman and Rousseeuw, 1990): medoids are added greedily, then swapped with other blocks while
    the sum of distances decreases. It is deterministic, and no group is empty.

    Args:
      distances: [L, L], symmetric.
      count: K.
    """
    size = len(distances)
    count = min(count, size)
    total = lambda medoids: distances[:, medoids].min(axis=1).sum()
    medoids: list[int] = []
    while len(medoids) < count:
        medoids.append(min((i for i in range(size) if i not in medoids), key=lambda i: total([*medoids, i])))
    best = total(medoids)
    while True:
        swaps = [
            [*medoids[:place], block, *medoids[place + 1 :]]
            for place in range(count)
            for block in range(size)
            if block not in medoids
        ]
        candidate = min(swaps, key=total, default=medoids)
        if total(candidate) >= best - 1e-12:
            break
        medoids, best = candidate, total(candidate)
    labels = distances[:, medoids].argmin(axis=1)
    labels[medoids] = np.arange(count)  # two medoids at distance 0 would otherwise share a group
    return labels


def averaged_k_means(
    entering: Sequence[np.ndarray], leaving: Sequence[np.ndarray], count: int, *, seed: int
) -> np.ndarray:
    """k-means as in the authors' code: the group 0..K-1 of each of L blocks. Centres are means of averaged activations.

    Feature maps are averaged over positions. All activations are padded to the same width with constant columns, which
    CKA ignores. The initial centres are K random blocks, and there are ten iterations. An empty group keeps its centre;
    in the authors' code its centre becomes zero.

    Args:
      entering: inputs of each block for the same samples, each `averaged` [P, W].
      leaving: outputs of each block.
      count: K.
      seed: seed of the initial centres.
    """
    pairs = np.stack([_padded(entering), _padded(leaving)], axis=1)  # [L, 2, P, W]
    size, count = len(pairs), min(count, len(pairs))
    centres = pairs[np.random.default_rng(seed).choice(size, count, replace=False)]
    labels = np.zeros(size, np.int64)
    for _ in range(ITERATIONS):
        similarities = [similarity.cka([*pairs[:, side], *centres[:, side]])[:size, size:] for side in (0, 1)]
        labels = similarity.distances(*similarities).argmin(axis=1)
        centres = np.stack(
            [pairs[labels == k].mean(axis=0) if (labels == k).any() else centres[k] for k in range(count)]
        )
    return labels


def averaged(activations: Array) -> np.ndarray:
    """Average activations [P, ..., W] over all axes but the first and the last: [P, W]."""
    activations = np.asarray(activations)
    return activations.mean(axis=tuple(range(1, activations.ndim - 1)))


def _padded(activations: Sequence[np.ndarray]) -> np.ndarray:
    width = max(each.shape[1] for each in activations)
    return np.stack([np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=1.0) for each in activations])
