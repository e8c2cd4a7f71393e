"""Similarity of blocks: linear centred kernel alignment (CKA) of their inputs and of their outputs.

CKA: Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019. With P samples as rows,
CKA(A, B) = <H A A' H, H B B' H> / (|H A A' H| |H B B' H|), H = I - 11'/P. The distance is pFedHR's equation 3.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.client.samples import Array

MIN_SUM = 1e-6  # lower bound of a sum of two CKAs, so that constant activations have a finite distance


@jax.jit
def gram(activations: jax.Array) -> jax.Array:
    """The centred Gram matrix of activations [P, ...] as a vector [P * P] of norm 1; 0 if they are constant."""
    rows = activations.reshape(activations.shape[0], -1)
    rows = rows - jnp.mean(rows, axis=0, keepdims=True)
    rows = rows / jnp.maximum(jnp.max(jnp.abs(rows)), jnp.finfo(rows.dtype).tiny)  # avoids overflow of fourth powers
    product = jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST).reshape(-1)
    return product / jnp.maximum(jnp.linalg.norm(product), jnp.finfo(rows.dtype).tiny)


@jax.jit
def _products(grams: jax.Array) -> jax.Array:
    return jnp.matmul(grams, grams.T, precision=jax.lax.Precision.HIGHEST)


def compare(grams: Sequence[jax.Array]) -> np.ndarray:
    """The CKA of all pairs [L, L] of L results of `gram`, by a single matrix product; between 0 and 1."""
    return np.clip(np.asarray(_products(jnp.stack(grams)), np.float64), 0.0, 1.0)


def cka(activations: Sequence[Array]) -> np.ndarray:
    """The CKA of all pairs [L, L] of L activations [P, ...] of the same samples; between 0 and 1."""
    return compare([gram(jnp.asarray(each)) for each in activations])


def distances(entering: np.ndarray, leaving: np.ndarray) -> np.ndarray:
    """The distances [L, L] of blocks in pFedHR, 1 / (CKA of inputs + CKA of outputs)."""
    return 1.0 / np.maximum(entering + leaving, MIN_SUM)
