"""Statistics of paired differences between two methods: tests for a fixed number of seeds, and one for any number.

Runs of one seed share the partition, the initial model and the cohorts. The difference of two methods is therefore
taken seed by seed. All tests assume that these differences are independent and normally distributed, with any variance.

*A fixed number of seeds* (`Difference`): Student's paired t-test, two one-sided tests against a margin (TOST), and
Holm's correction. They are valid if the number of seeds was chosen before looking at the results.

*Any number of seeds* (`e_value`, `interval`, `judge`): a test that stays valid if it is looked at after every seed and
stopped at will. With n differences x, their mean m and S = sum (x - m)^2, the evidence against the mean mu is

    E_n = r^(-1/2) ((S + q) / (S + q / r))^(n / 2),    q = n (m - mu)^2,    r = 1 + n SPREAD^2.

It is the likelihood ratio of x / |x_1|, which does not depend on the variance, for an effect mu / sigma that is normal
with standard deviation SPREAD against an effect of 0. Under mu it is a martingale that starts at 1, so it ever exceeds
1 / alpha with probability at most alpha (Ville 1939). The construction is that of Wang and Ramdas, Anytime-valid
t-tests and confidence sequences for Gaussian means with unknown variance (arXiv:2310.03722, the Gaussian mixture),
after Lai, On confidence sequences (Annals of Statistics 1976). All means with E_n < 1 / alpha are an interval, and all
these intervals together contain the mean with probability 1 - alpha. So every statement that follows from one of them
holds with this probability: better, worse, and equal within a margin.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_mr.analysis.groups import Statistic

# --- A fixed number of seeds -----------------------------------------------------------------------------------------

LEVEL = 0.95  # of confidence intervals; a claim holds if its p-value is below 1 - LEVEL
SEEDS = 3  # that a test needs


class Difference(NamedTuple):
    """Values of one method minus those of another over the seeds that both have.

    Attributes:
      count: number of seeds.
      mean: mean difference.
      error: standard error of the mean; None with fewer than `SEEDS` seeds, which allow no test.
    """

    count: int
    mean: float
    error: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Confidence interval of the mean by Student's t; None if there is no test."""
        if self.error is None:
            return None
        from scipy.stats import t as student

        half = float(student.ppf((1 + LEVEL) / 2, self.count - 1)) * self.error
        return self.mean - half, self.mean + half

    def p_better(self) -> float | None:
        """Two-sided p-value of a difference of zero. None if there is no test."""
        return None if self.error is None else min(1.0, 2 * self._beyond(abs(self.mean)))

    def p_level(self, margin: float) -> float | None:
        """The p-value of a difference of ``margin`` or more: the larger of two one-sided tests."""
        return None if self.error is None else self._beyond(margin - abs(self.mean))

    def _beyond(self, distance: float) -> float:
        """Probability that Student's t is larger than a distance."""
        if not self.error:  # seeds that do not differ at all
            return 0.0 if distance > 0 else 1.0
        from scipy.stats import t as student

        return float(student.sf(distance / self.error, self.count - 1))

    def __str__(self) -> str:
        interval = "" if self.interval is None else f" [{self.interval[0]:+.1f}, {self.interval[1]:+.1f}]"
        return f"{self.mean:+.1f}{interval}, n = {self.count}"


def differences(better: Mapping[Any, float], worse: Mapping[Any, float]) -> list[float]:
    """The differences of the seeds that both methods have, in the order of the first one's seeds."""
    return [better[seed] - worse[seed] for seed in better if seed in worse]


def difference(better: Mapping[Any, float], worse: Mapping[Any, float]) -> Difference | None:
    """The mean difference of paired seeds. None without a common seed.

    Args:
      better: values of one method, by seed.
      worse: values of the other method.
    """
    known = differences(better, worse)
    if not known:
        return None
    mean, deviation = Statistic.of(known)
    assert mean is not None
    tested = deviation is not None and len(known) >= SEEDS
    return Difference(len(known), mean, deviation / len(known) ** 0.5 if tested else None)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Correct p-values for their number by Holm's method. None is no test and stays None.

    The smallest of m is multiplied by m, the next by m - 1, and so on. None becomes smaller than the previous one.
    """
    tests = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, place) in enumerate(tests):
        corrected[place] = largest = max(largest, min(1.0, value * (len(tests) - rank)))
    return corrected


# --- Any number of seeds ---------------------------------------------------------------------------------------------

ALPHA = 0.05  # probability of a wrong verdict
SPREAD = 2.0  # any number is valid. Effects of about so many standard deviations are decided with the fewest seeds
BETTER, WORSE, EQUAL, UNDECIDED = "better", "worse", "equal", "undecided"
LARGEST_LOG = 700.0  # of an e-value; a larger one is no floating-point number


def e_value(values: Sequence[float], mean: float = 0.0) -> float:
    """The evidence E_n against the hypothesis that paired differences have this mean. 1 is none; see the module.

    Args:
      values: the differences in the order of the seeds [n].
      mean: the mean of the hypothesis.
    """
    between, within, ratio = _parts(values, mean)
    if not between + within:  # no difference from the hypothesis at all
        return 1.0
    gain = (between + within) / (within + between / ratio)
    return math.exp(min(LARGEST_LOG, len(values) / 2 * math.log(gain) - math.log(ratio) / 2))


def interval(values: Sequence[float], alpha: float = ALPHA) -> tuple[float, float]:
    """All means with `e_value` below 1 / alpha, as the ends of an interval; infinite with too few differences.

    Args:
      values: the differences [n].
      alpha: probability that the mean is ever, with whatever number of seeds, outside of the interval.
    """
    count = len(values)
    if not count:
        return -math.inf, math.inf
    _, within, ratio = _parts(values, 0.0)
    bound = math.exp(2 / count * (math.log(ratio) / 2 - math.log(alpha)))
    if bound >= ratio:
        return -math.inf, math.inf
    half = math.sqrt(within * (bound - 1) / (count * (1 - bound / ratio)))
    mean = math.fsum(values) / count
    return mean - half, mean + half


def _parts(values: Sequence[float], mean: float) -> tuple[float, float, float]:
    """The numbers q, S and r of the module's formula."""
    count = len(values)
    centre = math.fsum(values) / max(1, count)
    within = math.fsum((value - centre) ** 2 for value in values)
    return count * (centre - mean) ** 2, within, 1 + count * SPREAD**2


class Verdict(NamedTuple):
    """What paired differences say about the first of two methods.

    Attributes:
      outcome: ``better``, ``worse``, ``equal`` within the margin, or ``undecided``.
      count: number of seeds n.
      mean: mean difference. Positive values are good for the first method.
      low, high: ends of the interval of the mean; infinite if there are too few seeds.
      e_value: evidence against a mean difference of 0.
    """

    outcome: str
    count: int
    mean: float
    low: float
    high: float
    e_value: float

    def reversed(self) -> "Verdict":
        """The verdict on the second method."""
        outcome = {BETTER: WORSE, WORSE: BETTER}.get(self.outcome, self.outcome)
        return self._replace(outcome=outcome, mean=-self.mean, low=-self.high, high=-self.low)


def judge(values: Sequence[float], *, margin: float = 0.0, alpha: float = ALPHA) -> Verdict:
    """The verdict of paired differences, with error probability ``alpha`` over all numbers of seeds together.

    The outcome is ``equal`` if the interval lies within ``margin`` of 0, otherwise ``better`` or ``worse`` if it does
    not contain 0.

    Args:
      values: the differences in the order of the seeds [n]. Positive values are good for the first method.
      margin: difference that does not matter.
      alpha: probability of a wrong verdict. For several comparisons, its share of each of them.
    """
    low, high = interval(values, alpha)
    outcome = UNDECIDED
    if max(-low, high) <= margin:
        outcome = EQUAL
    elif low > 0:
        outcome = BETTER
    elif high < 0:
        outcome = WORSE
    return Verdict(outcome, len(values), math.fsum(values) / max(1, len(values)), low, high, e_value(values))
