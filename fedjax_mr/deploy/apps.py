"""Flower's two apps, by the names that the ``pyproject.toml`` of a federation says."""

from fedjax_mr.deploy import mail
from fedjax_mr.deploy.client import answer
from fedjax_mr.deploy.server import serve

server = mail.server_app(serve)
client = mail.client_app(answer)
