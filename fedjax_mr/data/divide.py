"""Divide the samples of a dataset: public set, held-out clients, partition, and the splits of each client.

Every draw has its own NumPy generator, seeded by the partition seed and the constant of its stream. So a partition does
not depend on the strategy or on other random numbers of a run.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from fedjax_mr.data import inputs
from fedjax_mr.data import partition as partitions
from fedjax_mr.data import partition_file as partition_files
from fedjax_mr.data.federated import Dataset, FederatedData, PartitionPlan, Public, Split
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.errors import UserError, unknown_name, usual_arithmetic
from fedjax_mr.settings import check, field, make

STREAMS = {"partition": 1, "public": 2, "clients": 3, "holdout": 4, "split": 5, "test": 6}

_setting = functools.partial(field, group="Partition", compiled="argument")


@dataclasses.dataclass(frozen=True)
class Splits:
    """Clients that never train, parts of each client's samples, and the server's public set: all that is set apart.

    Attributes:
      holdout_clients: number of further clients that never train.
      validation_share: fraction of the training samples of a client that it keeps for validation.
      client_test_share: fraction of the samples of a client that become its own test set. With 0 the client is tested
        on its natural test samples if there are any, else on a part of the global test set with its label proportions
        (in each domain, if the dataset has domains).
      public_share: fraction of the training samples that become the public set, before the partition.
      public_max: largest size of the public set. Default: no limit.
      public_labels: whether the public set keeps its labels.
    """

    # fmt: off
    holdout_clients: int = _setting(
        0, "Additional clients that never train. The deployed model, if the method has one, is also tested on them",
        unit="clients", low=0, source="our choice")
    validation_share: float = _setting(
        0.0, "Fraction of a client's training samples that it keeps for validation",
        low=0, high=0.9, source="FedMR; FedMe: 0.2 (CIFAR-10), 0.3 (FEMNIST, Shakespeare)")
    client_test_share: float = _setting(
        0.0, "Fraction of a client's samples that becomes its own test set. With 0, a client is tested on its natural "
        "test samples, or on a part of the test set with its label proportions",
        low=0, high=0.9, source="our choice; pFedHR: 0.2")
    public_share: float = _setting(
        0.0, "Fraction of the training samples that becomes the server's public set, before the partition. Methods "
        "that require public data use 0.1 instead of 0",
        low=0, high=0.9, source="FedMR needs none; FedMe and pFedHR: 0.1", short=True)
    public_max: int | None = _setting(
        None, "Maximum size of the public set. If omitted, no limit", unit="samples", low=1, source="FedMe: 1000")
    public_labels: bool = _setting(True, "Keep the labels of the public set", source="FedMe: off")
    # fmt: on


@usual_arithmetic()
def federate(
    dataset: Dataset,
    *,
    partition: str = "dirichlet",
    num_clients: int = 20,
    seed: int = 0,
    settings: Any = None,
    splits: Splits | None = None,
    partition_file: str | None = None,
    **further: Any,
) -> FederatedData:
    """Divide the samples of a dataset among N clients.

    Args:
      dataset: the samples.
      partition: a name of `partition.PARTITIONS`.
      num_clients: number of training clients N. 0 uses every natural client that has training samples, or
        every client of the partition file.
      seed: seed of the partition.
      settings: the settings of the partition, an instance of its dataclass. Default: its defaults with ``further``.
      splits: what is set apart. Default: nothing but ``further``.
      partition_file: a file that replaces the partition. A .npz file (a `PartitionPlan`) also replaces all other
        arguments except ``num_clients`` and ``public_labels``; a .json file replaces the partition alone.
      further: settings of the partition and of `Splits` by name, such as ``alpha=0.1`` of `partition.dirichlet`, and
        ``public_share=0.1``.

    Raises:
      UserError: the dataset is not a `Dataset`, or cannot be trained on (`Dataset.check`); the partition is unknown, a
        setting is out of range, there are more clients than samples, a client has no samples, clients that share
        samples would be tested on training samples of others, or the partition file does not match.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(
            f"federate() divides a Dataset, not {type(dataset).__name__}: load one by its name with data.load(), or "
            "make one with fmr.Dataset() or fmr.from_texts()"
        )
    for name, count in {"num_clients": num_clients, "seed": seed}.items():
        if not isinstance(count, int | np.integer) or count < 0:
            raise UserError(f"{name}={count!r} must be a whole number of at least 0")
    settings, splits = _settings(partition, settings, splits, further)
    if splits.validation_share + splits.client_test_share >= 1:
        raise UserError(
            f"validation_share={splits.validation_share:g} and client_test_share={splits.client_test_share:g} leave no "
            "training samples; their sum must be below 1"
        )
    dataset.check()
    notes = [*inputs.notes(dataset)]
    if "classes" in dataset.task.provides and (dataset.y == dataset.y[0]).all():
        notes.append(
            f"all {len(dataset.y)} training samples of {dataset.name} have label {dataset.y[0]}, so there is nothing "
            "to learn, whatever the accuracy is"
        )
    if partition_file and not partition_file.endswith(".json"):
        plan = partition_files.read(partition_file, dataset=dataset)
        _check_count(partition_file, int((~plan.held_out).sum()), num_clients)
        return _assemble(dataset, plan, public_labels=splits.public_labels, notes=notes)

    with_replacement = not partition_file and PARTITIONS[partition].with_replacement
    if with_replacement and (splits.validation_share or splits.client_test_share or splits.holdout_clients):
        raise UserError(
            f"clients of partition {partition!r} share samples, so validation_share=, client_test_share= and "
            "holdout_clients= would test models on training samples of other clients: leave them out"
        )
    public_size = round(splits.public_share * len(dataset.y))
    public_size = public_size if splits.public_max is None else min(public_size, splits.public_max)
    if partition_file:
        owned = _from_authors(dataset, partition_file, num_clients, splits.holdout_clients, public_size, seed)
    elif partition == "natural":
        owned = _natural(dataset, num_clients, splits.holdout_clients, public_size, settings, seed, report=notes.append)
    else:
        owned = _partitioned(
            dataset, partition, num_clients, splits.holdout_clients, public_size, settings, seed, report=notes.append
        )
    sizes = owned.train.sizes
    if not sizes.all():
        client = int(np.argmin(sizes))
        name = repr(owned.names[client]) if owned.names else f"{client} of {len(sizes)}"
        raise UserError(
            f"client {name} of {dataset.name} has no training samples: use fewer clients or another partition"
        )

    held_out = np.zeros(len(sizes), bool)
    held_out[_stream(seed, "holdout").choice(len(held_out), splits.holdout_clients, replace=False)] = True
    if owned.test is not None and not len(owned.test.of_clients(np.flatnonzero(~held_out)).index):
        notes.append(
            f"no participating client of {dataset.name} has test samples (LEAF's split by user gives them to other "
            f"clients), so the models are tested on all {len(dataset.test_y)} test samples"
        )
        owned = owned._replace(test=None)
    train, validation, test = _split(owned.train, splits.validation_share, splits.client_test_share, seed)
    if not splits.client_test_share:
        test = owned.test if owned.test is not None else _matching(dataset, owned.train, seed)
    global_test = np.arange(len(dataset.test_y))
    if owned.test is not None:  # as in the papers, the union of the clients' test samples
        global_test = np.sort(owned.test.of_clients(np.flatnonzero(~held_out)).index).astype(np.int64)
    plan = PartitionPlan(
        dataset=dataset.name,
        fingerprint=dataset.fingerprint(),
        train=train,
        validation=validation,
        test=test,
        own_test=splits.client_test_share > 0,
        held_out=held_out,
        public=owned.public,
        names=owned.names,
        global_test=global_test,
        with_replacement=with_replacement,
    )
    return _assemble(dataset, plan, public_labels=splits.public_labels, notes=notes)


def _settings(partition: str, settings: Any, splits: Splits | None, further: dict[str, Any]) -> tuple[Any, Splits]:
    """The settings of a partition and the splits, where ``further`` names some of them in place of the objects.

    Raises:
      UserError: the partition is unknown, a setting is unknown or out of range, or is given twice.
    """
    if partition not in PARTITIONS:
        raise unknown_name("partition", partition, PARTITIONS)
    row = PARTITIONS[partition].settings
    own = {each.name for each in dataclasses.fields(row)} if row is not None else set()
    apart = {each.name for each in dataclasses.fields(Splits)} - own
    of_splits = {name: value for name, value in further.items() if name in apart}
    of_partition = {name: value for name, value in further.items() if name not in apart}
    for argument, given, named in ("settings", settings, of_partition), ("splits", splits, of_splits):
        if given is not None and named:
            names = ", ".join(f"{name}=" for name in named)
            raise UserError(f"{argument}= and {names} exclude each other: use one of them")
    if settings is None:
        settings = make(row, of_partition, f"partition {partition!r}", others=apart)
    splits = splits or Splits(**of_splits)
    check(settings, "")
    check(splits, "")
    return settings, splits


def _names_by_domain(dataset: Dataset, owned: Split) -> tuple[str, ...]:
    """Names such as ``tweets/3`` of clients that have one domain each."""
    assert dataset.domain is not None
    domains, counted = dataset.domain[owned.index[owned.offsets[:-1]]], np.zeros(len(dataset.domain_names), int)
    names = []
    for domain in domains:
        names.append(f"{dataset.domain_names[domain]}/{counted[domain]}")
        counted[domain] += 1
    return tuple(names)


class _Owned(NamedTuple):
    """The rows of each client, before the splits."""

    train: Split  # rows of x
    test: Split | None  # rows of test_x, or None if test samples have no owner
    public: np.ndarray  # rows of x
    names: tuple[str, ...]


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, STREAMS[name]]))


def _check_count(file: str, count: int, requested: int) -> None:
    if requested not in (0, count):
        raise UserError(
            f"partition file {file} has {count} clients, not {requested}: request {count} clients, or 0 for all"
        )


def _partitioned(
    dataset: Dataset,
    partition: str,
    num_clients: int,
    holdout_clients: int,
    public_size: int,
    settings: Any,
    seed: int,
    *,
    report: partitions.Report,
) -> _Owned:
    """Divide the samples by a row of `PARTITIONS`, after the public set is drawn."""
    row = PARTITIONS[partition]
    if dataset.client is not None:
        report(
            f"partition={partition!r} ignores the {len(dataset.client_names)} natural clients of {dataset.name}; "
            "partition='natural' with clients=0 takes all of them"
        )
    if row.by_label and dataset.task.strata(dataset.y[:1]) is None:
        raise UserError(
            f"partition {partition!r} divides samples by their labels, but the task {dataset.task.name} has none: "
            "use iid or quantity, or natural if the samples have clients"
        )
    if "domain" in row.gets and dataset.domain is None:
        raise UserError(f"partition {partition!r} needs domains, but {dataset.name} has none")
    public = np.sort(_stream(seed, "public").choice(len(dataset.y), public_size, replace=False))
    pool = np.delete(np.arange(len(dataset.y)), public)
    total = num_clients + holdout_clients
    if num_clients < 1:
        raise UserError(
            f"partition {partition!r} needs at least 1 client, not {num_clients}; 0 is only for natural clients"
        )
    if total > len(pool) and not row.with_replacement:
        raise UserError(
            f"{total} clients are more than the {len(pool)} training samples of {dataset.name}: use fewer clients, "
            "or partition='bootstrap', whose clients share samples"
        )
    groups, _, _ = dataset.groups()
    facts = {"domain": None if dataset.domain is None else dataset.domain[pool], "report": report}
    arguments = {name: facts[name] for name in row.gets} | ({} if settings is None else vars(settings))
    division = Split.of(row.divide(groups[pool], total, rng=_stream(seed, "partition"), **arguments))
    train = division._replace(index=pool.astype(np.int32)[division.index]) if public_size else division
    named = partition == "domain" and train.sizes.all()  # a client without samples has no domain
    return _Owned(train, None, public, _names_by_domain(dataset, train) if named else ())


def _from_authors(
    dataset: Dataset, file: str, num_clients: int, holdout_clients: int, public_size: int, seed: int
) -> _Owned:
    parts = partition_files.read_authors(file, dataset=dataset)
    _check_count(file, len(parts), num_clients and num_clients + holdout_clients)
    if holdout_clients >= len(parts):
        raise UserError(
            f"partition file {file} has {len(parts)} clients, so holdout_clients={holdout_clients} leaves none that "
            f"trains: hold out at most {len(parts) - 1}"
        )
    free = np.setdiff1d(np.arange(len(dataset.y)), np.concatenate(parts))
    if public_size > len(free):
        raise UserError(f"partition file {file} leaves {len(free)} samples, too few for a public set of {public_size}")
    return _Owned(Split.of(parts), None, np.sort(_stream(seed, "public").choice(free, public_size, replace=False)), ())


def _natural(
    dataset: Dataset,
    num_clients: int,
    holdout_clients: int,
    public_size: int,
    settings: partitions.Natural,
    seed: int,
    *,
    report: partitions.Report,
) -> _Owned:
    """Draw clients that have training samples. The public set comes from the other clients if they have enough."""
    if dataset.client is None:
        raise UserError(f"{dataset.name} has no natural clients: choose another partition")
    known, min_samples = len(dataset.client_names), settings.min_samples_per_client
    train = partitions.natural(dataset.client, known)
    test = None if dataset.test_client is None else partitions.natural(dataset.test_client, known)
    sizes = np.array([len(rows) for rows in train])
    can_train = sizes > 0
    if test is not None:
        sizes = sizes + np.array([len(rows) for rows in test])
    large = np.flatnonzero(can_train & (sizes >= min_samples))
    total = num_clients + holdout_clients if num_clients else len(large)
    if not len(large) or total > len(large) or total <= holdout_clients:
        least = f" and at least {min_samples} samples in all" if min_samples else ""
        hint = "; clients=0 takes all" if num_clients and not holdout_clients and len(large) else ""
        raise UserError(
            f"{dataset.name} has {len(large)} natural clients with training samples{least}, too few for {num_clients} "
            f"clients and {holdout_clients} held-out ones (the largest has {sizes.max()} samples){hint}"
        )
    if not can_train.all():
        report(f"natural clients of {dataset.name} without training samples are left out: {known - can_train.sum()}")
    chosen = np.sort(_stream(seed, "clients").choice(large, total, replace=False))
    others = np.concatenate(
        [np.zeros(0, np.int64), *(train[client] for client in np.setdiff1d(np.arange(known), chosen))]
    )
    donors = others if public_size <= len(others) else np.concatenate([train[client] for client in chosen])
    public = np.sort(_stream(seed, "public").choice(donors, min(public_size, len(donors)), replace=False))
    own = [np.setdiff1d(train[client], public) if donors is not others else train[client] for client in chosen]
    return _Owned(
        Split.of(own),
        None if test is None else Split.of([test[client] for client in chosen]),
        public,
        tuple(dataset.client_names[client] for client in chosen),
    )


def _split(owned: Split, validation_share: float, test_share: float, seed: int) -> tuple[Split, Split, Split]:
    """Split the rows of each client at random into training, validation and test rows.

    Every client keeps at least one training row. If only one row is left, it is also the validation row (FedMe's code).
    """
    if not validation_share and not test_share:
        nothing = Split(owned.index[:0], np.zeros_like(owned.offsets))
        return owned, nothing, nothing
    rng = _stream(seed, "split")
    train, validation, test = [], [], []
    for part in owned.parts():
        rows = rng.permutation(part)
        num_test = min(round(test_share * len(rows)), len(rows) - 1)
        test.append(rows[:num_test])
        rows = rows[num_test:]
        num_validation = (
            int(np.clip(round(validation_share * len(rows)), 1, max(1, len(rows) - 1))) if validation_share else 0
        )
        validation.append(rows[:num_validation])
        train.append(rows[num_validation:] if len(rows) > 1 else rows)
    return Split.of(train), Split.of(validation), Split.of(test)


def _matching(dataset: Dataset, owned: Split, seed: int) -> Split:
    labels, test_labels, count = dataset.groups()
    if dataset.domain is not None and dataset.test_domain is not None:  # each label of each domain
        labels, test_labels = labels + count * dataset.domain, test_labels + count * dataset.test_domain
        count *= len(dataset.domain_names)
    counts = owned.label_counts(labels, count)
    matched = partitions.matching(test_labels, counts, rng=_stream(seed, "test"))
    return matched._replace(index=matched.index.astype(np.int32))


def _assemble(dataset: Dataset, plan: PartitionPlan, *, public_labels: bool, notes: list[str]) -> FederatedData:
    """Build the federations of the training clients and of the held-out ones. Each has only its own samples."""
    for note in notes:
        logging.warning("%s", note)
    public = None
    if len(plan.public):
        public = Public(dataset.x[plan.public], dataset.y[plan.public] if public_labels else None)
    holdout = _federation(dataset, plan, np.flatnonzero(plan.held_out)) if plan.held_out.any() else None
    training = _federation(dataset, plan, np.flatnonzero(~plan.held_out))
    return dataclasses.replace(training, public=public, holdout=holdout, notes=tuple(notes), plan=plan)


def with_public(federated: FederatedData, other: Dataset, *, labels: bool, seed: int) -> FederatedData:
    """Replace the public samples by the same number of training samples of another dataset.

    Raises:
      UserError: the other samples have another shape, dtype or more classes, or are too few.
    """
    dataset, public = federated.dataset, federated.public
    assert public is not None
    ours, theirs = (f"{'x'.join(map(str, each.x.shape[1:]))} of {each.x.dtype}" for each in (dataset, other))
    if ours != theirs:
        raise UserError(f"public samples from {other.name} are {theirs}, but those of {dataset.name} are {ours}")
    if labels and other.num_classes > dataset.num_classes:
        raise UserError(
            f"public samples from {other.name} have {other.num_classes} classes, more than the {dataset.num_classes} "
            f"of {dataset.name}: use public_labels=False"
        )
    if len(other.y) < len(public.x):
        raise UserError(
            f"{len(public.x)} public samples are needed, but {other.name} has only {len(other.y)} training samples"
        )
    measured, others = (inputs.measured(each.x, dataset.categories) for each in (dataset, other))
    inputs.refuse_other_units(dataset.name, measured, others, f"public ({other.name})")
    notes = tuple(inputs.other_spread(dataset, other.x, f"public ({other.name})"))
    for note in notes:
        logging.warning("%s", note)
    rows = _stream(seed, "public").choice(len(other.y), len(public.x), replace=False)
    public = Public(other.x[rows], other.y[rows] if labels else None)
    return dataclasses.replace(federated, public=public, notes=federated.notes + notes)


def _federation(dataset: Dataset, plan: PartitionPlan, members: np.ndarray) -> FederatedData:
    """The federation of some clients of a plan. It has only their samples, so rows are renumbered."""
    everyone = len(members) == len(plan.held_out)
    train, validation, test = (
        split if everyone else split.of_clients(members) for split in (plan.train, plan.validation, plan.test)
    )
    used, tested = np.zeros(len(dataset.y), bool), np.zeros(len(dataset.test_y), bool)
    for index in (train.index, validation.index):
        used[index] = True
    tested[plan.global_test] = True
    (used if plan.own_test else tested)[test.index] = True
    if not tested.any():
        raise UserError(f"no participating client of {dataset.name} has test samples")

    def renumber(split: Split, kept: np.ndarray) -> Split:
        return split if kept.all() else split._replace(index=(np.cumsum(kept) - 1).astype(np.int32)[split.index])

    is_complete = used.all() and tested.all()
    return FederatedData(
        dataset if is_complete else dataset.take(np.flatnonzero(used), np.flatnonzero(tested)),
        renumber(train, used),
        validation=renumber(validation, used) if len(validation.index) else None,
        test=renumber(test, used if plan.own_test else tested) if len(test.index) else None,
        own_test=plan.own_test,
        names=tuple(plan.names[client] for client in members) if plan.names else (),
    )
