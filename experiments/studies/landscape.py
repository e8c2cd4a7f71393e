"""Loss landscapes around the deployed models along shared random directions (KDD'24, Figure 7), with sharpness numbers.

Li, Xu, Taylor, Studer, Goldstein: Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018, section 4: a direction
is drawn from a Gaussian and every filter of it gets the norm of the model's own filter, so that a distance of 1 means
the same for models whose weights differ in scale. A filter is all that makes one output channel or unit: the last axis
of a kernel. Biases and normalisation parameters are not moved (their option), and the statistics of BatchNorm stay
those of the model. All runs of a command share the random draw; each scales it by its own filters.

Sharpness is printed and written to sharpness.json. It is the mean rise of the loss at filter-normalised distance R over
random directions, both ways, and the largest eigenvalue (in magnitude) of the Hessian of the loss in all parameters, by
power iteration. The loss is the mean cross-entropy in evaluation mode of a random subset of the samples.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import contours
from fedjax_mr import files, plots, trees
from fedjax_mr.analysis import command, runs, tables
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples, gather
from fedjax_mr.config import config as configuration
from fedjax_mr.config import titles
from fedjax_mr.engine.simulator import normalised
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import Model, Variables
from fedjax_mr.terminal import interrupts

SHARPNESS = "sharpness.json"  # results by `configuration.portable_name` of the run
BATCH = 500  # samples per step of the loss
SIDE_BY_SIDE = {"cpu": 1}  # points that one call computes; convolutions whose kernels differ are slow there
ELSEWHERE = 32


class Sharpness(NamedTuple):
    """The sharpness of a minimum: two numbers, each with its error."""

    rise: float  # mean rise of the loss at the radius, in nats
    rise_error: float  # standard error of that mean over the directions
    eigenvalue: float  # largest in magnitude of the Hessian
    residual: float  # ||H v - eigenvalue v|| of the unit eigenvector v


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)
    runs.add_picture_arguments(parser)
    runs.add_restore_arguments(parser)
    parser.add_argument(
        "--dimensions", type=int, choices=(1, 2), default=2, help="number of random directions. Default: 2"
    )
    parser.add_argument("--points", type=int, default=21, help="points per direction, an odd number. Default: 21")
    parser.add_argument("--radius", type=float, default=1.0, help="largest distance, in filter norms. Default: 1")
    parser.add_argument("--of", choices=("test", "train"), default="test", help="samples of the loss. Default: test")
    parser.add_argument("--samples", type=int, default=1000, help="number of samples. 0 uses all. Default: 1000")
    parser.add_argument(
        "--round", type=int, default=None, help="round of the checkpoint. Default: the newest of each run"
    )
    parser.add_argument(
        "--sharpness_radius", type=float, default=0.2, help="distance R of the mean rise, in filter norms. Default: 0.2"
    )
    parser.add_argument(
        "--sharpness_directions", type=int, default=10, help="random directions of the mean rise. Default: 10"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of directions and samples. Default: 0")


def main(arguments: argparse.Namespace) -> None:
    """Compute, plot and save the landscapes of the runs, and print their sharpness."""
    check(arguments)
    records = runs.read(arguments.runs)
    with runs.output_folder(arguments.out, records) as folder:
        _explore(arguments, records, folder)


def _explore(arguments: argparse.Namespace, chosen: Sequence[runs.RunRecord], folder: Path) -> None:
    """Compute the landscapes, save and plot them in ``folder``, and print the sharpness."""
    steps = np.linspace(-arguments.radius, arguments.radius, arguments.points, dtype=np.float32)
    grid = np.stack(np.meshgrid(*[steps] * arguments.dimensions, indexing="ij"), axis=-1)  # [points, (points,) D]
    surfaces: dict[str, np.ndarray] = {}
    sharp: dict[str, dict[str, float]] = {}
    rows: list[tuple[str, ...]] = [
        ("run", "round", "loss", f"rise at {arguments.sharpness_radius:g}", "+-", "eigenvalue", "residual")
    ]
    for run in chosen:
        trained = runs.restore(run, round=arguments.round, data_dir=arguments.data_dir, trust=arguments.trust)
        if trained.deployed is None:
            raise UserError(f"{run.path}: {run.config.strategy} deploys no model")
        part = draw(trained, of=arguments.of, count=arguments.samples, seed=arguments.seed)
        around = Around(trained.model, jax.tree.map(jnp.asarray, trained.deployed), part)
        key = random_key(arguments.seed)
        directions = [around.direction(jax.random.fold_in(key, number)) for number in range(arguments.dimensions)]
        points = grid.reshape(-1, arguments.dimensions)
        with tqdm(total=len(points), desc=run.name, unit="point", leave=False, disable=None) as bar:
            surface = around.losses(directions, points, report=bar.update)
        surfaces[run.name] = surface.reshape(grid.shape[:-1])
        sharpness = around.sharpness(
            jax.random.fold_in(key, 100), radius=arguments.sharpness_radius, count=arguments.sharpness_directions
        )
        sharp[configuration.portable_name(run.config)] = {
            "round": trained.round,
            "loss": around.loss(),
            **sharpness._asdict(),
        }
        rows.append((run.name, str(trained.round), f"{around.loss():.4f}", *(f"{number:.4g}" for number in sharpness)))
    name = f"landscape{arguments.dimensions}d"
    with files.atomic_write(folder / f"{name}.npz") as file:
        np.savez(file, steps=steps, names=np.array(list(surfaces)), losses=np.stack(list(surfaces.values())))
    how = ("of", "samples", "sharpness_radius", "sharpness_directions", "seed")
    facts = {flag: getattr(arguments, flag) for flag in how} | {"runs": sharp}
    with files.atomic_write(folder / SHARPNESS) as file:
        file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    label, path = f"{arguments.of} loss (nats)", folder / f"{name}.{arguments.format}"
    shown = dict(zip(titles.runs([run.config for run in chosen]), surfaces.values(), strict=True))
    if arguments.dimensions == 1:
        lines = {title: (steps, surface) for title, surface in shown.items()}
        methods = {title: run.method() for title, run in zip(shown, chosen, strict=True)}
        plots.lines({"": lines}, path, x_label="distance (filter norms)", y_label=label, methods=methods)
    else:
        contours.draw(shown, steps, path, label=label)
    print(tables.aligned(rows))
    print(f"drawn in {path}, kept in {folder / name}.npz and {folder / SHARPNESS}")


def check(arguments: argparse.Namespace) -> None:
    """Check the ranges of the arguments.

    Raises:
      UserError: an argument is out of its range.
    """
    allowed = {
        "points": ("an odd number of at least 3", arguments.points >= 3 and arguments.points % 2 == 1),
        "radius": ("above 0", 0 < arguments.radius < float("inf")),
        "samples": ("at least 0", arguments.samples >= 0),
        "sharpness_radius": ("above 0", 0 < arguments.sharpness_radius < float("inf")),
        "sharpness_directions": ("at least 2", arguments.sharpness_directions >= 2),
        "seed": ("at least 0 and below 2^31", 0 <= arguments.seed < 2**31),
    }
    for name, (words, fine) in allowed.items():
        if not fine:
            raise UserError(f"--{name}={getattr(arguments, name)} is out of range: it must be {words}")


def draw(trained: runs.Trained, *, of: str, count: int, seed: int) -> Samples:
    """A random subset of at most ``count`` test or training samples. 0 uses all."""
    dataset = trained.federated.dataset
    x, y = (dataset.test_x, dataset.test_y) if of == "test" else (dataset.x, dataset.y)
    if count and count < len(y):
        rows = np.sort(np.random.default_rng(seed).choice(len(y), count, replace=False))
        x, y = x[rows], y[rows]
    return normalised(trained.federated.dataset, x, y)


def filter_normalised(key: jax.Array, params: Any) -> Any:
    """A random direction whose filters have the norms of the filters of ``params``. Consumes ``key``.

    Tensors with fewer than two axes are zero: they are not moved.
    """
    leaves, structure = jax.tree.flatten(params)

    def scaled(key: jax.Array, leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2:
            return jnp.zeros_like(leaf)
        raw = jax.random.normal(key, leaf.shape, leaf.dtype)
        axes = tuple(range(leaf.ndim - 1))
        norm = lambda tensor: jnp.sqrt(jnp.sum(jnp.square(tensor), axis=axes, keepdims=True))
        return raw * (norm(leaf) / norm(raw))

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [scaled(*pair) for pair in zip(keys, leaves, strict=True)])


class Around:
    """The loss around a model, compiled once for all directions and points."""

    def __init__(self, model: Model, variables: Variables, part: Samples, *, batch: int = BATCH):
        """Cut the samples into batches of equal size. The last one is padded and masked."""
        count = len(part.y)
        batch = min(batch, count)
        rows = np.minimum(np.arange(-(-count // batch) * batch), count - 1)
        self.params = variables["params"]
        self._samples = part._replace(x=jnp.asarray(part.x[rows]), y=jnp.asarray(part.y[rows]))
        self._mask = jnp.asarray(np.arange(len(rows)) < count, jnp.float32)
        self._batch, self._count = batch, count
        self._others = {name: value for name, value in variables.items() if name != "params"}

        def loss(params: Any, others: Variables, part: Samples, mask: jax.Array) -> jax.Array:
            score = local.evaluate(model, {"params": params, **others}, part, mask, batch_size=batch)
            return score.loss / score.count

        def losses(params: Any, directions: Sequence[Any], points: jax.Array, *others: Any) -> jax.Array:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *directions)

            def one(point: jax.Array) -> jax.Array:
                moved = jax.tree.map(lambda leaf, along: leaf + jnp.tensordot(point, along, axes=1), params, stacked)
                return loss(moved, *others)

            return jax.vmap(one)(points)

        def product(params: Any, vector: Any, others: Variables, part: Samples, mask: jax.Array) -> Any:
            def total(params: Any) -> jax.Array:
                logits = model.apply({"params": params, **others}, gather(part, jnp.arange(batch)))
                return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, part.y) * mask)

            # In reverse mode twice: our own gradients (windows.conv) have no forward mode. And of one batch, as
            # JAX 0.10 fails to differentiate a scan over them for the second time.
            return jax.grad(lambda params: _inner(jax.grad(total)(params), vector))(params)

        self._losses, self._loss, self._product = jax.jit(losses), jax.jit(loss), jax.jit(product)
        self.direction: Callable[[jax.Array], Any] = jax.jit(functools.partial(_swap(filter_normalised), self.params))

    def loss(self) -> float:
        """The loss of the model itself."""
        return float(self._loss(self.params, self._others, self._samples, self._mask))

    def losses(
        self, directions: Sequence[Any], points: np.ndarray, *, report: Callable[[int], Any] = lambda count: None
    ) -> np.ndarray:
        """The losses [P] at params + sum over d of points[p, d] * directions[d].

        Args:
          directions: D trees like the parameters.
          points: [P, D].
          report: called with the number of points after each batch of points.
        """
        width, computed = SIDE_BY_SIDE.get(jax.default_backend(), ELSEWHERE), []
        for start in range(0, len(points), width):
            some = points[start : start + width]
            filled = np.concatenate([some, np.repeat(some[-1:], width - len(some), axis=0)])
            losses = self._losses(self.params, directions, filled, self._others, self._samples, self._mask)
            computed.append(np.asarray(losses)[: len(some)])
            report(len(some))
        return np.concatenate(computed)

    def sharpness(self, key: jax.Array, *, radius: float, count: int) -> Sharpness:
        """The sharpness of the model. Consumes ``key``."""
        here, rises = self.loss(), []
        for number in range(count):
            direction = self.direction(jax.random.fold_in(key, number))
            rises.append(self.losses([direction], np.array([[-radius], [radius]], np.float32)).mean() - here)
        value, residual = self.largest_eigenvalue(jax.random.fold_in(key, count))
        return Sharpness(float(np.mean(rises)), float(np.std(rises, ddof=1) / np.sqrt(count)), value, residual)

    def _hessian_times(self, vector: Any) -> Any:
        """The product of the Hessian of the mean loss with a tree like the parameters."""
        total = trees.zeros_like(self.params)
        for start in range(0, len(self._mask), self._batch):
            rows = slice(start, start + self._batch)
            part = self._samples._replace(x=self._samples.x[rows], y=self._samples.y[rows])
            total = _add(total, self._product(self.params, vector, self._others, part, self._mask[rows]))
        return _scale(total, 1 / self._count)

    def largest_eigenvalue(self, key: jax.Array, *, tolerance: float = 1e-3, most: int = 200) -> tuple[float, float]:
        """The eigenvalue of the Hessian with the largest magnitude, and the residual of its unit eigenvector.

        Power iteration from a Gaussian vector. It stops when the eigenvalue changes by less than ``tolerance`` of
        itself, or after ``most`` products. Consumes ``key``.
        """
        vector, value, residual = _unit(_gaussian(key, self.params)), 0.0, 0.0
        for _ in range(most):
            product = self._hessian_times(vector)
            before, value = value, float(_inner(vector, product))
            residual = float(_distance(product, _scale(vector, value)))
            if value == 0.0 or abs(value - before) <= tolerance * abs(value):
                break
            vector = _unit(product)
        return value, residual


def _swap(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda second, first: function(first, second)


# Each of these is one compiled program for all leaves.
_add, _scale = jax.jit(trees.add), jax.jit(trees.scale)


@jax.jit
def _gaussian(key: jax.Array, like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        structure, [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    )


@jax.jit
def _distance(a: Any, b: Any) -> jax.Array:
    return jnp.sqrt(trees.squared_norm(trees.subtract(a, b)))


@jax.jit
def _unit(tree: Any) -> Any:
    return trees.scale(tree, 1 / jnp.sqrt(trees.squared_norm(tree)))


@jax.jit
def _inner(a: Any, b: Any) -> jax.Array:
    return functools.reduce(jnp.add, map(jnp.vdot, jax.tree.leaves(a), jax.tree.leaves(b)))


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
