"""Runs whose settings and metrics are kept apart from the machine that trained them."""

import dataclasses
from pathlib import Path

from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.folder import runs_by_settings

SHARPNESS = "sharpness.json"
"""What the command ``landscape`` says of runs, by the names of their kept folders; it stands beside these."""


def portable(config: Config) -> Config:
    """Return a configuration with the names of files alone, whose folders are this machine's, and no run folder."""
    last = lambda path: None if path is None else Path(path).name
    return dataclasses.replace(
        config,
        data_dir=None,
        run_dir=None,
        compare_to=(),
        dataset=last(config.dataset),
        public_from=last(config.public_from),
        partition_file=last(config.partition_file),
        architectures_from=tuple(map(last, config.architectures_from)),
        imports=tuple(map(last, config.imports)),
    )


def folder_name(config: Config) -> str:
    """Return the name of a kept run's folder, which says its settings; the same on every machine."""
    settings = portable(config)
    return f"{settings.strategy}-seed={settings.seed}-{configuration.digest(settings)}"


class Kept:
    """The runs that are kept in a folder, at any depth."""

    def __init__(self, folder: str | None) -> None:
        """Read the settings of all; without a folder there are none.

        Raises:
          UserError: the folder holds none.
        """
        self._by_digest = runs_by_settings(folder, "**") if folder else {}
        if folder and not self._by_digest:
            raise UserError(f"--kept={folder} holds no kept run (no config.json): name one such as experiments/results")

    def of(self, config: Config) -> list[Path]:
        """Return the folders of the runs with the settings of a configuration, wherever its files are."""
        return self._by_digest.get(configuration.digest(portable(config)), [])
