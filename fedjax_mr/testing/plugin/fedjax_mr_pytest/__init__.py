"""The option --import of `pytest -p fedjax_mr_pytest --pyargs fedjax_mr.testing`.

pytest reads the options before it knows that folder, so the option is in a plugin that is named on the command line.
"""


def pytest_addoption(parser):
    """Add the option."""
    parser.addoption("--import", action="append", default=[], metavar="FILE", help="of fedjax_mr.testing: own methods")
