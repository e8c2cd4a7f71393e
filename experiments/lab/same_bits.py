"""Compare the numbers of all strategies before and after a change that should alter none.

    python experiments/lab/same_bits.py --write=before.json          # about ten minutes on one core
    python experiments/lab/same_bits.py --check=before.json
    python experiments/lab/same_bits.py --check=before.json --only=fedavg,fedmr

Each strategy trains 4 rounds on the digits with two seeds and two networks: a multilayer perceptron, and one with
BatchNorm and dropout. Compared are the rows of the metrics without times, and the arrays of the last checkpoint: their
bits, whatever their names are. One device, one lane. Exit code 1 if something differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SEEDS = (0, 1)
NETWORKS = ("mlp", "normed")
ROUNDS = 4


def settings(strategy: str, network: str, seed: int) -> dict:
    """The settings of one run."""
    from fedjax_mr.strategies import STRATEGIES

    few = {"fedgen": {"fedgen_steps": 5}, "pfedhr": {"pfedhr_server_epochs": 1}}.get(strategy, {})
    public = {"public_share": 0.2} if STRATEGIES[strategy].public else {}
    adapter = {"adapter": "lora"} if STRATEGIES[strategy].adapters else {}
    return {
        "strategy": strategy, "model": network, "seed": seed, "rounds": ROUNDS, "eval_every": 1, "cohort": 4,
        "clients": 10, "devices": 1, "lanes": 1, "progress": False, **public, **adapter, **few,
    }  # fmt: skip


def numbers(strategy: str, network: str, seed: int) -> dict:
    """Train, and return the compared values: rows of the metrics, and digests of the arrays by name."""
    import fedjax_mr as fmr
    from fedjax_mr.testing.federations import Normed

    if "normed" not in fmr.MODELS:
        fmr.MODELS["normed"] = fmr.ModelRow(Normed)
    flags = [f"--{name}={value}" for name, value in settings(strategy, network, seed).items() if name != "progress"]
    with tempfile.TemporaryDirectory() as folder:
        from fedjax_mr import main

        code = main.main([*flags, f"--run_dir={folder}/run", "--noprogress"])
        if code:
            return {"refused": code}
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row.pop("seconds")
        return {"rows": rows, "arrays": arrays(Path(folder, "run/checkpoints"))}


def arrays(folder: Path) -> dict[str, str]:
    """The digest of each array of the newest checkpoint, by name."""
    from fedjax_mr.experiment.checkpoint import MANIFEST, Checkpoints

    checkpoints = Checkpoints(folder)
    manifest = json.loads((folder / str(max(checkpoints.rounds())) / MANIFEST).read_text())
    template = {}
    for name, described in manifest["content"]["leaves"].items():
        dtype, _, shape = described.rstrip("]").partition("[")
        template[name] = np.empty([int(length) for length in shape.split(",") if length], dtype)
    tree, _ = checkpoints.restore(template)
    return {name: hashlib.sha256(leaf.tobytes()).hexdigest()[:16] for name, leaf in sorted(tree.items())}


def of_strategy(strategy: str) -> dict[str, dict]:
    """The compared values of all runs of one strategy, by network and seed."""
    return {f"{network}/{seed}": numbers(strategy, network, seed) for network in NETWORKS for seed in SEEDS}


def differences(before: dict, after: dict) -> list[str]:
    """Descriptions of the differences between two runs."""
    if before.keys() != after.keys():
        return [f"it ends otherwise: {sorted(before)}, now {sorted(after)}"]
    if "refused" in before:
        return []
    lines = []
    for old, new in zip(before["rows"], after["rows"], strict=False):
        for name in old | new:
            if old.get(name) != new.get(name):
                lines.append(f"round {old['round']}: {name} was {old.get(name)}, is {new.get(name)}")
    if sorted(before["arrays"].values()) != sorted(after["arrays"].values()):
        lost = [name for name, digest in before["arrays"].items() if digest not in after["arrays"].values()]
        lines.append(f"{len(lost)} of {len(before['arrays'])} arrays, among them {', '.join(lost[:3])}")
    return lines


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="file to write the numbers into; strategies in it are kept")
    parser.add_argument("--check", type=Path, help="file of numbers to compare with")
    parser.add_argument("--only", default="", help="some strategies, separated by commas; default: all")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(of_strategy(options.one)))
        return 0
    if (options.write is None) == (options.check is None):
        parser.error("give either --write or --check")
    from fedjax_mr.strategies import STRATEGIES

    saved = json.loads(options.check.read_text()) if options.check else {}
    if options.write and options.write.exists():
        saved = json.loads(options.write.read_text())
    wrong = 0
    for strategy in options.only.split(",") if options.only else STRATEGIES:
        if options.write and strategy in saved:
            continue
        # A process of its own: compiled programs take memory maps, of which a process has a limited number.
        command = [sys.executable, __file__, f"--one={strategy}"]
        printed = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ, check=True, text=True).stdout
        runs = json.loads(printed.splitlines()[-1])
        if options.write:
            saved[strategy] = runs
            options.write.write_text(json.dumps(saved, indent=1, sort_keys=True) + "\n")
            print(strategy, ", ".join(name for name, run in runs.items() if "refused" in run) or "-", flush=True)
            continue
        if strategy not in saved:
            print(f"{strategy}: not in {options.check}", flush=True)
            continue
        faults = [
            f"{name}: {difference}" for name in runs for difference in differences(saved[strategy][name], runs[name])
        ]
        refused = ", ".join(name for name, run in runs.items() if "refused" in run)
        same = f"the same bits{f', but refused with {refused}' if refused else ''}"
        print(f"{strategy}: {'; '.join(faults[:4]) or same}", flush=True)
        wrong += bool(faults)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
