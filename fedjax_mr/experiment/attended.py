"""A module run as a command that ends with the process that started it, however that one ends.

    python -m fedjax_mr.experiment.attended MODULE [ARGUMENT ...]

The starter keeps the writing end of this process's standard input. The operating system closes it when the starter is
gone, even killed; then this process gets SIGTERM, so that a run writes its checkpoint.
"""

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Run the module that the command line names as if by ``python -m``."""
    threading.Thread(target=_attend, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _attend() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
