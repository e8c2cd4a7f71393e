"""The channel between clients and server: see `fedjax_mr.channel.base`."""

from fedjax_mr.channel import links
from fedjax_mr.channel.base import Context, Link, Sent, channel

__all__ = ["Context", "Link", "Sent", "channel", "links"]
