"""All links of the channel: ``channel(strategy, problem, [links.compression(problem, "topk"), ...])``."""

from fedjax_mr.channel.attacks import attack
from fedjax_mr.channel.compression import compression
from fedjax_mr.channel.exchange import exchange
from fedjax_mr.channel.privacy import privacy
from fedjax_mr.channel.robust import robust

__all__ = ["attack", "compression", "exchange", "privacy", "robust"]
