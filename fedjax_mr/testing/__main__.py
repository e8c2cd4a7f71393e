"""The command ``python -m fedjax_mr.testing``: run the contract with pytest."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedjax_mr.terminal import interrupts

USAGE = """usage: python -m fedjax_mr.testing [--import=FILE ...] [pytest's options]
  test whether the strategies that FILE registers pass the contract. If --import is omitted: all strategies
  -k NAME             only strategies whose name contains NAME
  -m 'not slow'       only the quick tests
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the contract and return pytest's exit code, or 2 for bad input.

    Args:
      arguments: arguments without the name of the program. Default: those of the command line.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(argument in ("--help", "-help", "-h") for argument in arguments):
        print(USAGE, end="")
        return 0
    try:
        import pytest
    except ImportError:
        print("fedjax-mr: the contract needs pytest: pip install 'fedjax-mr[test]'", file=sys.stderr)
        return 2
    folder = Path(__file__).parent
    # Ignore the pytest settings of the current project: they may require plugins or exclude tests.
    ours = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={Path.cwd()}"]
    ours += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # the package: this is a part
    return int(pytest.main([str(folder), *ours, *arguments]))


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
