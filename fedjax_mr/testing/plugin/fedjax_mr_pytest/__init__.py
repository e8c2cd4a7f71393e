"""The option --import of `pytest --pyargs fedjax_mr.testing`.

pytest reads the options before it knows that folder, so this is a plugin, which is loaded in every session where the
package is installed. It is installed as a package of its own, because importing anything of fedjax_mr takes seconds and
sets JAX up.
"""


def pytest_addoption(parser):
    """Add the option."""
    parser.addoption("--import", action="append", default=[], metavar="FILE", help="of fedjax_mr.testing: own methods")
