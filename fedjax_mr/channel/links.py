"""All links of the channel: ``channel(strategy, problem, [links.compression(problem, "topk"), ...])``, and their rows.

A new link is one file and one row of `LINKS`. A row of yours has its settings as flags: ``--links=NAME --NAME_x=1``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_mr.channel import attacks
from fedjax_mr.channel import compression as compressions
from fedjax_mr.channel import exchange as exchanges
from fedjax_mr.channel import privacy as privacies
from fedjax_mr.channel import robust as rules
from fedjax_mr.channel.attacks import attack
from fedjax_mr.channel.base import Link
from fedjax_mr.channel.compression import compression
from fedjax_mr.channel.exchange import exchange
from fedjax_mr.channel.privacy import privacy
from fedjax_mr.channel.robust import robust
from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry

__all__ = ["LINKS", "LinkRow", "attack", "compression", "exchange", "privacy", "robust"]

FACTS = ("stacked", "secret", "seed")


class LinkRow(NamedTuple):
    """A registered link.

    Attributes:
      build: (settings, problem, and by name what it ``gets``) -> link. The numbers of the settings may be traced.
      settings: the dataclass of its settings, declared with `field`. Default: there are none.
      is_on: whether settings ask for the link. Default: ``--links`` names it.
      gets: further arguments of ``build``: ``stacked``, whether the strategy has K models; ``secret``, two words from
        which the noise follows, or None; ``seed``, the seed of the partition.
    """

    build: Callable[..., Link]
    settings: type | None = None
    is_on: Callable[[Any], bool] | None = None
    gets: tuple[str, ...] = ()


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `LINKS`.

    Raises:
      UserError: the row is no `LinkRow`, its settings are no dataclass, or it gets what does not exist.
    """
    declared = isinstance(row, LinkRow) and (row.settings is None or dataclasses.is_dataclass(row.settings))
    if not isinstance(row, LinkRow) or not callable(row.build) or not declared or not set(row.gets) <= set(FACTS):
        raise UserError(
            f"fmr.LINKS[{name!r}] takes fmr.LinkRow(build, settings): build(settings, problem) returns a link, and "
            f"settings is a dataclass with fmr.field(...), or left out; gets names some of {', '.join(FACTS)}"
        )


_OURS = {
    "compression": LinkRow(
        compressions.build,
        compressions.Compression,
        lambda settings: settings.compress != "none" or settings.compress_download != "none",
    ),
    "privacy": LinkRow(privacies.build, privacies.Privacy, lambda settings: settings.dp_clip is not None, ("secret",)),
    "attack": LinkRow(attacks.build, attacks.Attack, lambda settings: settings.attack != "none", ("seed",)),
    "robust": LinkRow(rules.build, rules.Robust, lambda settings: settings.robust != "none", ("stacked",)),
    "exchange": LinkRow(exchanges.build, exchanges.Exchange, lambda settings: settings.exchange != "none"),
}
LINKS = Registry("link", "fmr.LINKS", check_row, _OURS)
"""All links. Those of this package have a flag that switches them on, such as ``--compress``."""
