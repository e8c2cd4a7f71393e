"""Accuracy of the deployed model on each client's own test samples: histogram, mean, spread and the worst tenth.

Of runs that are judged by another metric, it is that one.

The clients' test samples are those of ``python -m fedjax_mr.data``: their natural ones, or parts of the test set in the
proportions of their labels. Every client counts the same, whatever its size. Clients without test samples do not count.

If a method deploys no model, the accuracies are those of the clients' personal models at the end of the run
(``clients.csv``). With ``--partition=domain``, a second table has the mean over the clients of each domain.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import plots
from fedjax_mr.analysis import runs, tables
from fedjax_mr.client import local
from fedjax_mr.client.local import Score
from fedjax_mr.client.samples import one_client
from fedjax_mr.config import titles
from fedjax_mr.engine.personal import worst_tenth
from fedjax_mr.engine.simulator import normalised
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import read_clients
from fedjax_mr.models import Variables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)
    runs.add_picture_arguments(parser)
    runs.add_restore_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Plot the clients' accuracies and print their distribution."""
    chosen = runs.read(arguments.runs)
    metric = chosen[0].metric()
    accuracies, domains = [], []
    for run in chosen:
        trained = runs.restore(run, data_dir=arguments.data_dir, trust=arguments.trust)
        accuracies.append(per_client(run, trained))
        domains.append(per_domain(trained, accuracies[-1]))
    names = titles.runs([run.config for run in chosen])
    with runs.output_folder(arguments.out, chosen) as folder:
        path = folder / f"clients.{arguments.format}"
        plots.histograms(
            {name: values.tolist() for name, values in zip(names, accuracies, strict=True)},
            path,
            x_label=f"{metric.title} on the client's own test samples",
            y_label="clients",
            methods={name: run.method() for name, run in zip(names, chosen, strict=True)},
        )
    rows = [["run", "clients", "mean", "standard deviation", "worst 10 %", "worst"]]
    worst = min if metric.higher_is_better else max
    for run, values in zip(chosen, accuracies, strict=True):
        values = values[~np.isnan(values)]
        tenth = worst_tenth(values, higher_is_better=metric.higher_is_better)
        numbers = (values.mean(), values.std(), tenth, worst(values))
        rows.append([run.name, str(len(values)), *(f"{number:.4f}" for number in numbers)])
    print(tables.aligned(rows))
    print(f"drawn in {path}")
    for columns in dict.fromkeys(tuple(each) for each in domains if each):
        rows = [["run", *columns, "mean", "worst"]]
        for name, each in zip(names, domains, strict=True):
            if tuple(each) == columns:
                numbers = (*each.values(), np.mean(list(each.values())), worst(each.values()))
                rows.append([name, *(f"{number:.4f}" for number in numbers)])
        print(f"\n{tables.aligned(rows)}")


def per_client(run: runs.RunRecord, trained: runs.Trained) -> np.ndarray:
    """Accuracies [clients with test samples] of the deployed or the personal models, in the order of the clients.

    Raises:
      UserError: the method deploys no model and the run has no ``clients.csv``, or no client has test samples.
    """
    if trained.deployed is None:
        return _of_personal_models(run)
    own = trained.federated.client_test
    if not own.split.index.size:
        raise UserError(f"the clients of {run.path} have no test samples of their own")
    test = jax.tree.map(jnp.asarray, normalised(trained.federated.dataset, own.x, own.y))
    index = jnp.asarray(own.split.index)

    @jax.jit
    def score(variables: Variables, offset: jax.Array, size: jax.Array) -> Score:
        data = one_client(test, size=size)._replace(index=index, offset=offset)
        return local.score(trained.model, variables, data, batch_size=local.evaluation_batch(trained.model))

    metric = trained.model.task.primary
    ranges = zip(own.split.offsets[:-1], own.split.sizes, strict=True)
    scores = [score(trained.deployed, offset, size) for offset, size in ranges if size]
    return np.array([float(metric.of(each.metrics[metric.name])) for each in scores])


def _of_personal_models(run: runs.RunRecord) -> np.ndarray:
    try:
        name = run.metric().name
        return np.array([float(row[name]) for row in read_clients(run.path) if int(row["test_samples"])])
    except (KeyError, ValueError) as error:
        raise UserError(f"{run.path / 'clients.csv'} is damaged ({error})") from None


def per_domain(trained: runs.Trained, accuracies: np.ndarray) -> dict[str, float]:
    """The mean of ``accuracies`` over the clients of each domain. Empty if clients have no or several domains."""
    federated = trained.federated
    domain_of = [name.rpartition("/")[0] for name in federated.names]
    if not domain_of or not set(domain_of) <= set(federated.dataset.domain_names):
        return {}
    tested = np.array(domain_of)[[len(rows) > 0 for rows in federated.client_test.split.parts()]]
    return {name: float(accuracies[tested == name].mean()) for name in dict.fromkeys(tested.tolist())}
