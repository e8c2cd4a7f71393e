"""The initial network of each client: by a rule, by a list, or the best network for its samples (FedMe)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment.folder import read_clients, read_rows, read_summary, run_state
from fedjax_mr.results.rows import metric_of
from fedjax_mr.tasks import METRICS

RANDOM_STREAM = 1  # stream of the seed for the rule ``random``


def best_of(folders: Sequence[str], num_clients: int | None = None) -> np.ndarray:
    """The number of the run whose model was best on each client's validation samples [N].

    A client without validation samples uses its test samples. The first of equally good runs wins.

    Args:
      folders: run folders with ``clients.csv``.
      num_clients: N. Default: the number of clients in the first folder.

    Raises:
      UserError: a folder has no such file, or the file is damaged or has another number of clients.
    """
    columns = []
    for folder in folders:
        path, rows = Path(folder) / "clients.csv", read_clients(folder)
        try:
            columns.append(_quality(rows))
        except (KeyError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error})") from None
        num_clients = len(rows) if num_clients is None else num_clients
        if len(rows) != num_clients:
            raise UserError(f"{path} has {len(rows)} clients, not {num_clients}")
    return np.argmax(np.array(columns), axis=0)


def _quality(rows: Sequence[Mapping[str, str]]) -> list[float]:
    """The first metric of each client on its validation samples, or else its test samples; higher is better."""
    held_out = next(name for name in rows[0] if name.startswith("validation_"))
    name = held_out.removeprefix("validation_")
    sign = 1 if name not in METRICS or METRICS[name].higher_is_better else -1
    return [sign * float(row[held_out] or row[name] or 0.0) for row in rows]


def trained_alone(folders: Iterable[Path | str]) -> dict[str, dict[str, Path]]:
    """The finished runs of Local-only with a single network, by partition hash and network.

    If several runs have the same partition and network, the one with the best mean accuracy of its clients is chosen
    (on the same samples as in `best_of`).
    """
    candidates: dict[str, dict[str, tuple[float, Path]]] = {}
    for folder in map(Path, folders):
        config = configuration.load(folder)
        if config.strategy == "local" and "," not in config.model and run_state(folder) == "finished":
            summary, last = read_summary(folder), read_rows(folder)[-1]
            metric = metric_of([last])
            known = [last.get(f"{samples}_{metric.name}") for samples in ("validation", "personal")]
            value = next((value for value in known if value is not None), None)
            quality = -math.inf if value is None else value if metric.higher_is_better else -value
            networks = candidates.setdefault(summary["partition_hash"], {})
            networks[config.model] = max(networks.get(config.model, (-math.inf, folder)), (quality, folder))
    return {
        division: {network: folder for network, (_, folder) in networks.items()}
        for division, networks in candidates.items()
    }


def best_networks(
    folders: Sequence[str], networks: Sequence[str], num_clients: int, *, division: str = ""
) -> np.ndarray:
    """The number of the network that was best for each client in earlier runs [N].

    Args:
      folders: the run folder of each network, in order, or one folder that contains the runs of all networks.
      networks: the names of the networks.
      num_clients: N.
      division: hash of the partition, which selects the runs in the one folder.

    Raises:
      UserError: a network has no such run, or as in `best_of`.
    """
    if len(folders) == len(networks):
        return best_of(folders, num_clients)
    runs = trained_alone(path.parent for path in sorted(Path(folders[0]).rglob("config.json"))).get(division, {})
    if missing := [network for network in networks if network not in runs]:
        raise UserError(
            f"architectures_from={folders[0]} holds no finished run of strategy=local model={missing[0]} with the same "
            "partition of the data (seed, partition, shares)"
        )
    return best_of([str(runs[network]) for network in networks], num_clients)


def architectures(rule: str, count: int, num_clients: int, *, seed: int = 0) -> np.ndarray:
    """The number of the initial network of each client [N].

    Args:
      rule: ``blocks``, ``cyclic``, ``random``, or the number of each client's network, separated by commas.
      count: number of networks.
      num_clients: N.
      seed: seed of the rule ``random``.

    Raises:
      UserError: unknown rule, or a list of a wrong length or with a number that no network has.
    """
    match rule:
        case "blocks":
            return np.arange(num_clients) * count // num_clients
        case "cyclic":
            return np.arange(num_clients) % count
        case "random":
            return np.random.default_rng([seed, RANDOM_STREAM]).integers(0, count, num_clients)
    words = rule.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise unknown_name("value of architectures=", rule, ("blocks", "cyclic", "random", "0,1,..."))
    numbers = np.array([int(word) for word in words])
    if len(numbers) != num_clients or numbers.max() >= count:
        raise UserError(
            f"the setting architectures lists {len(numbers)} networks up to number {numbers.max()}, but there are "
            f"{num_clients} clients and {count} networks (0 to {count - 1})"
        )
    return numbers
