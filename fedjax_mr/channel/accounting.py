"""Privacy accounting at user level: epsilon of a run, and the noise for a target epsilon.

docs/privacy.md has the theorems. Cohorts that everybody may know need only SciPy (the exact Gaussian mechanism: Balle,
Wang, ICML 2018, Theorem 8; Dong, Roth, Su, JRSS B 2022). Secret cohorts use the package dp-accounting (extra
``privacy``): Wang, Balle, Kasiviswanathan, AISTATS 2019, for cohorts of K of N without replacement, and privacy loss
distributions of the truncated, Poisson subsampled Gaussian mechanism (arXiv 2508.15089) for `privacy.poisson`.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy  # its parts are imported when used: they take as long as JAX

from fedjax_mr.errors import UserError

SAMPLING = ("without_replacement", "public", "poisson")
RELEASED = ("uploads", "mean")
RELATIONS = ("replace", "zero_out")
GRID = 1e-3  # width of the grid of privacy losses; a wider one gives a larger epsilon, which stays an upper bound


def epsilon(
    rounds: int,
    *,
    noise: float,
    delta: float,
    num_clients: int,
    cohort: int,
    sampling: str = "without_replacement",
    released: str = "uploads",
    relation: str = "replace",
    noise_on: str | None = None,
    participations: int | None = None,
    probability: float | None = None,
) -> float:
    """Epsilon of the models after some rounds, for all data of one client (user level).

    Args:
      rounds: T, completed rounds.
      noise: noise multiplier s of `privacy`.
      delta: delta of the guarantee. It should be well below 1 / N.
      num_clients: N.
      cohort: K clients per round; for ``poisson``, the largest number.
      sampling: ``without_replacement``: K of N uniformly, and the cohorts stay secret; the smaller one of the bounds of
        Theorem 2 and of ``public``. ``public``: everybody may know the cohorts, and clients may keep a memory (see
        `privacy.hides_cohorts`). ``poisson``: that of `privacy.poisson`, and the cohorts stay secret. If K = N without
        ``poisson``, all clients take part in all rounds.
      released: ``uploads`` if the K noisy uploads of each round may become known, or ``mean`` if only their uniform
        mean does.
      relation: neighbouring federations. ``replace``: the data of one client are replaced by any other data.
        ``zero_out``: by data for which its change is zero.
      noise_on: as in `privacy`. Default: ``upload`` for released uploads, ``mean`` for released means.
      participations: for ``public``, the number of rounds in which the client takes part. Default: it is binomial with
        probability K / N, and epsilon is that of the whole run, before the cohorts are drawn.
      probability: for ``poisson``, q of `privacy.poisson`.

    Returns:
      Epsilon; infinite without noise, 0 without rounds.

    Raises:
      UserError: an argument is out of range or does not fit the others, or dp-accounting is missing.
    """
    _check(rounds, delta, num_clients, cohort, sampling, released, relation, participations, probability)
    if noise < 0 or math.isnan(noise):
        raise UserError("the noise must not be negative: pass noise=1")
    if rounds == 0 or participations == 0:
        return 0.0
    if noise == 0:
        return math.inf
    noise = noise * math.sqrt(cohort) ** ((released == "mean") - (_noise_on(noise_on, released) == "mean"))
    moved = 2.0 if relation == "replace" else 1.0  # by how many C another client's data move an upload or a sum
    if sampling == "poisson":
        one_round = _one_poisson_round(num_clients, cohort, probability, noise, relation)
        return float(one_round.self_compose(rounds).get_epsilon_for_delta(delta))
    if sampling == "public" or cohort == num_clients:
        return _public(rounds, noise / moved, delta, cohort / num_clients, participations)
    orders, per_round = _one_round(num_clients, cohort, noise / moved)
    secret = float(_dp_accounting().rdp.compute_epsilon(orders, rounds * per_round, delta)[0])
    return min(secret, _public(rounds, noise / moved, delta, cohort / num_clients, None))


def noise_for(target_epsilon: float, rounds: int, **settings: Any) -> float:
    """The smallest noise multiplier s whose epsilon is at most ``target_epsilon``, up to 0.01 percent more.

    Args:
      target_epsilon: the largest allowed epsilon.
      rounds: T.
      **settings: as in `epsilon`, without ``noise``.

    Raises:
      UserError: as `epsilon`; or no noise is needed or possible.
    """
    if not target_epsilon > 0:
        raise UserError("the target epsilon must be positive: pass dp_target_epsilon=8")
    if not rounds > 0:
        raise UserError("without rounds no noise is needed: pass rounds=1 or more")
    lowest = 1e-12  # for the logarithm
    found = lambda log_noise: max(epsilon(rounds, noise=math.exp(log_noise), **settings), lowest)
    excess = lambda log_noise: math.log(found(log_noise) / target_epsilon)
    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + 1
        if high > 20:
            raise UserError(f"no noise reaches epsilon {target_epsilon:g}: increase epsilon or delta")
    while excess(low) <= 0:
        low, high = low - 1, low
        if low < -6:
            raise UserError(f"epsilon {target_epsilon:g} needs almost no noise: decrease epsilon")
    log_noise = float(scipy.optimize.root_scalar(excess, bracket=(low, high), xtol=1e-5).root)
    while excess(log_noise) > 0:
        log_noise += 2e-5
    return math.exp(log_noise)


def delta_of(epsilon: float, mu: Any) -> Any:
    """The smallest delta at which two Gaussians with unit variance and distance ``mu`` are (epsilon, delta)-close.

    Balle, Wang, ICML 2018, Theorem 8. ``mu`` is a positive number or an array.
    """
    mu = np.asarray(mu, np.float64)
    first, second = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    return np.exp(scipy.special.log_ndtr(first)) - np.exp(epsilon + scipy.special.log_ndtr(second))


def _public(rounds: int, noise: float, delta: float, probability: float, participations: int | None) -> float:
    """Theorem 1: the Gaussian mechanism, composed over the rounds in which the client takes part."""
    if participations is None and probability < 1:
        counts = np.arange(1, rounds + 1)
        weights = scipy.stats.binom.pmf(counts, rounds, probability)
    else:
        counts, weights = np.asarray([participations or rounds]), np.ones(1)
    counts, weights = counts[weights > 0], weights[weights > 0]
    excess = lambda epsilon: float(np.sum(weights * delta_of(epsilon, np.sqrt(counts) / noise))) - delta
    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(scipy.optimize.root_scalar(excess, bracket=(0.0, high), xtol=1e-12).root)


@functools.lru_cache(maxsize=1024)
def _one_round(num_clients: int, cohort: int, noise: float) -> tuple[Any, Any]:
    """Theorem 2: the Renyi divergences of one round and their orders. Those of several rounds are their sum.

    ``noise`` is relative to the distance of neighbouring uploads. The accountant does not double it for replacement.
    """
    library = _dp_accounting()
    accountant = library.rdp.RdpAccountant(neighboring_relation=library.relation.REPLACE_ONE)
    event = library.dp_accounting.GaussianDpEvent(noise)
    accountant.compose(library.dp_accounting.SampledWithoutReplacementDpEvent(num_clients, cohort, event))
    return accountant.orders, np.asarray(accountant.rdp)


@functools.lru_cache(maxsize=64)
def _one_poisson_round(num_clients: int, cohort: int, probability: float, noise: float, relation: str) -> Any:
    """The privacy loss of one round of `privacy.poisson`. It doubles the distance for replacement by itself."""
    library = _dp_accounting()
    relations = {"replace": library.relation.REPLACE_ONE, "zero_out": library.relation.REPLACE_SPECIAL}
    return library.pld.privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        num_clients,
        probability,
        cohort,
        noise,
        value_discretization_interval=GRID,
        neighboring_relation=relations[relation],
    )


def _noise_on(noise_on: str | None, released: str) -> str:
    noise_on = noise_on or {"uploads": "upload", "mean": "mean"}[released]
    if noise_on not in ("upload", "mean"):
        raise UserError(f"unknown noise_on {noise_on!r} (known: upload, mean)")
    return noise_on


def _check(
    rounds: int,
    delta: float,
    num_clients: int,
    cohort: int,
    sampling: str,
    released: str,
    relation: str,
    participations: int | None,
    probability: float | None,
) -> None:
    for kind, name, known in (
        ("sampling", sampling, SAMPLING),
        ("released", released, RELEASED),
        ("relation", relation, RELATIONS),
    ):
        if name not in known:
            raise UserError(f"unknown {kind} {name!r} (known: {', '.join(known)})")
    if not 0 < delta < 1:
        raise UserError("delta lies between 0 and 1: pass delta=1e-5")
    if rounds < 0:
        raise UserError("the number of rounds must not be negative: pass rounds=100")
    if not 1 <= cohort <= num_clients:
        raise UserError("the cohort has at least 1 and at most num_clients clients: pass cohort=10")
    if participations is not None and (sampling != "public" or not 0 <= participations <= rounds):
        raise UserError("participations needs sampling=public and is at most the number of rounds: omit it")
    if sampling == "poisson" and released != "mean":
        raise UserError(
            "Poisson sampling protects a mean only, because the number of uploads shows who takes part: "
            "pass released=mean"
        )
    if (sampling == "poisson") != (probability is not None):
        raise UserError("probability= belongs to sampling=poisson: pass both or none")
    if probability is not None and not 0 < probability <= 1:
        raise UserError("the probability of taking part lies between 0 and 1: pass probability=0.05")
    if sampling == "without_replacement" and cohort < num_clients and relation != "replace":
        raise UserError("sampling without replacement is accounted for replaced clients: pass relation=replace")


def _dp_accounting() -> Any:
    """The used parts of dp-accounting, imported on first use because it is optional (extra ``privacy``).

    Raises:
      UserError: the package is missing.
    """
    try:
        import dp_accounting  # pyright: ignore[reportMissingImports]
        from dp_accounting import pld, rdp  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "epsilon needs dp-accounting, which refuses newer versions of attrs and needs an environment of its own: "
            "in a checkout, pip install -c constraints-privacy.txt -e '.[privacy]'"
        ) from None
    return SimpleNamespace(dp_accounting=dp_accounting, pld=pld, rdp=rdp, relation=dp_accounting.NeighboringRelation)
