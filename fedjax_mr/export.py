"""Write the trained network of a run as a folder that loads with orbax and Flax alone.

FOLDER receives the variables (orbax), network.json (class, fields, normalisation), an example and a README. Networks of
Llama's architecture are written for the package transformers: config.json, model.safetensors and the tokenizer. A
user-supplied network can only be exported in Python: fmr.load(RUN, model=...).export(FOLDER).
"""

import sys
from collections.abc import Sequence

from fedjax_mr.config import imports
from fedjax_mr.experiment import of_run
from fedjax_mr.terminal import interrupts
from fedjax_mr.terminal.commands import exit_code
from fedjax_mr.terminal.messages import flags_in_errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 0, or 2 for bad input.

    Args:
      arguments: command-line arguments without the program name. Default: those of this process.
    """
    parser = of_run.parser("export", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="the new folder")
    parser.add_argument(
        "--merged",
        action="store_true",
        help="add the adapters to the weights (required with adapters; the folder has the names of the base)",
    )
    of_run.add_choice(parser)

    def work() -> None:
        chosen = parser.parse_args(arguments)
        with imports.blamed(), flags_in_errors():
            run = of_run.read(chosen)
            folder = run.export(chosen.folder, client=chosen.client, merged=chosen.merged)
        print(f"exported into {folder}" + (": try python example.py there" if (folder / "example.py").exists() else ""))

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
