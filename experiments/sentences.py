"""The same number of sentences from each of the four domains, as a JSON Lines file for `experiments/sentences.sh`.

    python experiments/sentences.py DATA_DIR FILE [--train=750] [--test=250]

DATA_DIR: as for ``--dataset=sentiment`` (`python -m fedjax_mr.data prepare sentiment`). The sentences are drawn with a
fixed seed. The full set has 3,708 to 10,605 sentences per domain, and five times as many are five times as slow.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

from fedjax_mr.data.sources.text import NEUTRAL, SENTENCES


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--train", type=int, default=750, help="training sentences of each domain")
    parser.add_argument("--test", type=int, default=250, help="test sentences of each domain")
    flags = parser.parse_args()
    with gzip.open(flags.data_dir / SENTENCES, "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if abs(row["score"]) > NEUTRAL]
    generator = random.Random(0)
    with flags.file.open("w", encoding="utf-8") as file:
        for domain in sorted({row["domain"] for row in rows}):
            these = [row for row in rows if row["domain"] == domain]
            generator.shuffle(these)
            for number, row in enumerate(these[: flags.train + flags.test]):
                line = {"text": row["text"], "label": int(row["score"] > 0), "domain": domain}
                line["split"] = "train" if number < flags.train else "test"
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
