"""Epsilon: known numbers, the definition itself, and second accountants written here or installed."""

import importlib.util
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from fedjax_mr.channel import accounting
from fedjax_mr.channel.accounting import delta_of, epsilon, noise_for
from fedjax_mr.errors import UserError

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting is not installed (the extra privacy)"
)


def of(num_clients, cohort, noise, rounds, **others):
    return epsilon(rounds, noise=noise, **{"delta": 1e-5, "num_clients": num_clients, "cohort": cohort, **others})


# --- Public cohorts: the exact Gaussian mechanism ---------------------------------------------------------------------


def privacy_loss(epsilon, mu):
    """The hockey-stick divergence of N(mu, 1) and N(0, 1) by its definition, an integral."""
    excess = lambda x: max(0.0, stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x))
    start = epsilon / mu + mu / 2  # where the integrand begins
    return integrate.quad(excess, start, start + 12, epsabs=1e-14)[0]


@pytest.mark.parametrize("epsilon, mu", [(0.1, 0.3), (1.0, 1.0), (4.377, 1.0), (3.0, 0.7)])
def test_delta_is_the_integral_of_its_definition(epsilon, mu):
    np.testing.assert_allclose(delta_of(epsilon, mu), privacy_loss(epsilon, mu), rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize(
    "noise, participations, expected",
    [(8, 1, 0.926), (8, 10, 3.341), (8, 100, 13.21), (16, 1, 0.434), (16, 10, 1.535), (16, 100, 5.68)],
)
def test_known_numbers_of_theorem_1(noise, participations, expected):
    found = of(100, 10, noise, 1000, sampling="public", participations=participations)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_one_upload_is_the_gaussian_mechanism():
    """4.37718 and 1.99309 are the exact values for noise 1 and 2; replacing a client moves its upload by 2 C."""
    np.testing.assert_allclose(of(1, 1, 1.0, 1, relation="zero_out"), 4.37718, atol=1e-5)
    np.testing.assert_allclose(of(1, 1, 2.0, 1), 4.37718, atol=1e-5)
    np.testing.assert_allclose(of(1, 1, 2.0, 1, relation="zero_out"), 1.99309, atol=1e-5)
    np.testing.assert_allclose(of(1, 1, 4.0, 4, relation="zero_out"), 1.99309, atol=1e-5)  # four rounds: noise / 2


def test_random_cohorts_average_delta_over_the_number_of_participations():
    """One round: with probability K / N the client's upload is released, otherwise nothing of it."""
    found = of(20, 5, 4.0, 1, sampling="public", delta=1e-3)
    by_hand = optimize.brentq(lambda epsilon: 0.25 * privacy_loss(epsilon, 0.5) - 1e-3, 0.0, 10.0)
    np.testing.assert_allclose(found, by_hand, rtol=1e-6)
    two = of(20, 5, 4.0, 2, sampling="public", delta=1e-3)
    mixture = lambda epsilon: (
        2 * 0.25 * 0.75 * privacy_loss(epsilon, 0.5) + 0.25**2 * privacy_loss(epsilon, math.sqrt(0.5)) - 1e-3
    )
    np.testing.assert_allclose(two, optimize.brentq(mixture, 0.0, 10.0), rtol=1e-6)


def test_epsilon_grows_with_the_rounds_and_falls_with_the_noise():
    by_rounds = [of(100, 10, 4.0, rounds, sampling="public") for rounds in (1, 10, 100, 1000)]
    assert all(np.diff(by_rounds) > 0)
    by_noise = [of(100, 10, noise, 100, sampling="public") for noise in (0.5, 1.0, 4.0, 40.0)]
    assert all(np.diff(by_noise) < 0)
    assert of(100, 10, 4.0, 0, sampling="public") == 0 and of(100, 10, 0.0, 5, sampling="public") == math.inf
    assert of(100, 10, 1e6, 1, sampling="public") == 0


def test_what_is_released_decides_which_noise_counts():
    """For a mean of K uploads, noise on every upload is sqrt(K) times the noise of a trusted server."""
    base = of(100, 100, 6.0, 10, released="uploads")
    assert base == of(100, 100, 6.0, 10, released="mean", noise_on="mean")
    np.testing.assert_allclose(of(100, 100, 0.6, 10, released="mean", noise_on="upload"), base, rtol=1e-6)
    np.testing.assert_allclose(of(100, 100, 60.0, 10, released="uploads", noise_on="mean"), base, rtol=1e-6)


@pytest.mark.parametrize("target", [0.5, 8.0])
def test_the_noise_for_an_epsilon(target):
    settings = {"delta": 1e-5, "num_clients": 100, "cohort": 10, "sampling": "public"}
    noise = noise_for(target, 50, **settings)
    assert epsilon(50, noise=noise, **settings) <= target < epsilon(50, noise=noise * (1 - 2e-4), **settings)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"sampling": "with_replacement"}, "unknown sampling"),
        ({"released": "model"}, "unknown released"),
        ({"noise_on": "sum"}, "unknown noise_on"),
        ({"delta": 1.0}, "delta lies between"),
        ({"cohort": 200}, "at most num_clients"),
        ({"noise": -1.0}, "must not be negative"),
        ({"participations": 3}, "needs sampling=public"),
        ({"sampling": "poisson"}, "released=mean"),
        ({"sampling": "poisson", "released": "mean"}, "pass both or none"),
        ({"probability": 0.1}, "pass both or none"),
        ({"sampling": "poisson", "released": "mean", "probability": 1.5}, "between 0 and 1"),
        ({"relation": "zero_out"}, "relation=replace"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        epsilon(10, **{"noise": 1.0, "delta": 1e-5, "num_clients": 100, "cohort": 10, **arguments})


@pytest.mark.parametrize("target, words", [(0.0, "must be positive"), (1e9, "almost no noise")])
def test_targets_that_make_no_sense_are_refused(target, words):
    with pytest.raises(UserError, match=words):
        noise_for(target, 10, delta=1e-5, num_clients=10, cohort=10)


def test_the_noise_for_an_epsilon_never_gives_more(monkeypatch):
    """With epsilon 1 / s. The search may end a little below the right noise."""
    monkeypatch.setattr(accounting, "epsilon", lambda rounds, *, noise: 1 / noise)
    for target in np.linspace(0.1, 8, 40):
        noise = noise_for(target, 1)
        assert 1 / noise <= target and noise == pytest.approx(1 / target, rel=1e-4)


@pytest.mark.parametrize("per_round", [0.01, 1e9])
def test_secret_cohorts_compose_over_the_rounds_and_never_cost_more_than_public_ones(monkeypatch, per_round):
    """With divergences by hand in place of the library's, whose epsilon is here their sum over the rounds."""
    library = SimpleNamespace(rdp=SimpleNamespace(compute_epsilon=lambda orders, total, delta: (total[0], orders[0])))
    asked = []
    one_round = lambda *arguments: asked.append(arguments) or (np.array([2.0]), np.array([per_round]))
    monkeypatch.setattr(accounting, "_dp_accounting", lambda: library)
    monkeypatch.setattr(accounting, "_one_round", one_round)
    found = of(20, 5, 4.0, 7)
    assert asked == [(20, 5, 2.0)]  # replacing a client moves its upload by 2 C
    public = of(20, 5, 4.0, 7, sampling="public")
    assert found == pytest.approx(7 * per_round if per_round < 1 else public)


def test_a_missing_library_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"pip install -c constraints-privacy.txt -e '.\[privacy\]'") as caught:
        of(97, 10, 4.0, 100)
    assert "\n" not in str(caught.value)


# --- Secret cohorts: dp-accounting, and accountants to compare with ---------------------------------------------------


@needs_library
@pytest.mark.parametrize(
    "setting, expected",
    [
        ((100, 10, 4.0, 100), 5.37901),
        ((100, 10, 8.0, 1000), 8.38418),
        ((1000, 10, 2.0, 1000), 3.57611),
        ((1000, 100, 4.0, 500), 13.6167),
    ],
)
def test_known_numbers_of_theorem_2(setting, expected):
    np.testing.assert_allclose(of(*setting), expected, atol=1e-4)


def without_replacement(num_clients, cohort, noise, rounds, delta):
    """Wang et al., AISTATS 2019, Theorem 27, for a Gaussian mechanism with noise / 2, in exact arithmetic."""
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 200
    share, variance = mpmath.mpf(cohort) / num_clients, (mpmath.mpf(noise) / 2) ** 2
    orders = range(2, 40)
    moment = lambda order: mpmath.exp(order * (order - 1) / (2 * variance))  # E over q of (p / q)^order

    def central(order):  # E over q of (p / q - 1)^order
        return mpmath.fsum((-1) ** (order - j) * mpmath.binomial(order, j) * moment(j) for j in range(order + 1))

    even = {order: central(order) for order in range(2, 42, 2)}

    def term(order):
        plain = 2 * moment(order)
        if order == 2:
            return min(4 * (moment(2) - 1), plain)
        low, high = even[2 * (order // 2)], even[2 * ((order + 1) // 2)]
        return min(4 * mpmath.sqrt(low * high), plain)

    terms = {order: term(order) for order in orders}
    found = []
    for order in orders:
        inner = mpmath.fsum(share**j * mpmath.binomial(order, j) * terms[j] for j in range(2, order + 1))
        divergence = rounds * float(mpmath.log(1 + inner)) / (order - 1)
        found.append(divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return min(found)


@needs_library
@pytest.mark.parametrize("setting", [(100, 10, 4.0, 100), (1000, 10, 2.0, 1000), (1000, 100, 4.0, 500)])
def test_theorem_2_computed_here_gives_the_same_to_one_percent(setting):
    np.testing.assert_allclose(of(*setting), without_replacement(*setting, 1e-5), rtol=0.01)


@needs_library
@pytest.mark.parametrize("other", [-1.0, 0.0, 1.0])
def test_the_bound_of_a_secret_cohort_holds_for_an_exact_example(other):
    """K = 1 of N = 2. The client's change moves from C to -C, and the other one's is fixed: two mixtures."""
    noise, delta = 2.0, 1e-2
    found = of(2, 1, noise, 1, delta=delta)

    def density(x, own):
        return 0.5 * stats.norm.pdf(x, own, noise) + 0.5 * stats.norm.pdf(x, other, noise)

    x = np.linspace(-20, 20, 400_001)
    loss = np.sum(np.maximum(0, density(x, 1.0) - np.exp(found) * density(x, -1.0))) * (x[1] - x[0])
    assert loss <= delta
    public = of(2, 1, noise, 1, delta=delta, sampling="public")
    assert found <= public


POISSON = {"sampling": "poisson", "released": "mean", "relation": "zero_out"}


@needs_library
@pytest.mark.parametrize("probability, noise, expected", [(0.01, 1.0, 1.82893), (0.1, 2.0, 8.27957)])
def test_known_numbers_of_poisson_sampling(probability, noise, expected):
    found = of(1000, 1000, noise, 1000, probability=probability, **POISSON)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@needs_library
def test_a_full_round_that_leaves_clients_out_costs_privacy():
    """Of 1000 clients 10 join on average: more than 50 almost never do, more than 20 sometimes."""
    whole, rare, often = (of(1000, cohort, 1.0, 1000, probability=0.01, **POISSON) for cohort in (1000, 50, 20))
    np.testing.assert_allclose([rare, often], [whole, 3.83419], rtol=1e-4)
    replaced = of(1000, 50, 1.0, 1000, probability=0.01, **POISSON | {"relation": "replace"})
    np.testing.assert_allclose(replaced, 2.84399, rtol=1e-4)


def poisson_by_renyi(share, noise, rounds, delta):
    """Mironov, Talwar, Zhang, arXiv 1908.10530, section 3.3, at integer orders. It is at least the exact epsilon."""
    found = []
    for order in range(2, 128):
        j = np.arange(order + 1)
        log_terms = (
            [math.lgamma(order + 1) - math.lgamma(each + 1) - math.lgamma(order - each + 1) for each in j]
            + (order - j) * math.log1p(-share)
            + j * math.log(share)
            + j * (j - 1) / (2 * noise**2)
        )
        divergence = rounds * float(np.logaddexp.reduce(log_terms)) / (order - 1)
        found.append(divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return min(found)


@needs_library
@pytest.mark.parametrize("cohort, noise, expected", [(10, 1.0, 2.10137), (100, 2.0, 8.94696)])
def test_renyi_accounting_of_poisson_sampling_is_an_upper_bound(cohort, noise, expected):
    by_renyi = poisson_by_renyi(cohort / 1000, noise, 1000, 1e-5)
    np.testing.assert_allclose(by_renyi, expected, rtol=0.02)  # the package also uses fractions as orders
    found = of(1000, 1000, noise, 1000, probability=cohort / 1000, **POISSON)
    assert 0.8 * by_renyi < found < by_renyi


@needs_library
def test_two_accountants_of_the_library_agree_with_public_cohorts():
    import dp_accounting
    from dp_accounting import pld

    for noise, participations in ((8.0, 10), (16.0, 100)):
        found = of(100, 10, noise, 1000, sampling="public", participations=participations)
        exact = dp_accounting.get_epsilon_gaussian(noise / 2 / math.sqrt(participations), 1e-5)
        np.testing.assert_allclose(found, exact, rtol=1e-8)
        accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE, 1e-3)  # doubles by itself
        accountant.compose(dp_accounting.GaussianDpEvent(noise), participations)
        np.testing.assert_allclose(found, accountant.get_epsilon(1e-5), rtol=0.01)


@needs_library
def test_secret_cohorts_need_less_noise_than_public_ones():
    settings = {"delta": 1e-5, "num_clients": 1000, "cohort": 10}
    noise = noise_for(8.0, 100, **settings)
    assert epsilon(100, noise=noise, **settings) <= 8 < epsilon(100, noise=0.999 * noise, **settings)
    assert noise < 0.6 * noise_for(8.0, 100, **settings, sampling="public")


@needs_library
def test_a_whole_cohort_has_no_amplification():
    assert of(50, 50, 8.0, 10) == of(50, 50, 8.0, 10, sampling="public", participations=10)
