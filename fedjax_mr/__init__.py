"""Multi-model federated learning in one XLA program.

``Simulator("fedmr", "cnn_digits", federated, cohort=5)`` trains in a notebook, without folders and files.
``run(Config(strategy="fedmr"))`` records a run in a folder, as ``python -m fedjax_mr.main --strategy=fedmr`` does.
Your own method is a function ``build(hyper, problem) -> Strategy``, written from scratch or made from other methods
(`transforms`). A row in ``STRATEGIES`` gives it a name; rows in ``MODELS`` and ``SOURCES`` name networks and datasets.
"""

# ruff: noqa: E402
from fedjax_mr.experiment import interrupts

interrupts.begin()  # before the imports that take seconds

from fedjax_mr import data, models, strategies, trees
from fedjax_mr.client import local
from fedjax_mr.data import SOURCES, Dataset, FederatedData
from fedjax_mr.data.partition import PARTITIONS, Partitioner
from fedjax_mr.data.sources.arrays import from_arrays
from fedjax_mr.data.sources.text import from_texts
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.experiment import Result
from fedjax_mr.experiment.load import SavedRun, load
from fedjax_mr.experiment.run import Interrupted, run
from fedjax_mr.experiment.trained import TrainedNetwork
from fedjax_mr.experiment.trials import run_together
from fedjax_mr.models import MODELS, BlockNet, Model, ModelRow, Variables, platforms
from fedjax_mr.strategies import STRATEGIES, Cohort, Parcels, Problem, Row, Strategy, transforms
from fedjax_mr.strategies.hyper import field

platforms.skip_absent_accelerators()

__version__ = "0.3.0"

__all__ = [
    "MODELS",
    "PARTITIONS",
    "SOURCES",
    "STRATEGIES",
    "BlockNet",
    "Cohort",
    "Config",
    "Dataset",
    "DivergedError",
    "FederatedData",
    "Interrupted",
    "Model",
    "ModelRow",
    "Parcels",
    "Partitioner",
    "Problem",
    "Result",
    "Row",
    "SavedRun",
    "Simulator",
    "Strategy",
    "TrainedNetwork",
    "UserError",
    "Variables",
    "data",
    "field",
    "from_arrays",
    "from_texts",
    "load",
    "local",
    "models",
    "run",
    "run_together",
    "strategies",
    "transforms",
    "trees",
]
