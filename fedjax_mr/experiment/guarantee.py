"""The differential privacy of a run: the noise that it needs, its column epsilon, and what it refuses."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_mr.channel import accounting, privacy
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.data import FederatedData
from fedjax_mr.engine.simulator import problem_of
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.method import build_chosen, chosen, local_setting
from fedjax_mr.experiment.processes import ALONE, Processes
from fedjax_mr.keys import random_key
from fedjax_mr.models import Model
from fedjax_mr.strategies import Problem

SECRET = "secret"  # entry of checkpoints


def complete(config: Config, federated: FederatedData, model: Model) -> tuple[Config, tuple[str, ...]]:
    """Check that clipping and noise cover what clients upload, and choose the noise if only epsilon is given.

    Returns:
      The configuration with ``dp_noise`` in place of ``dp_target_epsilon``, and a note for the user.

    Raises:
      UserError: the method or the network does something that is not covered, no noise is sufficient, the accounting
        needs a package that is missing, or the run to resume was trained with other noise.
    """
    if config.dp_clip is None:
        return config, ()
    problem = problem_of(model, local_setting(config, federated.dataset), federated, cohort=config.cohort)
    plain = build_chosen(dataclasses.replace(chosen(config), links={}, poisson=None), problem)
    if reason := privacy.refusal(plain, problem, noise_on=config.dp_noise_on):
        raise UserError(reason)
    if config.dp_poisson is not None and not privacy.hides_cohorts(plain, problem, sampling="poisson"):
        raise UserError(
            "Poisson sampling needs clients without a memory, and a server that uses neither their numbers nor who is "
            "absent: leave dp_poisson= out"
        )
    target = config.dp_target_epsilon
    if target is None:
        return config, ()
    noise = float(accounting.noise_for(target, config.rounds, **_settings(config, problem)))
    require_noise_of_run(config, noise)
    note = f"epsilon {target:g} at delta {config.dp_delta:g} after {config.rounds} rounds needs --dp_noise={noise:.4g}"
    return dataclasses.replace(config, dp_noise=noise, dp_target_epsilon=None), (note,)


def require_noise_of_run(config: Config, noise: float) -> None:
    """Check that the noise for a target epsilon is that of the run to resume. More rounds need more noise.

    Raises:
      UserError: it is not.
    """
    if config.resume and config.run_dir and (saved := configuration.load(config.run_dir).dp_noise) != noise:
        raise UserError(
            f"dp_target_epsilon={config.dp_target_epsilon:g} needs the noise {noise:.4g} for {config.rounds} rounds, "
            f"but {config.run_dir} was trained with {saved:.4g}: resume it with dp_noise={saved}, without "
            "dp_target_epsilon="
        )


def epsilon_after(config: Config, problem: Problem, *, public: bool = False) -> Callable[[int], float] | None:
    """The function rounds -> epsilon of a run. None if the run adds no noise.

    Args:
      config: the configuration.
      problem: the problem of the run.
      public: whether the guarantee shall also hold against those who know the cohorts, such as the server.

    Raises:
      UserError: the accounting needs a package that is missing.
    """
    if config.dp_clip is None or config.dp_noise == 0:
        return None
    settings: dict[str, Any] = _settings(config, problem) | {"noise": config.dp_noise}
    if public:
        settings["sampling"] = "public"
    accounting.epsilon(1, **settings)  # fail before the training
    return lambda rounds: accounting.epsilon(rounds, **settings)


def secret_of(config: Config, processes: Processes = ALONE) -> np.ndarray | None:
    """The secret [2] uint32 from which the noise and the cohorts of a run follow. None if the run adds no noise.

    It follows from ``dp_seed``. Without, it is that of the checkpoints of a resumed run, or the operating system draws
    it. It is the same in all processes.
    """
    if config.dp_clip is None or not config.dp_noise:
        return None
    if config.dp_seed is not None:
        return np.asarray(jax.random.key_data(random_key(config.dp_seed)))
    words = processes.on_first(lambda: _kept_secret(config) or privacy.draw_secret().tolist())
    return np.asarray(words, np.uint32)


def _kept_secret(config: Config) -> list[int] | None:
    """The secret in the checkpoints of a run to resume, or None."""
    if not config.resume or config.run_dir is None:
        return None
    checkpoints = Checkpoints(Path(config.run_dir) / "checkpoints")
    kept = (checkpoints.meta(round).get(SECRET) for round in reversed(checkpoints.rounds()))
    return next((each for each in kept if _is_secret(each)), None)


def _is_secret(words: Any) -> bool:
    return (
        isinstance(words, list) and len(words) == 2 and all(type(each) is int and 0 <= each < 2**32 for each in words)
    )


def _settings(config: Config, problem: Problem) -> dict[str, Any]:
    settings = {
        "delta": config.dp_delta,
        "num_clients": problem.num_clients,
        "cohort": config.cohort,
        "released": {"upload": "uploads", "mean": "mean"}[config.dp_noise_on],
    }
    if config.dp_poisson is not None:
        return settings | {"sampling": "poisson", "probability": config.dp_poisson}
    # Attackers know when they take part, and their messages can show who does. Simulated time is a column of the run.
    seen = config.attack != "none" or config.fleet is not None
    hidden = not seen and privacy.hides_cohorts(build_chosen(chosen(config), problem), problem)
    return settings | {"sampling": "without_replacement" if hidden else "public"}
