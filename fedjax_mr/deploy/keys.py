"""``python -m fedjax_mr.deploy keys --client=3 --out=client-3.key``: a client's keys for secure recombination.

The command writes the private keys to a file that only its owner can read, and prints the client's line of the roster.
The roster is one file with the lines of all clients. The operators distribute it, not the server.
"""

import argparse
from collections.abc import Sequence

from fedjax_mr.errors import UserError
from fedjax_mr.secure.envelopes import Identity


def main(arguments: Sequence[str]) -> None:
    """Make the keys of one client.

    Raises:
      UserError: the number is negative, or the file exists or cannot be written.
    """
    parser = argparse.ArgumentParser("python -m fedjax_mr.deploy keys", description=__doc__)
    parser.add_argument("--client", type=int, required=True, help="number of the client, from 0")
    parser.add_argument("--out", required=True, metavar="FILE", help="new file for the private keys")
    options = parser.parse_args(arguments)
    if options.client < 0:
        raise UserError(f"--client must be 0 or larger, not {options.client}")
    identity = Identity.new(options.client)
    identity.write(options.out)
    print(identity.public.line())
