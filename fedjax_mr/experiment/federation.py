"""The federation of a configuration: its dataset, divided among its clients."""

from fedjax_mr import data, registry
from fedjax_mr.config import settings
from fedjax_mr.config.config import Config, part, settings_of_row
from fedjax_mr.data import Dataset, FederatedData, divide
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.pretrained import tokenizer_of


def federated_data(config: Config, *, dataset: Dataset | None = None) -> FederatedData:
    """Load the dataset of a configuration and divide it among the clients.

    Args:
      config: the configuration.
      dataset: user-supplied samples. Default: the dataset that ``config`` names.

    Raises:
      UserError: as in `data.load` and `data.federate`, or K is more than N.
    """
    _check_source(config)
    seed = config.seed if config.partition_seed is None else config.partition_seed

    def load(name: str, task: str | None = None) -> Dataset:
        owned = settings_of_row(config, name, data.source_of(name).settings)
        return data.load(
            name,
            data_dir=config.data_dir,
            offline=config.offline,
            tokenizer=tokenizer_of(config),
            task=task,
            **({} if owned is None else vars(owned)),
        )

    if dataset is None:
        dataset = load(config.dataset, config.task)
    elif config.task not in (None, dataset.task.name):
        raise UserError(f"task={config.task}, but the samples are for {dataset.task.name}: leave it out")
    federated = data.federate(
        dataset,
        num_clients=config.clients,
        seed=seed,
        partition=config.partition,
        settings=settings_of_row(config, config.partition, PARTITIONS[config.partition].settings),
        splits=part(config, divide.Splits),
        partition_file=config.partition_file,
    )
    if config.public_from:
        if federated.public is None:
            raise UserError("public_from= replaces public samples: pass public_share=0.1, too")
        federated = divide.with_public(federated, load(config.public_from), labels=config.public_labels, seed=seed)
    if config.cohort > federated.num_clients:
        raise UserError(f"cohort={config.cohort} is more than the {federated.num_clients} clients of {dataset.name}")
    return federated


def _check_source(config: Config) -> None:
    """Check that no setting is one of another source than that of the dataset. Raises a UserError: one is."""
    own = None if registry.is_supplied(config.dataset) else data.source_of(config.dataset).settings
    owners = {row.settings for row in (*data.SOURCES.values(), *data.FILES.values()) if row.settings is not None}
    for owner in owners - {own}:
        for setting in settings.settings_of(owner) if issubclass(Config, owner) else ():
            if (value := getattr(config, setting.name)) != setting.default:
                raise UserError(f"{setting.name}={value} is no setting of dataset={config.dataset}: leave it out")
