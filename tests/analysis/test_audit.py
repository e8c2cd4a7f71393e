"""The study of audits: bounds against known numbers, and federations whose canary and noise are those of the claim."""

from statistics import NormalDist

import numpy as np
import pytest

import audit
from fedjax_mr.channel import accounting

DISTANCE = 1.0  # of two Gaussians


def drawn(distance, count=20_000):
    random = np.random.default_rng(0)
    return np.stack([random.normal(distance, 1, count), random.normal(0, 1, count)])


def test_the_rates_are_clopper_and_pearsons_bounds():
    """No false positive in 100 at 97.5 percent: 1 - 0.025^(1/100); all of 100 are found: the complement."""
    true, false = audit.rates(np.ones(100), np.zeros(100), 0.5)
    assert false == pytest.approx(1 - 0.025 ** (1 / 100)) and true == pytest.approx(0.025 ** (1 / 100))
    assert audit.rates(np.zeros(100), np.ones(100), 0.5) == (0.0, 1.0)


def test_the_bounds_are_below_the_epsilon_of_two_gaussians_and_close_to_it():
    exact = accounting.epsilon(1, noise=2 / DISTANCE, delta=audit.DELTA, num_clients=1, cohort=1, sampling="public")
    seen = drawn(DISTANCE)
    gaussian = audit.audited(seen, audit.gaussian_epsilon)
    assert 0.9 * exact < gaussian < exact
    assert 1 < audit.audited(seen, audit.any_epsilon) < gaussian
    true, false = 0.5, NormalDist().cdf(-DISTANCE)
    assert audit.gaussian_epsilon(true, false) == pytest.approx(exact, rel=1e-6)
    assert audit.any_epsilon(true, false) == pytest.approx(np.log((true - audit.DELTA) / false))
    assert audit.any_epsilon(0.1, 0.2) == audit.gaussian_epsilon(0.1, 0.2) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "noise_on", "models"), [("fedavg", "upload", 5), ("fedavg", "mean", 1), ("fedmr", "upload", 5)]
)
def test_the_canary_moves_what_an_attacker_sees_as_the_theorem_says(method, noise_on, models):
    """Uploads have mean T C and deviation s C sqrt(T). The deployed mean of K models has a K-th, with noise of all."""
    seen = audit.train(method, noise_on, audit.NOISE, 100, first_seed=7)
    unit, rounds = audit.CLIP, audit.ROUNDS
    noise = audit.NOISE * unit * np.sqrt(rounds)
    expected = {"uploads": (rounds * unit, noise if noise_on == "upload" else noise / np.sqrt(5))}
    expected["model"] = (rounds * unit / 5, noise * np.sqrt(models) / 5)
    for view, (mean, deviation) in expected.items():
        plus, minus = seen[view]
        assert abs((plus - minus).mean() / 2 - mean) < 4 * deviation / np.sqrt(200)
        assert np.concatenate([plus - mean, minus + mean]).std() == pytest.approx(deviation, rel=0.2)
