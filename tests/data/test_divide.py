"""Federations: public set, held-out clients and splits use each sample once; only seeds and files determine them."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from fedjax_mr import data
from fedjax_mr.config import config
from fedjax_mr.config.config import Config
from fedjax_mr.data import Dataset, divide, partition_file
from fedjax_mr.data.divide import STREAMS
from fedjax_mr.data.partition import Dirichlet
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.federation import federated_data


def numbered(num_samples=1000, num_test=200, num_natural=0):
    """A dataset whose samples contain their row number: x of row r is r, x of test row r is -1 - r."""
    rng = np.random.default_rng(7)
    x, test_x = np.arange(num_samples, dtype=np.float32)[:, None], -1 - np.arange(num_test, dtype=np.float32)[:, None]
    dataset = Dataset("numbered", x, rng.integers(0, 10, num_samples).astype(np.int32),
                      test_x, rng.integers(0, 10, num_test).astype(np.int32), num_classes=10)  # fmt: skip
    if num_natural:
        dataset = dataclasses.replace(
            dataset,
            client=rng.integers(0, num_natural, num_samples).astype(np.int32),
            test_client=rng.integers(0, num_natural, num_test).astype(np.int32),
            client_names=tuple(f"c{number:03d}" for number in range(num_natural)),
        )
    return dataset


def rows(federated, split):
    """The rows of a split in the source, client by client."""
    return [federated.dataset.x[split.rows(client), 0].astype(int) for client in range(federated.num_clients)]


def everything(federated):
    """All assigned rows in the source."""
    owners = [federated, federated.holdout] if federated.holdout else [federated]
    parts = [] if federated.public is None else [federated.public.x[:, 0].astype(int)]
    for owner in owners:
        parts += rows(owner, owner.train)
        parts += rows(owner, owner.validation) if owner.validation else []
        parts += rows(owner, owner.test) if owner.own_test else []
    return np.sort(np.concatenate(parts))


FULL = {"validation_share": 0.2, "client_test_share": 0.1, "public_share": 0.1, "holdout_clients": 3}


class TestShares:
    @pytest.mark.parametrize(
        "partition", ["iid", "dirichlet", "dirichlet_size", "shards", "classes", "quantity", "natural"]
    )
    def test_every_sample_is_in_one_hand(self, partition):
        dataset = numbered(num_natural=10)
        clients = {"num_clients": 0 if partition == "natural" else 7}
        federated = data.federate(dataset, partition=partition, **clients, **FULL)
        np.testing.assert_array_equal(everything(federated), np.arange(1000))
        assert (federated.num_clients, federated.holdout.num_clients) == (7, 3)
        assert len(federated.public.x) == 100

    def test_objects_and_names_are_the_same_settings(self):
        by_name = data.federate(numbered(), num_clients=5, alpha=0.3, public_share=0.1, validation_share=0.2)
        apart = data.Splits(public_share=0.1, validation_share=0.2)
        by_objects = data.federate(numbered(), num_clients=5, settings=Dirichlet(0.3), splits=apart)
        assert by_objects.hash() == by_name.hash() != data.federate(numbered(), num_clients=5).hash()
        for both, argument in ({"public_max": 5, "splits": apart}, "splits="), (
            {"alpha": 0.3, "settings": Dirichlet()}, "settings=",
        ):  # fmt: skip
            with pytest.raises(UserError, match=f"^{argument} and .*= exclude each other"):
                data.federate(numbered(), num_clients=5, **both)

    def test_samples_keep_their_labels(self):
        dataset = numbered()
        federated = data.federate(dataset, num_clients=7, **FULL)
        for part in (federated.dataset, federated.holdout.dataset, federated.public):
            np.testing.assert_array_equal(part.y, dataset.y[part.x[:, 0].astype(int)])
        tests = federated.dataset.test_x[:, 0].astype(int)
        np.testing.assert_array_equal(federated.dataset.test_y, dataset.test_y[-1 - tests])

    def test_sizes_follow_the_shares(self):
        federated = data.federate(
            numbered(), partition="iid", num_clients=5, validation_share=0.2, client_test_share=0.1
        )
        assert (federated.test.sizes == 20).all()
        assert (federated.validation.sizes == 36).all()  # 20 % of the 180 that are left
        assert (federated.sizes == 144).all()
        x, y, split = federated.client_test
        assert x is federated.dataset.x
        np.testing.assert_array_equal(split.index, federated.test.index)
        assert len(y) == 1000

    def test_what_pfedhrs_code_leaves_a_client_to_train_on(self, monkeypatch):
        monkeypatch.chdir(Path(__file__).parents[2])
        flags = ["--flagfile=exp/pfedhr_mnist_shards.flags", "--strategy=local"]
        federated = federated_data(config.parse(flags), dataset=numbered(8000, 8000))
        assert (federated.sizes == 288).all() and (federated.test.sizes == 90).all() and federated.own_test
        assert len(federated.notes) == 2 and "1800 of 7200 samples unused" in federated.notes[1]
        assert "the network receives values of 4e+03 +- 2.3e+03" in federated.notes[0]  # row numbers

    def test_a_note_says_that_natural_clients_are_ignored(self):
        x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 4
        dataset = data.from_arrays(x, y, client=np.arange(60) // 10)
        assert any("ignores the 6 natural clients" in note for note in data.federate(dataset, num_clients=3).notes)
        assert not data.federate(dataset, num_clients=0, partition="natural").notes

    def test_a_single_sample_serves_for_training_and_validation(self):
        federated = data.federate(
            numbered(5), partition="iid", num_clients=5, validation_share=0.3, client_test_share=0.3
        )
        assert (federated.sizes == 1).all()
        np.testing.assert_array_equal(federated.validation.index, federated.train.index)
        assert federated.test is None

    def test_own_test_parts_match_the_training_labels(self):
        federated = data.federate(numbered(4000, 1000), num_clients=10, alpha=0.2)
        counts = np.array(
            [np.bincount(federated.dataset.test_y[part], minlength=10) for part in federated.test.parts()]
        )
        shares = federated.label_counts() / np.maximum(federated.label_counts().sum(axis=0), 1)
        np.testing.assert_allclose(counts, shares * counts.sum(axis=0), atol=1.0)
        assert counts.sum() == 1000

    def test_public_set(self):
        federated = data.federate(numbered(), num_clients=5, public_share=0.1, public_max=40, public_labels=False)
        assert federated.public.x.shape == (40, 1)
        assert federated.public.y is None
        assert data.federate(numbered(), num_clients=5).public is None

    def test_pooled_keeps_the_samples(self):
        federated = data.federate(numbered(), num_clients=7, **FULL)
        pooled = federated.pooled()
        assert pooled.num_clients == 1
        np.testing.assert_array_equal(pooled.train.index, np.sort(federated.train.index))
        assert pooled.validation.sizes.tolist() == [federated.validation.sizes.sum()]


class TestNatural:
    def test_draws_clients_and_keeps_only_their_samples(self):
        dataset = numbered(num_natural=30)
        federated = data.federate(dataset, partition="natural", num_clients=8, public_share=0.1)
        assert list(federated.names) == sorted(federated.names)
        for name, part, test in zip(
            federated.names, rows(federated, federated.train), federated.test.parts(), strict=True
        ):
            number = int(name[1:])
            np.testing.assert_array_equal(part, np.flatnonzero(dataset.client == number))
            test_rows = np.sort(-1 - federated.dataset.test_x[test, 0].astype(int))
            np.testing.assert_array_equal(test_rows, np.flatnonzero(dataset.test_client == number))
        assert len(federated.dataset.x) == federated.sizes.sum()
        assert len(federated.dataset.test_x) == federated.test.sizes.sum()
        owners = dataset.client[federated.public.x[:, 0].astype(int)]
        assert not {f"c{owner:03d}" for owner in owners} & set(federated.names)  # FedMe: from clients that take no part

    def test_held_out_clients_are_tested_on_their_own_samples(self):
        federated = data.federate(numbered(num_natural=6), partition="natural", num_clients=4, holdout_clients=2)
        assert not set(federated.names) & set(federated.holdout.names)
        mine = set(federated.dataset.test_x[federated.test.index, 0])
        x, _, split = federated.holdout.client_test
        assert not mine & set(x[split.index, 0])
        assert len(federated.dataset.test_x) == len(mine)


class TestSeeds:
    def test_partition_seed_decides(self):
        first, same, other = (data.federate(numbered(), seed=seed).hash() for seed in (1, 1, 2))
        assert first == same != other

    def test_configuration_changes_partitions_only_where_it_should(self):
        def hash_of(**changes):
            return federated_data(Config(**changes)).hash()

        base = hash_of(seed=5)
        assert hash_of(seed=6, partition_seed=5) == base
        assert hash_of(seed=5, strategy="fedavg", lr=0.1, cohort=3, rounds=2) == base
        assert hash_of(seed=6) != base
        assert hash_of(seed=5, alpha=0.4) != base
        assert hash_of(seed=5, clients=19) != base
        assert hash_of(seed=5, validation_share=0.1) != base

    def test_hold_out_and_splits_do_not_move_the_partition(self):
        plain = data.federate(numbered(), num_clients=10)
        split = data.federate(numbered(), num_clients=10, validation_share=0.2)
        for before, train, validation in zip(
            rows(plain, plain.train), rows(split, split.train), rows(split, split.validation), strict=True
        ):
            np.testing.assert_array_equal(np.sort(before), np.sort(np.concatenate([train, validation])))
        held = data.federate(numbered(), num_clients=8, holdout_clients=2)
        owned = {tuple(part) for each in (held, held.holdout) for part in rows(each, each.train)}
        assert owned == {tuple(part) for part in rows(plain, plain.train)}

    def test_streams_differ(self):
        assert len(set(STREAMS.values())) == len(STREAMS)

    def test_every_setting_has_a_flag(self):
        import inspect

        by_name = {"dataset", "num_clients", "seed", "settings", "splits", "further"}
        names = set(inspect.signature(data.federate).parameters) - by_name
        names |= {field.name for field in dataclasses.fields(data.Splits)}
        assert names <= {field.name for field in dataclasses.fields(config.Config)}


class TestPartitionFile:
    @pytest.mark.parametrize("partition", ["dirichlet", "natural"])
    def test_repeats_the_federation(self, tmp_path, partition):
        dataset = numbered(num_natural=12)
        first = data.federate(dataset, partition=partition, num_clients=7, seed=3, **FULL)
        partition_file.save(first.plan, tmp_path / "partition.npz")
        again = data.federate(dataset, partition_file=str(tmp_path / "partition.npz"), num_clients=0)
        assert again.hash() == first.hash()
        assert again.names == first.names
        assert again.holdout.names == first.holdout.names
        for one, other in ((first, again), (first.holdout, again.holdout)):
            np.testing.assert_array_equal(one.dataset.test_x, other.dataset.test_x)
            np.testing.assert_array_equal(one.test.index, other.test.index)

    def test_of_the_authors(self, tmp_path):
        text = '{"dataset": "numbered", "num_users": 3, "train_data": {"10": [5, 6], "2": [999], "0": [3, 1, 4]}}'
        (tmp_path / "authors.json").write_text(text)
        federated = data.federate(numbered(), partition_file=str(tmp_path / "authors.json"), num_clients=3)
        assert [part.tolist() for part in rows(federated, federated.train)] == [[3, 1, 4], [999], [5, 6]]

    def test_refuses(self, tmp_path):
        def message(name, content=None, dataset=None, **settings):
            path = tmp_path / name
            if content is not None:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
            with pytest.raises(UserError) as caught:
                data.federate(dataset or numbered(), partition_file=str(path), **{"num_clients": 0} | settings)
            assert "\n" not in str(caught.value)
            return str(caught.value)

        made = data.federate(numbered(), num_clients=4)
        partition_file.save(made.plan, tmp_path / "partition.npz")
        whole = (tmp_path / "partition.npz").read_bytes()
        assert "belongs to other data: numbered" in message("partition.npz", dataset=numbered(num_test=199))
        assert "belongs to other data: numbered" in message("partition.npz", dataset=numbered(num_samples=999))
        assert "has 4 clients, not 5: request 4 clients, or 0 for all" in message("partition.npz", num_clients=5)
        assert "does not exist" in message("absent.npz")
        assert "damaged or of another kind" in message("cut.npz", whole[:500])
        assert "damaged or of another kind" in message("cut.npz", b"")
        np.savez(tmp_path / "other.npz", x=np.zeros(3))
        assert "damaged or of another kind (KeyError" in message("other.npz")
        assert "damaged or of another kind" in message("cut.json", '{"dataset": "numbered", "train_')
        assert "damaged or of another kind" in message("list.json", "[]")
        start = '{"dataset": "numbered", "train_data": '
        assert "rows outside 0..999" in message("rows.json", start + '{"0": [1000]}}')
        assert "has no rows" in message("none.json", start + "{}}")
        assert "rows outside 0..999" in message("large.json", start + '{"0": [10000000000000000000], "1": [1]}}')
        assert "outside 0..999" in message("negative.json", start + '{"0": [-1]}}')
        for rows in ("[1.5]", "[true]", '["1"]', "[[1]]", "5", "null", f"[{10**30}]", "[NaN]", '{"a": 1}'):
            assert "rows of client 0 are " in message("kind.json", start + f'{{"0": {rows}}}}}'), rows
        assert "damaged or of another kind" in message("uneven.json", start + '{"0": [[1], [1, 2]]}}')
        assert "damaged or of another kind" in message("client.json", start + '{"a": [1]}}')
        assert "damaged or of another kind" in message("deep.json", start + "[" * 100000)
        assert "damaged or of another kind (ValueError: no complete .npz file" in message(
            "text.npz", "clients and samples\n" * 9
        )
        assert "damaged or of another kind (ValueError: no complete .npz file" in message(
            "pickle.npz", pickle.dumps([1, 2])
        )
        assert "two names in train_data are the same number" in message("one.json", start + '{"1": [1], "01": [2]}}')
        assert "one sample to two clients" in message("twice.json", start + '{"0": [1], "1": [1]}}')
        assert "client 1 of 2 of numbered has no training samples" in message(
            "empty.json", start + '{"0": [1], "1": []}}'
        )
        five = start + '{"0": [0], "1": [1], "2": [2], "3": [3], "4": [4]}}'
        for count in (5, 9):
            assert f"5 clients, so holdout_clients={count} leaves none that trains: hold out at most 4" in message(
                "five.json", five, holdout_clients=count
            )
        assert "belongs to cifar10, but this is numbered" in message(
            "c.json", '{"dataset": "cifar10", "train_data": {}}'
        )
        assert "too few for a public set" in message(
            "all.json", start + f'{{"0": {list(range(1000))}}}}}', public_share=0.1
        )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                lambda file: {"train_index": file["train_index"] + 1},
                "to 1000, outside 0..999; use the partition.npz of a run folder",
            ),
            (lambda file: {"train_index": file["train_index"] - 2}, "train_index has rows from -"),
            (lambda file: {"train_index": file["train_index"] * (1 + 1j)}, "train_index is complex128 of shape"),
            (lambda file: {"train_index": file["train_index"] + 0.5}, "train_index is float64 of shape"),
            (lambda file: {"train_index": file["train_index"].astype(str)}, "train_index is <U"),
            (lambda file: {"train_index": file["train_index"][None]}, "train_index is int32 of shape (1, "),
            (lambda file: {"train_index": file["train_index"][0]}, "train_index is int32 of shape ()"),
            (lambda file: {"train_index": file["train_index"] // 2}, "train_index names a row twice"),
            (lambda file: {"train_index": file["train_index"].astype(object)}, "holds Python objects"),
            (lambda file: {"train_offsets": file["train_offsets"][::-1]}, "train_offsets do not increase from 0 to "),
            (lambda file: {"train_offsets": file["train_offsets"] + 1}, "train_offsets do not increase from 0"),
            (
                lambda file: {"train_offsets": file["train_offsets"][:-1]},
                "train_offsets is int32 of shape (10,), not 11",
            ),
            (lambda file: {"train_offsets": file["train_offsets"] * 1.0}, "train_offsets is float64 of shape (11,)"),
            (lambda file: {"train_offsets": file["train_offsets"] * (file["train_offsets"] > 90)}, "client 0 has no"),
            (
                lambda file: {"train_offsets": np.uint64(2**64 - 1) + 0 * file["train_offsets"].astype(np.uint64)},
                "increase",
            ),
            (lambda file: {"public": file["train_index"][:5]}, "is assigned twice"),
            (lambda file: {"validation_index": file["validation_index"] * 0}, "validation_index names a row twice"),
            (
                lambda file: {"validation_index": file["train_index"][: len(file["validation_index"])]},
                "is assigned twice",
            ),
            (lambda file: {"test_index": file["train_index"][: len(file["test_index"])]}, "is assigned twice"),
            (
                lambda file: {"global_test": file["global_test"] + 1},
                "global_test has rows from 1 to 200, outside 0..199",
            ),
            (lambda file: {"held_out": ~file["held_out"] | True}, "held_out is bool of shape (10,), not one bool per"),
            (lambda file: {"held_out": file["held_out"] * 1}, "held_out is int64"),
            (lambda file: {"own_test": np.array(3)}, "own_test is 3, not True or False"),
            (lambda file: {"own_test": file["train_index"]}, "damaged or of another kind"),
            (lambda file: {"names": np.array(["a"])}, "names holds 1 values, not one name for each of 10 clients"),
            (lambda file: {"names": np.arange(10)}, "names holds 10 values"),
            (lambda file: {"surplus": np.arange(10)}, "damaged or of another kind"),
        ],
    )
    def test_refuses_changed_arrays(self, tmp_path, changes, message):
        partition_file.save(data.federate(numbered(), num_clients=7, **FULL).plan, tmp_path / "partition.npz")
        with np.load(tmp_path / "partition.npz") as file:
            arrays = {name: file[name] for name in file.files}
        np.savez(tmp_path / "changed.npz", **arrays | changes(arrays))
        with pytest.raises(UserError) as caught:
            data.federate(numbered(), partition_file=str(tmp_path / "changed.npz"), num_clients=0)
        assert message in str(caught.value) and f"partition file {tmp_path / 'changed.npz'} is damaged" in str(
            caught.value
        )
        assert "\n" not in str(caught.value) and "pickle" not in str(caught.value)

    def test_a_single_row_may_also_serve_for_validation(self, tmp_path):
        settings = dict(partition="iid", num_clients=5, validation_share=0.3)
        first = data.federate(numbered(5), **settings)
        partition_file.save(first.plan, tmp_path / "partition.npz")
        assert (
            data.federate(numbered(5), partition_file=str(tmp_path / "partition.npz"), num_clients=5).hash()
            == first.hash()
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "dirichlett"}, "did you mean 'dirichlet'?"),
        ({"public_shar": 0.1}, "has no setting public_shar=: it has alpha; did you mean 'public_share'?"),
        ({"alpha": 0.1, "settings": Dirichlet(0.2)}, "settings= and alpha= exclude each other"),
        ({"settings": Dirichlet(0.0)}, "alpha=0.0 is out of range"),
        ({"alpha": 0.0}, "alpha=0.0 is out of range (allowed: > 0)"),
        ({"num_clients": 1001}, "1001 clients are more than the 1000 training samples of numbered"),
        ({"num_clients": 999, "holdout_clients": 2}, "1001 clients are more than the 1000"),
        ({"num_clients": 0}, "partition 'dirichlet' needs at least 1 client, not 0"),
        ({"partition": "natural"}, "numbered has no natural clients"),
        ({"validation_share": 0.5, "client_test_share": 0.5}, "leave no training samples"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(UserError) as caught:
        data.federate(numbered(), **settings)
    assert message in str(caught.value)


def test_more_clients_of_a_domain_than_samples():
    """The last client, or one before it, has no samples and therefore no domain."""
    x, y = np.zeros((40, 4), np.float32), np.arange(40) % 2
    for domain in (["a"] * 39 + ["b"], ["a"] + ["b"] * 39):
        dataset = data.from_arrays(x, y, domain=domain, x_test=x, y_test=y, domain_test=domain)
        for seed in range(5):
            with pytest.raises(UserError, match=r"^client \d of 8 of arrays has no training samples: use fewer"):
                data.federate(dataset, partition="domain", num_clients=8, seed=seed, alpha=0.01)


def test_programs_that_raise_floating_point_errors_divide_the_same():
    """Dirichlet shares of a small alpha underflow to zero, which is intended."""
    divided = lambda: data.federate(numbered(), num_clients=20, alpha=0.001, seed=0).hash()
    with np.errstate(all="raise"):
        strict = divided()
    assert strict == divided()


def test_the_name_of_a_dataset_is_no_dataset():
    with pytest.raises(UserError, match=r"divides a Dataset, not str: load one by its name with data\.load\(\)"):
        data.federate("digits")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_clients": 31}, "has 30 natural clients with training samples, too few for 31 clients and 0 held-out"),
        ({"num_clients": 29, "holdout_clients": 2}, "too few for 29 clients and 2 held-out"),
        ({"num_clients": 0, "min_samples_per_client": 500}, "training samples and at least 500 samples in all"),
        ({"num_clients": 0, "holdout_clients": 30}, "too few for 0 clients and 30 held-out"),
    ],
)
def test_refuses_natural(settings, message):
    with pytest.raises(UserError) as caught:
        data.federate(numbered(num_natural=30), partition="natural", **settings)
    assert message in str(caught.value)


def test_cohort_of_natural_clients():
    with pytest.raises(UserError, match=r"^cohort=31 is more than the 30 clients of numbered"):
        federated_data(Config(partition="natural", clients=0, cohort=31), dataset=numbered(num_natural=30))


class TestPublicFromElsewhere:
    def test_it_takes_the_place_of_the_own_one(self, tmp_path):
        rng = np.random.default_rng(0)
        for name, value in (("own", 1.0), ("other", 2.0)):
            np.savez(tmp_path / name, x=np.full((200, 3), value, np.float32), y=rng.integers(0, 4, 200))
        given = dict(dataset=f"{tmp_path}/own.npz", clients=4, cohort=2, public_share=0.2, partition="iid")
        own = federated_data(Config(**given))
        replaced = federated_data(Config(**given, public_from=f"{tmp_path}/other.npz"))
        assert own.public.x.shape == replaced.public.x.shape
        assert (own.public.x == 1).all() and (replaced.public.x == 2).all()
        assert replaced.public.y.max() == 3
        np.testing.assert_array_equal(own.train.index, replaced.train.index)
        assert own.hash() != replaced.hash()
        unlabelled = federated_data(Config(**given, public_from=f"{tmp_path}/other.npz", public_labels=False))
        assert unlabelled.public.y is None
        with pytest.raises(UserError, match=r"pass public_share=0\.1"):
            federated_data(Config(**given | {"public_share": 0.0}, public_from=f"{tmp_path}/other.npz"))

    def test_only_samples_of_the_same_kind_will_do(self):
        dataset = numbered()
        federated = data.federate(dataset, num_clients=5, public_share=0.1)
        for change, message in (
            ({"x": dataset.x.astype(np.float64)}, "float64"),
            ({"num_classes": 11}, "11 classes, more than the 10 of numbered: use public_labels=False"),
            ({"x": dataset.x[:50], "y": dataset.y[:50]}, "100 public samples are needed, but other has only 50"),
        ):
            other = dataclasses.replace(dataset, name="other", **change)
            with pytest.raises(UserError, match=message):
                divide.with_public(federated, other, labels=True, seed=0)


class TestWithReplacement:
    def test_more_clients_than_samples(self, tmp_path):
        dataset = numbered()
        federated = data.federate(
            dataset, partition="bootstrap", num_clients=3000, samples_per_client=4, public_share=0.1
        )
        assert federated.num_clients == 3000 and set(federated.sizes.tolist()) == {4}
        trained = federated.dataset.x[federated.train.index, 0].astype(int)
        assert not set(trained.tolist()) & set(federated.public.x[:, 0].astype(int).tolist())
        partition_file.save(federated.plan, tmp_path / "plan.npz")
        again = data.federate(dataset, partition_file=str(tmp_path / "plan.npz"), num_clients=0)
        assert again.hash() == federated.hash() and again.plan.with_replacement

    @pytest.mark.parametrize("kept", ["validation_share", "client_test_share", "holdout_clients"])
    def test_no_samples_are_held_out(self, kept):
        with pytest.raises(UserError, match="training samples of other clients: leave them out"):
            data.federate(numbered(), partition="bootstrap_dirichlet", **{kept: 1 if "clients" in kept else 0.1})
