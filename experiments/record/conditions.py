"""What messages, attacks and time do to the methods: claims of ours, as no paper runs all of these together.

The verdicts are those of `claims`, corrected for the comparisons of this table.
"""

from fedjax_mr.config import titles
from record import claims
from record.claims import Chosen, Claim
from record.comparisons import Record

CIFAR, DIGITS = "CIFAR-10, Dirichlet(0.5), 300 rounds", "digits, Dirichlet(0.5), 100 rounds"
SEVERAL, SIGN_FLIP = ("fedmr", "fedcross"), "20 % sign flip"
LINKS = {CIFAR: "cifar10_channel", DIGITS: "digits_channel"}
CLOCKS = {CIFAR: "cifar10_clock", DIGITS: "digits_clock"}
LAST_TEN = {CIFAR: (255, 300), DIGITS: (55, 100)}
ALL_ROUNDS = (1, 1_000_000)  # for values of a whole run
NO_LINKS = "cifar10_lenet5_500"  # runs without any link on CIFAR-10; their first 300 rounds count
NO_LINK = {"compress": "none", "error_feedback": "none", "attack": "none", "robust": "none"}
INT8 = {"compress": "int8", "compress_download": "int8"}
TOP_K, FEEDBACK = ({**NO_LINK, "compress": "topk", "error_feedback": feedback} for feedback in ("none", "ef"))
ATTACK, KRUM = ({**NO_LINK, "attack": "sign_flip", "robust": rule} for rule in ("none", "multi_krum"))


def _title(strategy: str) -> str:
    return titles.method({"strategy": strategy})


def _link(where: str, strategy: str, link: dict[str, str]) -> Chosen:
    return Chosen(LINKS[where], {"strategy": strategy, **link})


def _honest(where: str, strategy: str) -> Chosen:
    flags = {"strategy": strategy, "partition": "dirichlet", "alpha": 0.5}
    return Chosen(NO_LINKS, flags) if where == CIFAR else Chosen(LINKS[where], {**flags, **NO_LINK})


def _messages(where: str, strategy: str, text: str, better: Chosen, worse: Chosen, level: bool = False) -> Claim:
    return Claim(f"{_title(strategy)}: {text}", "messages", where, better, worse, LAST_TEN[where], level)


def _int8(where: str, strategy: str) -> Claim:
    text = "8 bits per number in both directions are as good as 32"
    return _messages(where, strategy, text, _link(where, strategy, INT8), _honest(where, strategy), level=True)


def _feedback(where: str, strategy: str) -> Claim:
    text = "with uploads of 1 %, error feedback is better than none"
    return _messages(where, strategy, text, _link(where, strategy, FEEDBACK), _link(where, strategy, TOP_K))


def _krum(where: str, strategy: str) -> Claim:
    text = f"{_title(strategy)}: Multi-Krum is better than no rule"
    better, worse = (_link(where, strategy, link) for link in (KRUM, ATTACK))
    return Claim(text, SIGN_FLIP, where, better, worse, LAST_TEN[where])


def _single(where: str, source: str, link: dict[str, str], other: str) -> Claim:
    better, worse = (_link(where, strategy, link) for strategy in ("fedavg", other))
    return Claim(f"FedAvg is better than {_title(other)}", source, where, better, worse, LAST_TEN[where])


def _asynchronous(where: str, strategy: str) -> Claim:
    ours, theirs = (Chosen(CLOCKS[where], {"strategy": strategy, "mode": mode}) for mode in ("async", "sync"))
    text = f"{_title(strategy)}: asynchronous clients are as good as synchronous ones after as many trainings"
    return Claim(text, "time", where, ours, theirs, ALL_ROUNDS, level=True, metric="accuracy_mean_last_10")


CLAIMS = (
    *(_int8(where, strategy) for where in LINKS for strategy in ("fedavg", *SEVERAL)),
    *(_feedback(where, strategy) for where in LINKS for strategy in ("fedavg", *SEVERAL)),
    *(_single(where, "messages of 1 %, error feedback", FEEDBACK, other) for where in LINKS for other in SEVERAL),
    *(_krum(where, strategy) for where in LINKS for strategy in ("fedavg", "scaffold")),
    _krum(CIFAR, "fedmr"),
    _single(CIFAR, SIGN_FLIP, ATTACK, "fedmr"),
    *(_single(where, f"{SIGN_FLIP}, Multi-Krum", KRUM, "fedmr") for where in LINKS),
    *(_asynchronous(where, strategy) for where in CLOCKS for strategy in SEVERAL),
)


def table(record: Record) -> str:
    """The claims with their differences and verdicts as a Markdown table."""
    return claims.table(record.kept.folder, CLAIMS, source="condition")
