"""The channel between clients and server: see `fedjax_mr.channel.base`."""

from fedjax_mr.channel import links
from fedjax_mr.channel.base import Context, Link, Sent, channel
from fedjax_mr.channel.links import LINKS, LinkRow

__all__ = ["LINKS", "Context", "Link", "LinkRow", "Sent", "channel", "links"]
