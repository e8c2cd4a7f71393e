"""Partitions: every sample is used once, the statistics are as specified, and repairs are reported."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mr.data import partition
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.errors import UserError

CIFAR = np.repeat(np.arange(10), 5000)  # the labels' histogram of CIFAR-10's training set
CIFAR_100_COARSE = np.repeat(np.arange(20), 2500)
SETTINGS = {
    "alpha": 0.5,
    "alpha_size": 10.0,
    "shards_per_client": 2,
    "shard_size": None,
    "classes_per_client": 2,
    "quantity_power": 1.0,
    "samples_per_client": 20,
    "report": lambda note: pytest.fail(f"unexpected repair: {note}"),
}


@dataclasses.dataclass
class Nothing:
    """No settings."""


def divide(name, labels, num_clients, seed=0, **changes):
    row = PARTITIONS[name]
    known = SETTINGS | {"domain": np.arange(len(labels)) % 3} | changes
    names = [*row.gets, *(each.name for each in dataclasses.fields(row.settings or Nothing))]
    settings = {key: value for key, value in known.items() if key in names}
    return row.divide(labels, num_clients, rng=np.random.default_rng(seed), **settings)


def sizes(parts):
    return np.array([len(part) for part in parts])


def counts(parts, labels):
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


DISJOINT = sorted(name for name, row in PARTITIONS.items() if not row.with_replacement and name != "natural")


@pytest.mark.parametrize("name", DISJOINT)
class TestEvery:
    def test_deals_every_sample_once(self, name):
        parts = divide(name, CIFAR, 30)
        assert len(parts) == 30
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(CIFAR)))

    def test_depends_on_the_generator_alone(self, name):
        first, same, other = (divide(name, CIFAR[::50], 7, seed) for seed in (1, 1, 2))
        assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))

    def test_rows_of_a_client_come_in_random_order(self, name):
        part = max(divide(name, CIFAR, 10), key=len)
        steps = np.diff(part) > 0
        assert 0.4 < steps.mean() < 0.6


@functools.cache
def three_hundred(alpha, num_classes):
    """Minimum, maximum and standard deviation of the sizes of 100 clients, for 300 seeds."""
    labels = {10: CIFAR, 20: CIFAR_100_COARSE}[num_classes]
    rows = [sizes(divide("dirichlet", labels, 100, seed, alpha=alpha)) for seed in range(300)]
    return np.array([(row.min(), row.max(), row.std()) for row in rows])


class TestDirichlet:
    # Partitions that ship with the released code of FedMut, same authors and algorithm: 100 clients, 50,000 samples.
    @pytest.mark.parametrize(
        ("num_classes", "alpha", "reference"),
        [
            pytest.param(10, 0.1, (15, 2848, 474.9), marks=pytest.mark.slow),
            pytest.param(10, 0.5, (125, 1007, 171.2), marks=pytest.mark.slow),
            pytest.param(10, 1.0, (230, 735, 96.8), marks=pytest.mark.slow),
            pytest.param(20, 0.1, (76, 1064, 235.0), marks=pytest.mark.slow),
            pytest.param(20, 0.5, (222, 785, 106.9), marks=pytest.mark.slow),
            pytest.param(20, 1.0, (294, 641, 57.1), marks=pytest.mark.slow),
        ],
    )
    def test_the_authors_partitions_look_like_ours(self, num_classes, alpha, reference):
        low, high = np.percentile(three_hundred(alpha, num_classes), (0.5, 99.5), axis=0)
        assert (low <= reference).all()
        assert (reference <= high).all()

    @pytest.mark.parametrize(
        ("alpha", "deviation"),
        [(0.1, 396), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.5, 159), (1.0, 108)))],
    )
    def test_median_deviation_of_sizes(self, alpha, deviation):
        # Three standard errors of a median of 300 draws are below 3 %.
        assert np.median(three_hundred(alpha, 10)[:, 2]) == pytest.approx(deviation, rel=0.03)

    def test_a_full_client_gets_no_more(self):
        # Class by class: whoever held M / N before a class receives none of it.
        for alpha in (0.1, 1.0):
            table = counts(divide("dirichlet", CIFAR, 100, alpha=alpha), CIFAR)
            before = np.cumsum(table, axis=1) - table
            assert (before >= 500).any()
            last = np.arange(100) == 99  # takes what rounding leaves, as in the authors' code
            assert (table[(before >= 500) & ~last[:, None]] <= 1).all()

    def test_every_client_has_ten_samples(self):
        assert (three_hundred(0.1, 10)[:, 0] >= 10).all()

    @pytest.mark.parametrize(("num_samples", "num_clients", "least"), [(2000, 150, 10), (300, 100, 3), (50, 50, 1)])
    def test_repairs_and_tells_instead_of_looping_for_ever(self, num_samples, num_clients, least):
        labels = np.arange(num_samples) % 10
        notes = []
        parts = divide("dirichlet", labels, num_clients, alpha=0.01, report=notes.append)
        assert sizes(parts).min() >= least
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(num_samples))
        assert len(notes) == 1
        assert "moved" in notes[0]

    def test_repair_takes_from_the_largest(self):
        table = np.array([[90, 10], [40, 0], [0, 2]])
        moved = partition._repair(table, 10, np.random.default_rng(0))
        assert moved == 8
        np.testing.assert_array_equal(table.sum(axis=1), [92, 40, 10])
        np.testing.assert_array_equal(table.sum(axis=0), [130, 12])

    def test_tells_that_ten_samples_are_impossible(self):
        notes = []
        divide("dirichlet", np.zeros(18, int), 2, alpha=1e6, report=notes.append)
        assert "at least 9" in notes[0]


class TestDirichletSize:
    def test_sizes_follow_their_own_distribution(self):
        # Dir(10) over 20 clients: the deviation of a share is sqrt(1/20 * 19/20 / 201) = 1.54 % of the samples.
        deviation = [sizes(divide("dirichlet_size", CIFAR, 20, seed)).std() / len(CIFAR) for seed in range(40)]
        assert 0.0125 < np.mean(deviation) < 0.0215  # soft targets add to it

    def test_all_the_same_alpha_size_gives_dirichlet(self):
        flat = [sizes(divide("dirichlet_size", CIFAR, 100, seed, alpha_size=1e9)).std() for seed in range(40)]
        assert np.median(flat) == pytest.approx(159, rel=0.15)


class TestShards:
    def test_a_client_sees_few_labels_and_all_have_the_same_size(self):
        parts = divide("shards", CIFAR, 100)
        assert (sizes(parts) == 500).all()
        assert (counts(parts, CIFAR) > 0).sum(axis=1).max() == 2

    def test_more_shards_than_samples(self):
        with pytest.raises(UserError, match="100 clients x 1000000 shards are more than the 50000 samples"):
            divide("shards", CIFAR, 100, shards_per_client=10**6)

    def test_the_shards_of_pfedhrs_authors(self):
        """200 shards of 225 images from 4,500 of each class, two for each of 12 clients; no shard has two classes."""
        notes, labels = [], np.repeat(np.arange(10), 4500)
        parts = divide("shards", labels, 12, shard_size=225, report=notes.append)
        assert (sizes(parts) == 450).all()
        assert (counts(parts, labels) % 225 == 0).all()
        assert notes == ["partition 'shards': 24 shards of 225 leave 39600 of 45000 samples unused"]

    @settings(deadline=None, max_examples=60)
    @given(st.integers(1, 120), st.integers(1, 12), st.integers(1, 4), st.integers(1, 40), st.integers(0, 99))
    def test_shards_of_a_size_are_runs_of_the_sorted_labels(self, count, clients, per_client, size, seed):
        labels, notes = np.random.default_rng(seed).integers(0, 5, count), []
        wish = dict(shards_per_client=per_client, shard_size=size, report=notes.append)
        if clients * per_client > count // size:
            with pytest.raises(UserError, match="shard_size"):
                divide("shards", labels, clients, seed, **wish)
            return
        parts = divide("shards", labels, clients, seed, **wish)
        assert (sizes(parts) == per_client * size).all()
        dealt = np.concatenate(parts)
        assert len(set(dealt.tolist())) == len(dealt)
        assert len(notes) == (len(dealt) < count)
        ordered = np.sort(labels)
        shards = [np.bincount(ordered[start : start + size], minlength=5) for start in range(0, count - size + 1, size)]
        held = [tuple(row) for row in counts(parts, np.append(labels, 4))]  # the label 4 for the width alone
        possible = {tuple(sum(hand)) for hand in itertools.combinations(shards, per_client)} if per_client < 3 else held
        assert set(held) <= set(possible)


class TestClasses:
    def test_two_classes_each_and_every_class_equally_often(self):
        table = counts(divide("classes", CIFAR, 12), CIFAR)
        assert ((table > 0).sum(axis=1) == 2).all()
        holders = (table > 0).sum(axis=0)
        assert holders.max() - holders.min() <= 1

    def test_more_classes_than_there_are(self):
        with pytest.raises(UserError, match="classes_per_client=11 is more than the 10 classes"):
            divide("classes", CIFAR, 12, classes_per_client=11)

    def test_tells_of_classes_that_nobody_holds(self):
        notes = []
        divide("classes", CIFAR, 3, report=notes.append)
        assert "4 classes unused" in notes[0]

    def test_tells_of_clients_with_fewer_classes(self):
        labels, notes = np.repeat(np.arange(10), [300] * 9 + [3]), []
        table = counts(divide("classes", labels, 50, report=notes.append), labels)
        short = int(((table > 0).sum(axis=1) < 2).sum())
        assert short == 7
        assert notes == [
            "partition 'classes': 7 of 50 clients have fewer than 2 classes, because class 9 has fewer samples than "
            "clients"
        ]


class TestQuantity:
    def test_tells_of_clients_with_fewer_samples_than_promised(self):
        notes = []
        parts = divide("quantity", CIFAR[:40], 8, quantity_power=1.0, report=notes.append)
        assert min(map(len, parts)) == 5
        assert notes == ["partition: 40 samples are too few for 10 samples in each of 8 clients; each has at least 5"]

    def test_sizes_follow_the_power(self):
        ordered = np.sort(sizes(divide("quantity", CIFAR, 50, quantity_power=1.5)))[::-1] - 10
        slope = np.polyfit(np.log(np.arange(1, 21)), np.log(ordered[:20]), 1)[0]
        assert slope == pytest.approx(-1.5, abs=0.02)

    def test_power_zero_gives_equal_sizes(self):
        assert np.ptp(sizes(divide("quantity", CIFAR, 30, quantity_power=0.0))) <= 1


class TestWithReplacement:
    LABELS = np.repeat(np.arange(12), [0, 600, 0, 300, *[100] * 8])

    @pytest.mark.parametrize("name", ["bootstrap", "bootstrap_dirichlet"])
    def test_clients_are_the_same_for_every_larger_number_of_clients(self, name):
        few, many = (divide(name, self.LABELS, count, alpha=0.1) for count in (7, partition.DRAWN_TOGETHER + 5))
        assert few.sizes.tolist() == [20] * 7 and len(many.sizes) == partition.DRAWN_TOGETHER + 5
        np.testing.assert_array_equal(few.index, many.index[: len(few.index)])
        assert len(np.unique(many.index)) == len(self.LABELS)

    def test_labels_are_those_of_the_training_set(self):
        shares = np.bincount(self.LABELS) / len(self.LABELS)
        iid, skewed, even = (
            divide(name, self.LABELS, 5000, alpha=alpha).label_counts(self.LABELS, 12)
            for name, alpha in (("bootstrap", 0), ("bootstrap_dirichlet", 0.05), ("bootstrap_dirichlet", 1e4))
        )
        for table in (iid, skewed, even):
            np.testing.assert_allclose(table.sum(axis=0) / table.sum(), shares, atol=0.02)
        classes = [(table > 0).sum(axis=1).mean() for table in (iid, skewed, even)]
        assert classes[1] < 2.5 and classes[2] == pytest.approx(classes[0], abs=0.1)

    def test_row_numbers_fit(self):
        with pytest.raises(UserError, match="smaller samples_per_client="):
            divide("bootstrap", self.LABELS, 1_000_000, samples_per_client=3000)


def test_natural_keeps_clients_and_order():
    parts = partition.natural(np.array([2, 0, 2, 1, 0]), 3)
    assert [part.tolist() for part in parts] == [[1, 4], [3], [0, 2]]


def test_matching_follows_the_training_labels():
    train = divide("dirichlet", CIFAR, 20, alpha=0.3)
    table = counts(train, CIFAR)
    labels = np.repeat(np.arange(10), 1000)
    parts = partition.matching(labels, table, rng=np.random.default_rng(0)).parts()
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(10_000))
    np.testing.assert_allclose(counts(parts, labels), table / 5, atol=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISJOINT)
@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_a_million_samples_over_ten_thousand_clients(name, alpha):
    labels = np.random.default_rng(0).integers(0, 10, 1_000_000)
    parts = divide(name, labels, 10_000, alpha=alpha, report=lambda note: None)
    assert sizes(parts).min() >= 1
    assert len(np.unique(np.concatenate(parts))) == 1_000_000
