"""The command ``python -m fedjax_mr.data``: show a partition without training, or prepare a dataset."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from fedjax_mr import plots
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports, titles
from fedjax_mr.data import partition_file
from fedjax_mr.data.federated import DataRequest
from fedjax_mr.data.partition_table import partition_table
from fedjax_mr.data.sources import text, tfds
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.resolve import public_share, resolve
from fedjax_mr.terminal import interrupts
from fedjax_mr.terminal.commands import exit_code
from fedjax_mr.terminal.messages import flags_in_errors

PARTITIONS_FOLDER = "runs/data"  # the folder of partitions without --run_dir
USAGE = f"""usage: python -m fedjax_mr.data [--flag=value ...]
         Show how a dataset is divided: print a table, and write partition.png and partition.npz to --run_dir
         (default: a new folder in {PARTITIONS_FOLDER}). The flags are those of {configuration.COMMAND}.
       python -m fedjax_mr.data prepare NAME [--data_dir=FOLDER]
         Download {", ".join(tfds.IMAGE_SETS)} (or a configuration such as
         emnist/letters) into FOLDER. All but CIFAR need TensorFlow: pip install 'fedjax-mr[prepare]'
       python -m fedjax_mr.data prepare sentiment [--data_dir=FOLDER]
         Convert the source distribution of vaderSentiment in FOLDER. Nothing is downloaded.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. The exit code is 0, or 2 for bad input.

    Args:
      arguments: arguments without the name of the program. Default: those of the command line.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(argument in ("--help", "-help", "-h") for argument in arguments):
        print(USAGE)
        return 0
    return exit_code(lambda: _work(arguments))


def _work(arguments: list[str]) -> None:
    with imports.blamed():
        if arguments[:1] == ["prepare"]:
            _prepare(arguments[1:])
        else:
            _show(arguments)


def _show(arguments: list[str]) -> None:
    # No client trains, so the method must not refuse several networks, nor the cohort be larger than the federation.
    config = configuration.parse(arguments)
    as_local = {"strategy": "local", "hyper": None, "cohort": 1, "public_share": public_share(config)}
    with flags_in_errors(config.strategy):
        config = resolve(dataclasses.replace(config, **as_local)).config
        federated = federated_data(config)
    words = [Path(config.dataset).stem, Path(config.partition_file or config.partition).stem, federated.hash()[:8]]
    folder = Path(config.run_dir or f"{PARTITIONS_FOLDER}/{'-'.join(words)}")
    picture = folder / f"partition.{config.picture_format}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        division = titles.division(titles.facts(config))
        title = f"{titles.dataset(federated.dataset.name)}, {division}, {federated.num_clients} clients"
        plots.partition(federated.label_counts(), picture, title=title, group=federated.dataset.task.group)
        assert federated.plan is not None  # `federate` always makes one
        partition_file.save(federated.plan, folder / "partition.npz")
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror or error}; choose another --run_dir") from None
    print(partition_table(federated))
    print(f"saved {picture} and {folder / 'partition.npz'}")


def _prepare(arguments: list[str]) -> None:
    names = [argument for argument in arguments if not argument.startswith("-")]
    if len(names) != 1:
        raise UserError("prepare takes one name: python -m fedjax_mr.data prepare NAME --data_dir=FOLDER")
    name = names[0]
    if name.partition("/")[0] not in (known := (*tfds.IMAGE_SETS, "sentiment")):
        raise unknown_name("dataset to prepare", name, known)
    config = configuration.parse([argument for argument in arguments if argument != name])
    prepare = text.prepare_sentiment if name == "sentiment" else tfds.prepare
    place = prepare(DataRequest(name, config.data_dir, config.offline))
    print(f"{name} is in {place}")


if __name__ == "__main__":
    code = interrupts.run(main)
    interrupts.leave_if_interrupted()  # do not wait for downloads
    sys.exit(code)
