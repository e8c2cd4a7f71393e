"""Draw README's picture of the races: seconds of a round, memory after 200 rounds, and seconds of 16 seeds.

    python experiments/lab/races.py [--rows=experiments/notebook/races] [--out=docs/assets/races.svg]

The folder has a file ``COURSE.json`` of ``peers.py --json`` for each course. Of the arrangements of a simulator, the
picture shows the fastest.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fedjax_mr.plots.figure import name_axes, picture

TITLES = {
    "ours": "fedjax_mr", "torch_best": "PyTorch, best loop", "blazefl": "BlazeFL", "flower": "Flower", "pfl": "pfl",
    "fluke": "fluke", "flare": "NVFlare",
}  # fmt: skip
PANELS = {
    "blazefl": ("seconds", "{:.0f}", "seconds per round\n(BlazeFL's benchmark, 100 clients)"),
    "memory": ("memory", "{:,.0f}", "MiB after 200 rounds\n(line: after 19)"),
    "seeds": ("seconds", "{:.0f}", "seconds for 16 seeds\nof 20 rounds, start included"),
}  # the figure of a course, how it is written, and its title
OURS, OTHERS = "#0072B2", "#BBBBBB"


def fastest(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows without errors by contestant, of several arrangements the one with the fewest seconds."""
    chosen: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["error"] is not None, row["seconds"])):
        if row["error"] is None:
            chosen.setdefault(row["contestant"], row)
    return chosen


def main() -> None:
    """Read the files and draw."""
    parser = argparse.ArgumentParser("races.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path("experiments/notebook/races"), metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("docs/assets/races.svg"), metavar="FILE")
    options = parser.parse_args()
    courses = {
        name: fastest(json.loads((options.rows / f"{name}.json").read_text(encoding="utf-8"))) for name in PANELS
    }
    contestants = [name for name in TITLES if any(name in rows for rows in courses.values())]
    with picture(options.out, (9, 0.6 + 0.34 * len(contestants))) as figure:
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, (course, (name, text, title)) in zip(axes, PANELS.items(), strict=True):
            for place, contestant in enumerate(contestants):
                if (row := courses[course].get(contestant)) is not None:
                    axis.barh(place, row[name], color=OURS if contestant == "ours" else OTHERS, height=0.7)
                    if course == "memory":
                        axis.vlines(row["memory_before"], place - 0.35, place + 0.35, color="black", linewidth=1.2)
                    axis.text(row[name], place, f" {text.format(row[name])}", va="center", fontsize=9)
            name_axes(axis, title=title)
            axis.set_yticks(range(len(contestants)), [TITLES[name] for name in contestants])
            axis.margins(x=0.2)
            axis.set_xticks([])
            axis.spines[["bottom"]].set_visible(False)
            axis.tick_params(left=False)
        axes[0].invert_yaxis()


if __name__ == "__main__":
    main()
