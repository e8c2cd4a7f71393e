"""Every link of the channel with every strategy: what works, and the reason where one is refused."""

from collections.abc import Callable

import jax

from fedjax_mr.channel import Link, channel, links, privacy
from fedjax_mr.engine import rounds
from fedjax_mr.engine.round import RunConstants, begin, finish, start, train_client
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.testing.federations import default_hyper, simulator

MakeLink = Callable[[Problem, bool], Link]
"""(problem, whether the strategy has several models) -> a link."""
FEDERATION = {"network": "perceptron", "cohort": 5, "seed": 1, "devices": 1, "lanes": 1}

LINKS: dict[str, MakeLink] = {
    "top-k with error feedback": lambda problem, several: links.compression(problem, "topk", ratio=0.3, feedback="ef"),
    "EF21": lambda problem, several: links.compression(problem, "topk", ratio=0.3, feedback="ef21"),
    "QSGD": lambda problem, several: links.compression(problem, "qsgd", levels=8),
    "int8, both directions": lambda problem, several: links.compression(problem, "int8", download="int8"),
    "privacy, noise on uploads": lambda problem, several: links.privacy(problem, clip=0.5, noise=0.01),
    "privacy, noise on the mean": lambda problem, several: links.privacy(
        problem, clip=0.5, noise=0.01, noise_on="mean"
    ),
    "adaptive clipping": lambda problem, several: links.privacy(problem, clip=0.5, noise=0.01, quantile=0.5),
    "label flip": lambda problem, several: links.attack(problem, "label_flip", attackers=0.3, seed=0),
    "sign flip": lambda problem, several: links.attack(problem, "sign_flip", attackers=0.3, seed=0),
    "ALIE": lambda problem, several: links.attack(problem, "alie", attackers=0.3, seed=0),
    "exchange of layers": lambda problem, several: links.exchange(problem, share=0.5),
    "median": lambda problem, several: links.robust(problem, "median", outliers=1, stacked=several),
    "Multi-Krum": lambda problem, several: links.robust(problem, "multi_krum", outliers=1, stacked=several),
}
"""Links by name, with small but effective settings, and users' links with their defaults."""
for _name, _row in links.LINKS.items():
    if not links.LINKS.is_ours(_name):
        LINKS[_name] = lambda problem, several, row=_row: row.build(
            row.settings and row.settings(), problem, **{fact: {"stacked": several}.get(fact) for fact in row.gets}
        )

NEUTRAL: dict[str, MakeLink] = {
    "a norm that is never reached": lambda problem, several: links.privacy(problem, clip=1e9),
    "no attackers": lambda problem, several: links.attack(problem, "sign_flip", attackers=0.0, seed=0),
    "everything is sent": lambda problem, several: links.compression(problem, "topk", ratio=1.0),
}
"""Links whose settings change nothing: the results keep their bits."""


def linked(strategy: str, link: str, **federation: object) -> rounds.Rounds:
    """The rounds of a strategy with a link on a small federation; tests with equal arguments share them.

    Raises:
      UserError: the link refuses the strategy.
    """
    options = dict(sorted((FEDERATION | federation).items()))
    if STRATEGIES[strategy].adapters:
        options["network"] = "adapted"
    return simulator((_builder(strategy, link), default_hyper(strategy)), **options).rounds


_BUILDERS: dict[tuple[str, str], Callable] = {}


def _builder(strategy: str, link: str) -> Callable:
    def build(hyper: object, problem: Problem) -> Strategy:
        inner = STRATEGIES[strategy].build(hyper, problem)
        several = inner.models is None or inner.models.stacked
        make = LINKS[link] if link in LINKS else NEUTRAL[link]
        return channel(inner, problem, [make(problem, several)])

    return _BUILDERS.setdefault((strategy, link), build)  # one function, so that equal simulators are shared


def refusal(strategy: str, link: str, **federation: object) -> str | None:
    """Why a link refuses a strategy, in one line; None if it works. A round is traced, but not compiled.

    Args:
      strategy: by name.
      link: by name, in `LINKS` or `NEUTRAL`.
      **federation: as in `linked`.
    """
    try:
        engine = linked(strategy, link, **federation)
        problem = engine.constants.problem
        if link in LINKS and LINKS[link](problem, True).kind == "privacy":
            plain = STRATEGIES[strategy].build(default_hyper(strategy), problem)
            where = "mean" if link.endswith("mean") else "upload"
            if reason := privacy.refusal(plain, problem, noise_on=where):
                return reason

        def one_round(constants: RunConstants) -> object:
            progress = start(constants)
            plan, rows = begin(engine.axis, constants, progress)
            trained = jax.lax.map(lambda row: train_client(constants, progress.round, row), rows)
            return finish(constants, progress, plan, trained)

        jax.eval_shape(one_round, engine.constants)
    except UserError as error:
        return str(error).removeprefix("links: ")  # the simulator names this module
    return None
