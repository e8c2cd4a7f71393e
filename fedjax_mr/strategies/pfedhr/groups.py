"""Blocks in K groups of like function (pFedHR, equation 2: the sum of distances to the groups' centres is small)."""

from collections.abc import Sequence

import numpy as np

from fedjax_mr.engine.local import Array
from fedjax_mr.strategies.pfedhr import similarity

ITERATIONS = 10  # of the authors' k-means


def k_medoids(distances: np.ndarray, count: int) -> np.ndarray:
    """The group 0..K-1 of each of L blocks, K = min(count, L); the centre of a group is one of its blocks.

    Kaufman and Rousseeuw's PAM (1990): medoids are added one by one, each the best one, then exchanged with other
    blocks as long as the sum of distances falls. Nothing is random, and no group is empty.

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
        tried = min(swaps, key=total, default=medoids)
        if total(tried) >= best - 1e-12:
            break
        medoids, best = tried, total(tried)
    labels = distances[:, medoids].argmin(axis=1)
    labels[medoids] = np.arange(count)  # twins of a medoid are as near to each other's group
    return labels


def averaged_k_means(
    entering: Sequence[np.ndarray], leaving: Sequence[np.ndarray], count: int, *, seed: int
) -> np.ndarray:
    """The group 0..K-1 of each of L blocks as the authors' code does: centres are means of averaged activations.

    Feature maps are averaged over their places, and all activations are filled up to the same width by constant
    columns, which CKA ignores. Centres start as K different blocks drawn at random and move ten times; a group without
    blocks keeps its centre (the authors': a centre of zeros).

    Args:
      entering: what enters each block for the same samples, each `averaged` [P, W].
      leaving: what leaves it.
      count: K.
      seed: of the first centres.
    """
    pairs = np.stack([_filled(entering), _filled(leaving)], axis=1)  # [L, 2, P, W]
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
    """Activations [P, ..., W] averaged over all axes between the first and the last: [P, W]."""
    activations = np.asarray(activations)
    return activations.mean(axis=tuple(range(1, activations.ndim - 1)))


def _filled(activations: Sequence[np.ndarray]) -> np.ndarray:
    width = max(each.shape[1] for each in activations)
    return np.stack([np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=1.0) for each in activations])
