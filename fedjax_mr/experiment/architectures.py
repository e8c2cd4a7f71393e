"""The network that each client starts with: by a rule, by a list, or by FedMe's choice of the best one."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.folder import read_rows, read_summary, run_state

RANDOM_STREAM = 1  # beside the seed, of the draw of networks


def best_of(folders: Sequence[str], num_clients: int | None = None) -> np.ndarray:
    """Return for each client the number of the run [N] whose model was best on the client's validation samples.

    The test samples of a client without validation samples decide; the first of equals wins.

    Args:
      folders: run folders with ``clients.csv``.
      num_clients: N; None: as many as the first folder has.

    Raises:
      UserError: a folder holds no such file, or a damaged one, or one of other clients.
    """
    columns = []
    for folder in folders:
        path = Path(folder) / "clients.csv"
        if run_state(folder) == "finished":
            read_summary(folder)  # which has the file's checksum
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            columns.append([float(row["validation_accuracy"] or row["accuracy"] or 0.0) for row in rows])
        except OSError as error:
            raise UserError(f"{folder} has no results per client ({path.name}: {error.strerror})") from None
        except (KeyError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error})") from None
        num_clients = len(rows) if num_clients is None else num_clients
        if len(rows) != num_clients:
            raise UserError(f"{path} is about {len(rows)} clients, not {num_clients}")
    return np.argmax(np.array(columns), axis=0)


def trained_alone(folders: Iterable[Path | str]) -> dict[str, dict[str, Path]]:
    """Return the finished runs of Local-only with a single network by their division of the data and by network.

    Of several with the same division and network, the one whose clients are best on average, judged as by `best_of`.
    """
    found: dict[str, dict[str, tuple[float, Path]]] = {}
    for folder in map(Path, folders):
        config = configuration.load(folder)
        if config.strategy == "local" and "," not in config.model and run_state(folder) == "finished":
            summary, last = read_summary(folder), read_rows(folder)[-1]
            known = [last.get(name) for name in ("validation_accuracy", "personal_accuracy")]
            quality = next((value for value in known if value is not None), 0.0)
            networks = found.setdefault(summary["partition_hash"], {})
            networks[config.model] = max(networks.get(config.model, (-1.0, folder)), (quality, folder))
    return {
        division: {network: folder for network, (_, folder) in networks.items()} for division, networks in found.items()
    }


def _runs_of_networks(config: Config, division: str) -> Sequence[str]:
    """Return the run folder of each network, in order, that ``architectures_from`` names or holds.

    Args:
      config: names as many folders as networks, or one that holds the runs of all of them.
      division: the hash of the data's division, by which the runs in that one folder are found.

    Raises:
      UserError: a network has no such run.
    """
    named, networks = config.architectures_from, config.model.split(",")
    if len(named) == len(networks):
        return named
    runs = trained_alone(path.parent for path in sorted(Path(named[0]).rglob("config.json"))).get(division, {})
    if missing := [network for network in networks if network not in runs]:
        raise UserError(
            f"--architectures_from: {named[0]} holds no finished run of --strategy=local --model={missing[0]} with the "
            "same division of the data (seed, partition, shares)"
        )
    return [str(runs[network]) for network in networks]


def architectures(config: Config, num_clients: int, *, division: str = "") -> np.ndarray:
    """Return the number of the network, in the order of the configuration, that each client starts with [N].

    Args:
      config: the configuration.
      num_clients: N.
      division: the hash of the data's division, for ``architectures_from`` of one folder.

    Raises:
      UserError: a list of another length or with numbers that no network has; runs with other clients.
    """
    count = len(config.model.split(","))
    if config.architectures_from:
        return best_of(_runs_of_networks(config, division), num_clients)
    match config.architectures:
        case "blocks":
            return np.arange(num_clients) * count // num_clients
        case "cyclic":
            return np.arange(num_clients) % count
        case "random":
            return np.random.default_rng([config.seed, RANDOM_STREAM]).integers(0, count, num_clients)
    words = config.architectures.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise unknown_name("value of --architectures", config.architectures, ("blocks", "cyclic", "random", "0,1,..."))
    numbers = np.array([int(word) for word in words])
    if len(numbers) != num_clients or numbers.max() >= count:
        raise UserError(
            f"--architectures lists {len(numbers)} networks up to number {numbers.max()}, but there are {num_clients} "
            f"clients and {count} networks (0 to {count - 1})"
        )
    return numbers
