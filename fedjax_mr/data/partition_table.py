"""A summary of a federation: the number of clients, their samples and, for classification, their classes."""

import numpy as np

from fedjax_mr.data.federated import FederatedData


def partition_table(federated: FederatedData) -> str:
    """Describe how a dataset is divided, with min, median, mean, max and standard deviation over the clients."""
    dataset = federated.dataset
    splits = {"validation samples": federated.validation, "own test samples": federated.test}
    others = {name: split.sizes for name, split in splits.items() if split is not None}
    rows = {"training samples": federated.sizes, **others}
    if others:
        rows["all samples"] = np.sum(list(rows.values()), axis=0)
    learned = dataset.task.name
    if "classes" in dataset.task.provides:
        learned = f"{dataset.num_classes} classes"
        rows["classes"] = (federated.label_counts() > 0).sum(axis=1)
    lines = [
        f"{dataset.name}: {federated.num_clients} clients, {federated.sizes.sum()} training samples, "
        f"{len(dataset.test_y)} test samples, {learned}, "
        f"{dataset.x.dtype} {' x '.join(map(str, dataset.x.shape[1:]))}",
        f"{'per client':<20}{'min':>8}{'median':>8}{'mean':>10}{'max':>8}{'std':>10}{'total':>10}",
    ]
    for name, values in rows.items():
        total = "" if name == "classes" else values.sum()
        lines.append(
            f"{name:<20}{values.min():>8}{np.median(values):>8g}{values.mean():>10.1f}{values.max():>8}"
            f"{values.std():>10.1f}{total:>10}".rstrip()
        )
    if federated.public:
        kind = "unlabelled" if federated.public.y is None else "labelled"
        lines.append(f"public set: {len(federated.public.x)} {kind} samples")
    if federated.holdout:
        held_out = federated.holdout
        lines.append(f"held out: {held_out.num_clients} clients with {held_out.sizes.sum()} training samples")
    return "\n".join([*lines, *federated.notes, f"partition {federated.hash()}"])
