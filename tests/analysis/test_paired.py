"""Paired tests: for a fixed number of seeds against SciPy, for any number against the integrals they are made of."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from fedjax_mr.analysis.paired import ALPHA, SPREAD, difference, e_value, holm, interval, judge


def test_seeds_are_paired():
    """Only common seeds count; the interval of 4, 5, 6 is 5 -+ 4.303 / sqrt(3), Student's quantile of two degrees."""
    better, worse = {"0": 54.0, "1": 65.0, "2": 46.0, "7": 0.0}, {"0": 50.0, "1": 60.0, "2": 40.0, "8": 99.0}
    found = difference(better, worse)
    assert found is not None and (found.count, found.mean) == (3, 5.0)
    assert found.interval == pytest.approx((5 - 4.302653 / 3**0.5, 5 + 4.302653 / 3**0.5))
    assert found.p_better() == pytest.approx(scipy.stats.ttest_rel([54, 65, 46], [50, 60, 40]).pvalue)
    assert str(found) == "+5.0 [+2.5, +7.5], n = 3"
    assert difference({"0": 1.0}, {"1": 1.0}) is None


def test_being_level_is_tested_from_both_sides():
    values = [0.4, 1.0, 0.1, 0.6]
    found = difference({str(seed): value for seed, value in enumerate(values)}, dict.fromkeys("0123", 0.0))
    test = scipy.stats.ttest_1samp
    sides = [test(values, 1.5, alternative="less").pvalue, test(values, -1.5, alternative="greater").pvalue]
    assert found is not None and found.p_level(1.5) == pytest.approx(max(sides))


def test_holm():
    """The example of R's p.adjust: 0.01, 0.02, 0.03 times 3, 2, 1, never falling; no test is no comparison."""
    assert holm([0.03, None, 0.01, 0.02]) == pytest.approx([0.04, None, 0.03, 0.04])
    assert holm([0.6, 0.5]) == [1.0, 1.0] and holm([]) == []


VALUES = [0.4, 1.3, -0.2, 0.9, 0.7]


def test_the_evidence_is_a_ratio_of_integrals_over_all_variances():
    """Of the likelihoods with effects mu / sigma ~ N(0, SPREAD^2) and with no effect, both with weight 1 / sigma."""
    sigma, effects = np.geomspace(0.05, 60, 1001), np.linspace(-20, 20, 2001)

    def likelihood(effect):
        squares = sum((value - effect * sigma[:, None]) ** 2 for value in VALUES)
        return sigma[:, None] ** -(len(VALUES) + 1) * np.exp(-squares / (2 * sigma[:, None] ** 2))

    none = scipy.integrate.simpson(likelihood(0.0)[:, 0], sigma)
    weighted = likelihood(effects) * scipy.stats.norm.pdf(effects, 0, SPREAD)
    some = scipy.integrate.simpson(scipy.integrate.simpson(weighted, effects), sigma)
    assert e_value(VALUES) == pytest.approx(some / none, rel=1e-3)


def test_one_seed_says_nothing_and_units_do_not_matter():
    assert e_value([3.0]) == pytest.approx(1) and e_value([]) == 1
    assert interval([3.0, 4.0]) == (-math.inf, math.inf)
    assert e_value([100 * value for value in VALUES]) == pytest.approx(e_value(VALUES))


def test_the_ends_of_the_interval_have_just_enough_evidence():
    for values in (VALUES, [-8.0, -7.0, -9.0], list(np.linspace(-1, 2, 40))):
        for alpha in (ALPHA, 0.2):
            low, high = interval(values, alpha)
            for end in (low, high):
                assert math.isinf(end) or e_value(values, end) == pytest.approx(1 / alpha)


@pytest.mark.parametrize(
    ("values", "margin", "outcome"),
    [
        ([2.0, 2.1, 1.9, 2.2, 1.8], 0.0, "better"),
        ([-2.0, -2.1, -1.9, -2.2, -1.8], 0.0, "worse"),
        ([2.0, 2.1, 1.9, 2.2, 1.8], 3.0, "equal"),  # different, but by less than matters
        ([0.1, -0.1, 0.05, -0.05, 0.0], 1.0, "equal"),
        ([0.1, -0.1, 0.05, -0.05, 0.0], 0.01, "undecided"),
        ([1.0, -2.0, 3.0, -1.0, 0.5], 1.0, "undecided"),
        ([5.0, 5.1], 0.0, "undecided"),
    ],
)
def test_judge(values, margin, outcome):
    found = judge(values, margin=margin)
    assert found.outcome == outcome
    assert found.count == len(values) and found.mean == pytest.approx(np.mean(values))
    assert judge([-value for value in values], margin=margin).outcome == {"better": "worse", "worse": "better"}.get(
        outcome, outcome
    )


def test_methods_that_never_differ_are_equal_and_not_before_four_seeds():
    assert [judge([0.0] * count).outcome for count in (1, 2, 3, 4, 5, 1000)] == ["undecided"] * 3 + ["equal"] * 3
    assert judge([0.0] * 5)[2:] == (0.0, 0.0, 0.0, 1.0)


def test_more_pairs_need_more_evidence():
    values = [1.0, 1.4, 0.8, 1.9, 0.9]
    assert judge(values).outcome == "better" and judge(values, alpha=ALPHA / 45).outcome == "undecided"


CAMPAIGNS, MOST, BLOCK = 2000, 50, 5
TOLERANCE = 3 * math.sqrt(ALPHA * (1 - ALPHA) / CAMPAIGNS)  # a rate of alpha exceeds it with probability 0.002


def decided(draw, *, margin=0.0, rule=judge):
    """The outcome and the number of seeds of each campaign, which looks after each block."""
    generator, ends = np.random.default_rng(0), []
    for _ in range(CAMPAIGNS):
        values = draw(generator, MOST).tolist()
        looks = (rule(values[:count], margin=margin) for count in range(BLOCK, MOST + 1, BLOCK))
        ends.append(
            next(((each.outcome, each.count) for each in looks if each.outcome != "undecided"), ("undecided", MOST))
        )
    return ends


def share(ends, *outcomes):
    return sum(outcome in outcomes for outcome, _ in ends) / len(ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        lambda generator, count: generator.normal(0, 0.01, count),
        lambda generator, count: np.round(generator.normal(0, 0.01, count) * 360) / 360,  # 360 test samples
        lambda generator, count: generator.uniform(-1, 1, count),
        lambda generator, count: generator.laplace(0, 1, count),
    ],
    ids=["normal", "rounded", "uniform", "laplace"],
)
def test_identical_methods_are_called_different_in_at_most_alpha_of_the_campaigns(draw):
    """For normal differences that is proved. The others show how far the assumption may fail."""
    rate = share(decided(draw), "better", "worse")
    assert rate <= ALPHA + TOLERANCE, rate


@pytest.mark.slow
def test_methods_at_the_margin_are_called_equal_in_at_most_alpha_of_the_campaigns():
    rate = share(decided(lambda generator, count: generator.normal(1.0, 0.8, count), margin=1.0), "equal")
    assert rate <= ALPHA + TOLERANCE, rate


@pytest.mark.slow
def test_a_usual_t_test_that_looks_after_each_block_errs_more_often():
    """So the simulation above can fail, and the price of the other test buys something."""

    def peeking(values, *, margin):
        low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval(1 - ALPHA)
        return judge(values)._replace(outcome="better" if low > 0 else "worse" if high < 0 else "undecided")

    assert share(decided(lambda generator, count: generator.normal(0, 1, count), rule=peeking), "better", "worse") > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("effect", "least", "seeds"), [(1.0, 0.95, 20), (2.0, 0.99, 9)])
def test_power(effect, least, seeds):
    """Effects in standard deviations of a difference: the share of campaigns that find them, and their mean seeds."""
    ends = decided(lambda generator, count: generator.normal(effect, 1, count))
    assert share(ends, "better") >= least and share(ends, "worse") == 0
    assert np.mean([count for _, count in ends]) <= seeds
