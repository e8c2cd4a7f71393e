"""The lines of 30 roles of Shakespeare as texts, for the next character in `experiments/tasks.sh`.

LEAF's `shakespeare` has a sample for each character, so that two samples of a role share up to 79 of 80 characters. A
task that predicts all 80 would train every character 80 times, and a validation sample would be no new text. Here the
samples of a role are consecutive: the first four fifths of its lines are for training, the others for the test.

--data_dir holds shakespeare_roles.json.gz: {"users": names, "text": the lines of each, joined}, as LEAF divides them.
"""

import gzip
import json
from pathlib import Path

import fedjax_mr as fmr

ROLES, LENGTH = 30, 80  # roles; characters of a sample
FEWEST, MOST = 8_000, 16_000  # characters of a role


def roles_in(folder):
    """The name and the lines of each role."""
    path = Path(folder) / "shakespeare_roles.json.gz"
    if not path.is_file():
        raise fmr.UserError(f"{path} is missing: data_dir= is the folder that holds it")
    content = json.loads(gzip.decompress(path.read_bytes()))
    pairs = zip(content["users"], content["text"], strict=True)
    return [(name, text) for name, text in pairs if FEWEST <= len(text) <= MOST][:ROLES]


def load(request):
    """The lines as tokens of one byte, x and y [M, 80]. Natural clients are the roles."""
    parts = {"train": ([], []), "test": ([], [])}
    for name, text in roles_in(request.data_dir or "."):
        pieces = [text[first : first + LENGTH] for first in range(0, len(text) - LENGTH, LENGTH)]
        for number, piece in enumerate(pieces):
            texts, clients = parts["train" if number < 0.8 * len(pieces) else "test"]
            texts.append(piece)
            clients.append(name)
    (texts, client), (texts_test, client_test) = parts.values()
    return fmr.from_texts(
        texts, task="language", client=client, texts_test=texts_test, client_test=client_test, tokenizer="bytes",
        length=LENGTH, name=request.name,
    )  # fmt: skip


fmr.SOURCES["roles"] = load
