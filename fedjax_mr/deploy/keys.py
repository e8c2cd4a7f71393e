"""``python -m fedjax_mr.deploy keys --client=3 --out=client-3.key``: a client's keys for secure recombination.

The private keys go to a file that only its owner can read, and the client's line of the roster is printed. Everybody's
lines in one file, spread by the operators and not by the server, are the roster.
"""

import argparse
from collections.abc import Sequence

from fedjax_mr.errors import UserError
from fedjax_mr.secure.envelopes import Identity


def main(arguments: Sequence[str]) -> None:
    """Make the keys of one client.

    Raises:
      UserError: the number is below 0, or the file is there already or cannot be written.
    """
    parser = argparse.ArgumentParser("python -m fedjax_mr.deploy keys", description=__doc__)
    parser.add_argument("--client", type=int, required=True, help="the client's number, from 0")
    parser.add_argument("--out", required=True, metavar="FILE", help="a new file for the private keys")
    told = parser.parse_args(arguments)
    if told.client < 0:
        raise UserError(f"--client is a number from 0, not {told.client}")
    identity = Identity.new(told.client)
    identity.write(told.out)
    print(identity.public.line())
