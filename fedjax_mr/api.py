"""The names of ``import fedjax_mr as fmr``, which imports this module when one of them is used first."""

from fedjax_mr import data, models, strategies, tasks, trees
from fedjax_mr.channel import LINKS, Link, LinkRow, Sent
from fedjax_mr.client import local
from fedjax_mr.client.optimizers import OPTIMIZERS
from fedjax_mr.clock.asynchronous import STALENESS, StalenessRow
from fedjax_mr.clock.fleet import FLEETS, Fleet, FleetRow
from fedjax_mr.compare import Comparison, compare
from fedjax_mr.config.config import Config
from fedjax_mr.config.loggers import LOGGERS
from fedjax_mr.data import SOURCES, Dataset, FederatedData, Source
from fedjax_mr.data.augment import AUGMENTATIONS, Augmentation
from fedjax_mr.data.partition import PARTITIONS, Partitioner
from fedjax_mr.data.sources.arrays import from_arrays
from fedjax_mr.data.sources.images import from_images
from fedjax_mr.data.sources.table import from_table
from fedjax_mr.data.sources.text import from_texts
from fedjax_mr.engine.layout import Layout
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.errors import DivergedError, Interrupted, UserError
from fedjax_mr.experiment.experiment import Result
from fedjax_mr.experiment.load import SavedRun, load
from fedjax_mr.experiment.run import run
from fedjax_mr.experiment.trained import TrainedNetwork
from fedjax_mr.experiment.trials import run_together
from fedjax_mr.models import MODELS, BlockNet, Model, ModelRow, Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies import GRAPHS, STRATEGIES, Cohort, Contract, Parcels, Problem, Row, Strategy, transforms
from fedjax_mr.strategies.transforms import SERVER_OPTIMIZERS
from fedjax_mr.tasks import METRICS, TASKS, Metric, Task
from fedjax_mr.tasks.losses import LOSSES, LossRow
from fedjax_mr.whatif import WhatIf, what_if

__all__ = [
    "AUGMENTATIONS",
    "FLEETS",
    "GRAPHS",
    "LINKS",
    "LOGGERS",
    "LOSSES",
    "METRICS",
    "MODELS",
    "OPTIMIZERS",
    "PARTITIONS",
    "SERVER_OPTIMIZERS",
    "SOURCES",
    "STALENESS",
    "STRATEGIES",
    "TASKS",
    "Augmentation",
    "BlockNet",
    "Cohort",
    "Comparison",
    "Config",
    "Contract",
    "Dataset",
    "DivergedError",
    "FederatedData",
    "Fleet",
    "FleetRow",
    "Interrupted",
    "Layout",
    "Link",
    "LinkRow",
    "LossRow",
    "Metric",
    "Model",
    "ModelRow",
    "Parcels",
    "Partitioner",
    "Problem",
    "Result",
    "Row",
    "SavedRun",
    "Sent",
    "Simulator",
    "Source",
    "StalenessRow",
    "Strategy",
    "Task",
    "TrainedNetwork",
    "UserError",
    "Variables",
    "WhatIf",
    "compare",
    "data",
    "field",
    "from_arrays",
    "from_images",
    "from_table",
    "from_texts",
    "load",
    "local",
    "models",
    "run",
    "run_together",
    "strategies",
    "tasks",
    "transforms",
    "trees",
    "what_if",
]
