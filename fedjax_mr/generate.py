"""Write a text with the trained language model of a run, and print it.

The network must be of Llama's architecture, and its tokens those of a tokenizer (--pretrained or --tokenizer of the
run). A text ends after --tokens, or at the first special token.
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
    parser = of_run.parser("generate", __doc__)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="beginning of the text")
    parser.add_argument("--chat", action="store_true", help="write the prompt in the chat template of the tokenizer")
    parser.add_argument("--tokens", type=int, default=64, help="largest number of new tokens (default: 64)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: the most probable token, 1: drawn as predicted (default: 0)"
    )
    parser.add_argument(
        "--top_p", type=float, default=1.0, help="draw from the most probable tokens with this share (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    of_run.add_choice(parser)

    def work() -> None:
        chosen = parser.parse_args(arguments)
        with imports.blamed(), flags_in_errors():
            run = of_run.read(chosen)
            text = run.generate(
                chosen.prompt, client=chosen.client, chat=chosen.chat, tokens=chosen.tokens,
                temperature=chosen.temperature, top_p=chosen.top_p, seed=chosen.seed,
            )  # fmt: skip
        print(text if chosen.chat else chosen.prompt + text)

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
