"""The seconds of a short run by its parts, where nothing is compiled yet, at a second start, and later in its process.

    python experiments/lab/benchmark.py start            # 100 rounds of FedMR on the digits
    python experiments/lab/benchmark.py start --quick    # ten rounds

``import``: Python and all imports before the flags are read. ``data``: the dataset and its division. ``trace``: tracing
and lowering of programs. ``compile``: XLA, or reading its cache. ``train``: rounds and evaluations without compilation.
``checkpoints``: saving them. ``pictures``: the figures at the end. ``rest``: flags, records and everything else. Three
rows: with an empty compilation cache, again with the filled one, and the next seed in the process of the second.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

PARTS = ("import", "data", "trace", "compile", "train", "checkpoints", "pictures", "rest")


def measure(*, rounds: int) -> list[dict[str, Any]]:
    """Measure the three rows."""
    with tempfile.TemporaryDirectory() as folder:
        # Not JAX_COMPILATION_CACHE_DIR: there JAX keeps only programs that take a second to compile.
        environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
        rows = []
        for start, seeds in (("empty cache", "0"), ("filled cache", "0,1")):
            command = [sys.executable, __file__, f"{folder}/{start}", str(rounds), seeds, repr(time.time())]
            out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
            names = (start, "next run of the process")
            rows += [{"start": name} | parts for name, parts in zip(names, json.loads(out), strict=False)]
    return rows


def _child(folder: str, rounds: int, seeds: str, started: float) -> list[dict[str, float]]:
    """Train the seeds one after the other in this process, and return the seconds of each by part."""
    from fedjax_mr import main
    from fedjax_mr.engine import program
    from fedjax_mr.experiment import experiment, run
    from fedjax_mr.experiment.checkpoint import Checkpoints

    seconds = dict.fromkeys(PARTS, 0.0) | {"import": time.time() - started}

    def timed(owner: Any, name: str, part: str) -> None:
        function: Callable = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - before

        setattr(owner, name, call)

    timed(run, "federated_data", "data")
    timed(Checkpoints, "save", "checkpoints")
    timed(experiment.Experiment, "draw", "pictures")
    rows = []
    phases_of = {"trace": program.PHASES[:2], "compile": program.PHASES[2:]}
    for seed in seeds.split(","):
        before = {part: program.compile_seconds(*phases) for part, phases in phases_of.items()}
        place = f"{folder}/{seed}"
        sys.stdout, shown = sys.stderr, sys.stdout
        assert main.main([f"--rounds={rounds}", f"--seed={seed}", f"--run_dir={place}", "--noprogress"]) == 0
        sys.stdout = shown
        wall = time.time() - started
        with open(f"{place}/summary.json", encoding="utf-8") as file:
            seconds["train"] = json.load(file)["seconds"]
        for part, phases in phases_of.items():
            seconds[part] = program.compile_seconds(*phases) - before[part]
        seconds["rest"] = wall - sum(seconds.values())
        rows.append({"seconds": wall} | seconds)
        seconds.update(dict.fromkeys(PARTS, 0.0))
        started = time.time()
    return rows


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))))
