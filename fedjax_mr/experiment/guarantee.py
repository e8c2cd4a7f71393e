"""The differential privacy of a run: the noise that it needs, its column epsilon, and what it refuses."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fedjax_mr.channel import accounting, privacy
from fedjax_mr.data import FederatedData
from fedjax_mr.engine.simulator import problem_of
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.method import build_chosen, chosen, local_setting
from fedjax_mr.models import Model
from fedjax_mr.strategies import Problem


def complete(config: Config, federated: FederatedData, model: Model) -> tuple[Config, tuple[str, ...]]:
    """Check that clipping and noise cover what clients upload, and choose the noise if only epsilon is given.

    Returns:
      The configuration with ``dp_noise`` in place of ``dp_target_epsilon``, and a note for the user.

    Raises:
      UserError: the method or the network does something that is not covered, no noise is sufficient, or the accounting
        needs a package that is missing.
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
    note = f"epsilon {target:g} at delta {config.dp_delta:g} after {config.rounds} rounds needs --dp_noise={noise:.4g}"
    return dataclasses.replace(config, dp_noise=noise, dp_target_epsilon=None), (note,)


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


def _settings(config: Config, problem: Problem) -> dict[str, Any]:
    settings = {
        "delta": config.dp_delta,
        "num_clients": problem.num_clients,
        "cohort": config.cohort,
        "released": {"upload": "uploads", "mean": "mean"}[config.dp_noise_on],
    }
    if config.dp_poisson is not None:
        return settings | {"sampling": "poisson", "probability": config.dp_poisson}
    whole = chosen(config)
    honest = {kind: link for kind, link in whole.links.items() if kind != "attack"}  # no server knows who attacks
    hidden = privacy.hides_cohorts(build_chosen(dataclasses.replace(whole, links=honest), problem), problem)
    return settings | {"sampling": "without_replacement" if hidden else "public"}
