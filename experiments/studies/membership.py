"""Membership inference: scores of attacks on samples, how well they separate, and fair sets of samples.

A score is a number per sample, larger if the attacker thinks that the model was trained on the sample.

* Threshold on the loss: the score is the negative loss. Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine
  Learning: Analyzing the Connection to Overfitting, CSF 2018.
* Shadow models: the attacker trains models on samples of its own and learns from their outputs what training leaves
  behind. Shokri, Stronati, Song, Shmatikov: Membership Inference Attacks against Machine Learning Models, IEEE S&P
  2017. Here one logistic regression serves all classes, on the loss, the largest confidences and the correctness.

True positives at few false ones say more than an average over all thresholds: Carlini, Chien, Nasr, Song, Terzis,
Tramer: Membership Inference Attacks From First Principles, IEEE S&P 2022.
"""

from typing import NamedTuple

import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats

CONFIDENCES = 3  # largest probabilities that are features of a sample
RIDGE = 1e-3  # of the logistic regression, per sample
FALSE_POSITIVES = 0.01


def auc(members: np.ndarray, others: np.ndarray) -> float:
    """The probability that a member [M] scores higher than another sample [R]; ties count one half. 0.5 is chance."""
    ranks = scipy.stats.rankdata(np.concatenate([members, others]))  # equal scores share their mean rank
    above = ranks[: len(members)].sum() - len(members) * (len(members) + 1) / 2
    return float(above / (len(members) * len(others)))


def true_positives(members: np.ndarray, others: np.ndarray, *, at: float = FALSE_POSITIVES) -> float:
    """The largest share of members found by a threshold with at most the share ``at`` of false positives.

    Samples with equal scores are accepted together, so the result is that of a real threshold, never interpolated.
    """
    allowed = int(np.floor(at * len(others) + 1e-9))
    if allowed >= len(others):
        return 1.0
    excluded = np.sort(others)[::-1][allowed]  # the first of the others that must be rejected, with all its equals
    return float(np.mean(members > excluded))


def matched(
    members: np.ndarray,
    member_labels: np.ndarray,
    others: np.ndarray,
    other_labels: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw as many members as others, with equal numbers of every label: their rows, both [R].

    Without this, the labels alone would reveal the members of a client that has few classes.
    """
    chosen: tuple[list[np.ndarray], list[np.ndarray]] = ([members[:0]], [others[:0]])
    for label in np.unique(member_labels):
        both = members[member_labels == label], others[other_labels == label]
        count = min(map(len, both))
        for rows, drawn in zip(both, chosen, strict=True):
            drawn.append(rng.permutation(rows)[:count])
    return np.concatenate(chosen[0]), np.concatenate(chosen[1])


def losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The cross-entropy of each sample in nats [R], from logits [R, C]."""
    return -scipy.special.log_softmax(logits, axis=1)[np.arange(len(labels)), labels]


def features(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Features of each sample for the shadow attack [R, F]: loss, largest confidences in order, and correctness."""
    confidences = np.sort(scipy.special.softmax(logits, axis=1), axis=1)[:, ::-1][:, :CONFIDENCES]
    correct = logits.argmax(axis=1) == labels
    return np.column_stack([losses(logits, labels), confidences, correct])


class Logistic(NamedTuple):
    """A logistic regression on standardised features."""

    mean: np.ndarray  # [F]
    scale: np.ndarray  # [F]
    weights: np.ndarray  # [F + 1], the last one is the constant

    @classmethod
    def fit(cls, members: np.ndarray, others: np.ndarray) -> "Logistic":
        """Learn to tell the features of members [M, F] from those of other samples [R, F]."""
        both = np.concatenate([members, others]).astype(np.float64)
        mean, scale = both.mean(axis=0), both.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        x = np.column_stack([(both - mean) / scale, np.ones(len(both))])
        sign = np.where(np.arange(len(both)) < len(members), 1.0, -1.0)

        def objective(weights: np.ndarray) -> tuple[float, np.ndarray]:
            margins = sign * (x @ weights)
            value = np.logaddexp(0, -margins).mean() + RIDGE / 2 * weights @ weights
            return value, -(x.T @ (sign * scipy.special.expit(-margins))) / len(x) + RIDGE * weights

        result = scipy.optimize.minimize(objective, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B")
        return cls(mean, scale, result.x)

    def scores(self, features: np.ndarray) -> np.ndarray:
        """The log-odds of each sample [R] to be a member."""
        return (features - self.mean) / self.scale @ self.weights[:-1] + self.weights[-1]
