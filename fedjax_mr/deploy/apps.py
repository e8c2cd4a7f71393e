"""Flower's two apps, under the names that the ``pyproject.toml`` of a federation refers to."""

from fedjax_mr.deploy import flower
from fedjax_mr.deploy.client import answer
from fedjax_mr.deploy.server import serve

server = flower.server_app(serve)
client = flower.client_app(answer)
