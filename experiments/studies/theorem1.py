"""Theorem 1 of FedMR on strongly convex problems: the gap to the optimum and its bound. Needs no run folder.

Hu et al., KDD 2024, Theorem 1 with Lemma 4.4 and Appendix A, which follow Li et al., On the Convergence of FedAvg on
Non-IID Data, ICLR 2020. Every client takes part (N = K), trains E steps of plain gradient descent per round, and step t
= 1, 2, ... of the whole training has the learning rate eta_t = 2 / (mu (t + gamma)), gamma = max(8 L / mu, E), so that
eta_t <= 1 / (4 L) and eta_t <= 2 eta_(t+E), as the proof asks. After T = n E steps

    f(mean of the K models) - f*  <=  L / (2 mu (T + gamma)) [4 B / mu + mu (gamma + 1) / 2 Delta_1],
    B = 10 L Gamma + 4 (E - 1)^2 G^2.

The theorem prints the mean without its 1/K, and eta with T in place of t. Its last term is half of the one that the
proof of Li et al. yields; the bound here is the printed one, the smaller of the two. Its B has no variance of the
gradients (the proof uses ||grad f_k||^2 <= 2 L (f_k - f_k*), true of full gradients only), so gradients here are full.

The constants come from the problem, not from the history of a training: f is the uniform mean of the K clients' losses
f_k; L the largest smoothness and mu the smallest convexity of any f_k; Gamma = f* - mean of f_k*; Delta_1 the mean of
||w_1 - w*||^2. G^2 has to bound the mean of ||grad f_k||^2 over the clients, which is all that Lemma A.2 asks for. Let
S and Q be the root mean squares over k of ||grad f_k(w*)|| and of ||w^k - w*||. A step changes Q to at most
(1 - eta mu) Q + eta S, recombination does not change it (Lemma 4.4), so Q <= max(Q_1, S / mu) at all times, and
G = S + L max(Q_1, S / mu).

The engine trains in single precision: once eta_t times the gradient is below the spacing of numbers near w, FedAvg's
steps get lost (here after about 50,000 steps), so longer trainings show a floor that is not the method's.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize
import scipy.special

from fedjax_mr import plots
from fedjax_mr.analysis import command, runs, tables
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples
from fedjax_mr.data import Split
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.round import Federation, RunConstants
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import Model
from fedjax_mr.strategies import STRATEGIES, Problem, Strategy
from fedjax_mr.terminal import interrupts

BLOCKS = 5  # tensors that the vector w is cut into; FedMR exchanges them one by one


class Convex(NamedTuple):
    """A federation of strongly convex losses f_k(w) = mean of l(x . w, y) + ridge / 2 ||w||^2, in float64.

    ``kind`` is ``quadratic``, l(m, y) = (m - y)^2 / 2, or ``logistic``, l(m, y) = log(1 + exp(-y m)) with y = -1, 1.
    """

    kind: str
    x: np.ndarray  # [K, n, d]
    y: np.ndarray  # [K, n]
    ridge: float

    def losses(self, w: np.ndarray) -> np.ndarray:
        """f_k(w) of every client: w [..., d] -> [K, ...]."""
        margins = np.einsum("knd,...d->kn...", self.x, w)
        y = self.y.reshape(*self.y.shape, *(1,) * (w.ndim - 1))
        sample_losses = (margins - y) ** 2 / 2 if self.kind == "quadratic" else np.logaddexp(0, -y * margins)
        return sample_losses.mean(axis=1) + self.ridge / 2 * (w**2).sum(axis=-1)

    def gradients(self, w: np.ndarray) -> np.ndarray:
        """The gradients [K, d] of f_k at w [d], or at one point per client [K, d]."""
        w = np.broadcast_to(w, (len(self.x), self.x.shape[-1]))
        margins = np.einsum("knd,kd->kn", self.x, w)
        derivatives = margins - self.y if self.kind == "quadratic" else -self.y * scipy.special.expit(-self.y * margins)
        return np.einsum("knd,kn->kd", self.x, derivatives) / self.x.shape[1] + self.ridge * w

    def minimum(self, clients: slice = slice(None)) -> tuple[np.ndarray, float]:
        """The minimiser [d] and the minimum of the mean loss of some clients."""
        part = self._replace(x=self.x[clients], y=self.y[clients])
        if self.kind == "quadratic":
            hessian, right = part._hessians().mean(axis=0), np.einsum("knd,kn->d", part.x, part.y) / part.y.size
            w = np.linalg.solve(hessian, right)
        else:
            value = lambda w: part.losses(w).mean()
            gradient = lambda w: part.gradients(w).mean(axis=0)
            w = np.zeros(self.x.shape[-1])
            w = scipy.optimize.minimize(value, w, jac=gradient, hess=part._hessian, method="trust-exact", tol=1e-13).x
        return w, float(part.losses(w).mean())

    def smoothness(self) -> float:
        """The smoothness L. The second derivative of the logistic loss is at most 1/4."""
        return float(np.linalg.eigvalsh(self._hessians(largest=True)).max())

    def convexity(self) -> float:
        """The convexity mu. The logistic loss alone is flat far away, so its mu is the ridge."""
        return self.ridge if self.kind == "logistic" else float(np.linalg.eigvalsh(self._hessians()).min())

    def _hessians(self, *, largest: bool = False) -> np.ndarray:
        """Hessians [K, d, d] of the quadratic losses, or bounds on those of the logistic losses."""
        factor = 0.25 if largest and self.kind == "logistic" else 1.0
        products = np.einsum("kni,knj->kij", self.x, self.x) / self.x.shape[1]
        return factor * products + self.ridge * np.eye(self.x.shape[-1])

    def _hessian(self, w: np.ndarray) -> np.ndarray:
        """The Hessian [d, d] of the mean logistic loss."""
        shares = scipy.special.expit(np.einsum("knd,d->kn", self.x, w))
        products = np.einsum("kni,knj,kn->ij", self.x, self.x, shares * (1 - shares)) / self.y.size
        return products + self.ridge * np.eye(self.x.shape[-1])


def quadratic(clients: int, *, seed: int, samples: int = 40, dimension: int = 20) -> Convex:
    """Least squares whose clients differ in the spread of their inputs and in the true weights of their targets."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(clients, samples, dimension)) * rng.uniform(0.5, 1.5, (clients, 1, dimension))
    weights = rng.normal(size=dimension) + rng.normal(size=(clients, dimension))
    y = np.einsum("knd,kd->kn", x, weights) + 0.1 * rng.normal(size=(clients, samples))
    return Convex("quadratic", _single(x), _single(y), ridge=0.5)


def logistic(clients: int, *, seed: int, samples: int = 40, dimension: int = 20) -> Convex:
    """Logistic regression with L2 whose clients differ in the centres of their inputs and in their true weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(clients, samples, dimension)) + rng.normal(size=(clients, 1, dimension))
    weights = rng.normal(size=dimension) + rng.normal(size=(clients, dimension))
    y = np.where(rng.random((clients, samples)) < scipy.special.expit(np.einsum("knd,kd->kn", x, weights)), 1.0, -1.0)
    return Convex("logistic", _single(x), y, ridge=0.1)


def _single(values: np.ndarray) -> np.ndarray:
    """Round to values that float32 holds exactly, so that engine and analysis see the same problem."""
    return values.astype(np.float32).astype(np.float64)


class Constants(NamedTuple):
    """The constants of the theorem's bound; see the head of this file."""

    steps: int  # E, local steps per round
    smoothness: float  # L
    convexity: float  # mu
    gamma: float
    heterogeneity: float  # Gamma
    gradient: float  # G
    distance: float  # Delta_1
    optimum: np.ndarray  # w* [d]
    minimum: float  # f*

    @property
    def noise(self) -> float:
        """B."""
        return 10 * self.smoothness * self.heterogeneity + 4 * (self.steps - 1) ** 2 * self.gradient**2

    def lr(self, step: Any) -> Any:
        """The learning rate eta_t of step t = 1, 2, ..."""
        return 2 / (self.convexity * (step + self.gamma))

    def bound(self, step: np.ndarray) -> np.ndarray:
        """The bound of the theorem on the gap after T steps."""
        start = self.convexity * (self.gamma + 1) / 2 * self.distance
        return self.smoothness / (2 * self.convexity * (step + self.gamma)) * (4 * self.noise / self.convexity + start)


def constants(problem: Convex, *, steps: int) -> Constants:
    """The constants of a problem for a training that starts at w = 0."""
    optimum, minimum = problem.minimum()
    minima = [problem.minimum(slice(k, k + 1))[1] for k in range(len(problem.x))]
    large, small = problem.smoothness(), problem.convexity()
    start = np.linalg.norm(optimum)  # Q_1: all models start at zero
    spread = np.sqrt((problem.gradients(optimum) ** 2).sum(axis=1).mean())  # S
    return Constants(
        steps=steps,
        smoothness=large,
        convexity=small,
        gamma=max(8 * large / small, steps),
        heterogeneity=minimum - float(np.mean(minima)),
        gradient=float(spread + large * max(start, spread / small)),
        distance=float(start**2),
        optimum=optimum,
        minimum=minimum,
    )


# --- The same problem in the engine ----------------------------------------------------------------------------------


class Linear(nn.Module):
    """x . w, where w [d] is cut into blocks, each a separate tensor. A sample has the inputs and, last, the target."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        parts = jnp.split(x[..., :-1], BLOCKS, axis=-1)
        blocks = [nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros) for _ in parts]
        return functools.reduce(jnp.add, [block(part)[..., 0] for block, part in zip(blocks, parts, strict=True)])


def regularised(problem: Convex, model: Model) -> local.Loss:
    """The loss of a client's samples in the form that the engine takes."""

    def loss(params, state, batch, key):
        margins, targets = model.apply({"params": params}, batch.x), batch.x[..., -1]
        logistic = problem.kind == "logistic"
        sample_losses = jnp.logaddexp(0.0, -targets * margins) if logistic else (margins - targets) ** 2 / 2
        ridge = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params))
        return local.masked_mean(sample_losses, batch.mask) + problem.ridge / 2 * ridge, state

    return loss


def rounds_of(name: str, problem: Convex, known: Constants, *, seed: int) -> Rounds:
    """The rounds of a registered strategy on a convex problem, with the learning rates of the theorem."""
    clients, samples, dimension = problem.x.shape
    model = Model(Linear(), (dimension + 1,))
    loss = regularised(problem, model)

    def build(inner: Problem) -> Strategy:
        def client_update(payload, memory, data, round, key):
            done = round * known.steps
            optimizer = optax.sgd(lambda step: known.lr((done + step + 1).astype(jnp.float32)))
            trained, metrics = local.train(
                inner.model, inner.local, payload["model"], data, key, loss=loss, optimizer=optimizer
            )
            return {"model": trained}, memory, metrics

        row = STRATEGIES[name]
        return row.build(row.hyper() if row.hyper else None, inner)._replace(client_update=client_update)

    federated = Problem(
        model=model,
        local=local.LocalSetting(optax.identity(), epochs=known.steps, batch_size=samples, max_size=samples),
        num_clients=clients,
        cohort_size=clients,
        num_classes=2,
        layers=model.layers(),
        sizes=jnp.full(clients, samples, jnp.int32),
        label_counts=jnp.zeros((clients, 2), jnp.int32),
        architectures=jnp.zeros(clients, jnp.int32),
    )
    x = np.concatenate([problem.x, problem.y[..., None]], axis=-1).reshape(clients * samples, -1).astype(np.float32)
    pool = Samples(x, np.zeros(len(x), np.int32), np.ones(1, np.float32), np.zeros(1, np.float32))
    split = Split.of(np.split(np.arange(len(x)), clients))
    axis = client_axis(devices=1, lanes=clients, cohort_size=clients)
    federation = Federation(pool, split.index, split.offsets)
    return Rounds(RunConstants(jax.tree_util.Partial(build), federated, federation, random_key(seed)), axis)


class History(NamedTuple):
    """A training at some of its steps T [P]."""

    steps: np.ndarray
    gap: np.ndarray  # f(deployed model) - f*
    models_gap: np.ndarray  # mean over the K models of f(model) - f*
    squared_gradient: np.ndarray  # mean over the clients of ||grad f_k||^2 at the models that they receive


def history_of(name: str, problem: Convex, known: Constants, *, looks: Sequence[int], seed: int) -> History:
    """Train with a strategy and return the history of its models after the given numbers of rounds."""
    trained = rounds_of(name, problem, known, seed=seed)
    progress, done, rows = trained.init(), 0, []
    for look in looks:
        if look > done:
            progress, _ = trained.run(progress, look - done)
            done = look
        deployed = _vector(trained.deployed(progress), ())
        count = len(problem.x)
        stacked = getattr(progress.server, "models", None)
        models = np.broadcast_to(deployed, (count, deployed.size)) if stacked is None else _vector(stacked, (count,))
        gap = problem.losses(deployed).mean() - known.minimum
        models_gap = problem.losses(models).mean() - known.minimum
        rows.append((look * known.steps, gap, models_gap, (problem.gradients(models) ** 2).sum(axis=1).mean()))
    return History(*map(np.array, zip(*rows, strict=True)))


def _vector(variables: Any, leading: tuple[int, ...]) -> np.ndarray:
    """The blocks as one vector [..., d] in float64."""
    leaves = [np.asarray(leaf, np.float64).reshape(*leading, -1) for leaf in jax.tree.leaves(variables)]
    return np.concatenate(leaves, axis=-1)


def slope(steps: np.ndarray, gap: np.ndarray) -> float:
    """The slope of log(gap) over log(T), the exponent a of gap ~ T^a, in the last nine tenths of the steps."""
    late = steps >= steps[-1] / 10
    return float(np.polyfit(np.log(steps[late]), np.log(gap[late]), 1)[0])


# --- The command -----------------------------------------------------------------------------------------------------

PROBLEMS: dict[str, Callable[..., Convex]] = {"quadratic": quadratic, "logistic regression with L2": logistic}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--clients", type=int, default=10, help="number of clients N = K. Default: 10")
    parser.add_argument("--steps", type=int, default=5, help="local steps per round E. Default: 5")
    parser.add_argument("--rounds", type=int, default=4000, help="number of rounds, at least 20. Default: 4000")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems and of the recombination. Default: 0")
    parser.add_argument("--out", default=".", metavar="FOLDER", help="folder of the plot. Default: the current folder")
    parser.add_argument("--format", choices=plots.FORMATS, default="png", help="file format of the plot. Default: png")


def main(arguments: argparse.Namespace) -> None:
    """Train FedMR and FedAvg on both problems, plot their gaps and the bound, and print constants and slopes."""
    lowest = {"clients": 2, "steps": 1, "rounds": 20, "seed": 0}
    for name, least in lowest.items():
        if getattr(arguments, name) < least:
            raise UserError(f"--{name}={getattr(arguments, name)} must be at least {least}")
    if arguments.seed >= 2**31:
        raise UserError(f"--seed={arguments.seed} must be below 2^31")
    with runs.output_folder(arguments.out, ()) as folder:
        _compare(arguments, folder / f"theorem1.{arguments.format}")


def _compare(arguments: argparse.Namespace, path: Path) -> None:
    """Train, print, and plot into ``path``."""
    set_up_jax(devices=1, cohort_size=1)
    looks = np.unique(np.geomspace(1, arguments.rounds, 60).round().astype(int)).tolist()
    panels: dict[str, plots.Series] = {}
    for title, make in PROBLEMS.items():
        problem = make(arguments.clients, seed=arguments.seed)
        known = constants(problem, steps=arguments.steps)
        histories = {
            name: history_of(name, problem, known, looks=looks, seed=arguments.seed) for name in ("fedmr", "fedavg")
        }
        print(f"{title}: {describe(known)}\n{tables.aligned(cells(known, histories))}\n", flush=True)
        steps = histories["fedmr"].steps
        panels[title] = {
            "FedMR, mean of the models": (steps, histories["fedmr"].gap),
            "FedAvg": (steps, histories["fedavg"].gap),
            "FedMR, the models one by one": (steps, histories["fedmr"].models_gap),
            "bound of Theorem 1": (steps, known.bound(steps)),
        }
    methods = {"FedMR, mean of the models": "fedmr", "FedAvg": "fedavg", "FedMR, the models one by one": "fedmr"}
    plots.lines(panels, path, x_label="local steps T", y_label="f - f*", methods=methods, logarithmic=True)
    print(f"drawn in {path}")


def describe(known: Constants) -> str:
    """The constants in one line of text."""
    return (
        f"L {known.smoothness:.4g}, mu {known.convexity:.4g}, E {known.steps}, gamma {known.gamma:.4g}, "
        f"Gamma {known.heterogeneity:.4g}, G {known.gradient:.4g}, Delta_1 {known.distance:.4g}, B {known.noise:.4g}, "
        f"f* {known.minimum:.4g}"
    )


def cells(known: Constants, histories: dict[str, History]) -> list[tuple[str, ...]]:
    """Last gap, bound there, largest ratio of gap to bound, and slope of each history as cells, the head first."""
    rows: list[tuple[str, ...]] = [
        ("", "gap at the end", "bound there", "largest gap / bound", "slope", "largest G seen")
    ]
    for name, history in histories.items():
        seen = np.sqrt(history.squared_gradient.max())
        bound = known.bound(history.steps)
        gaps = {name: history.gap} | ({f"{name}, one by one": history.models_gap} if name == "fedmr" else {})
        for label, gap in gaps.items():
            numbers = gap[-1], bound[-1], (gap / bound).max(), slope(history.steps, gap), seen
            rows.append((label, *(f"{number:.3g}" for number in numbers)))
    return rows


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
