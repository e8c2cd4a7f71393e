"""Seconds per round that the clients and the server take, for each method (FedMe, Figure 4): table and plot.

Values are means over the seeds, without evaluation and without compilation, except of the programs that a method runs
between two rounds (FedMe's outputs, once). The two sides are measured if they are separate programs: on several CPU
devices, with the samples on the devices. Compare runs only if the machine did nothing else.
"""

import argparse
from collections.abc import Sequence

from fedjax_mr import plots
from fedjax_mr.analysis import groups, runs, tables
from fedjax_mr.analysis.groups import Statistic
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.errors import UserError

PARTS = {
    "clients": "clients_seconds_per_round", "server": "server_seconds_per_round", "all": "seconds_per_round",
}  # fmt: skip
SIDES = ("clients", "server")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    groups.add_arguments(parser)
    runs.add_out_argument(parser)
    parser.add_argument(
        "--format",
        action="append",
        choices=[*tables.FORMATS, *plots.FORMATS],
        default=[],
        help="format of the table or of the plot. Repeat it to set both. Default: text and png",
    )


def main(arguments: argparse.Namespace) -> None:
    """Print and plot the seconds."""
    chosen = groups.find(arguments.runs)
    results = seconds(chosen)
    rows = [["setting", "seeds", *(f"{part}, s per round" for part in PARTS)]]
    for name, (count, parts) in results.items():
        rows.append([name, str(count), *(tables.plus_minus(*parts[part], digits=4) for part in PARTS)])
    text, suffix = (
        next((format for format in reversed(arguments.format) if format in known), first)
        for known, first in ((tables.FORMATS, "text"), (plots.FORMATS, "png"))
    )
    print(tables.FORMATS[text](rows))
    settings = [(setting, members) for setting, members in groups.by_setting(chosen) if _finished(members)]
    names = groups.titles_of(settings)
    methods = {name: members[0].method() for name, (_, members) in zip(names, settings, strict=True)}
    sides: dict[str, dict[str, float]] = {}
    for side in SIDES:
        means = [parts[side].mean for _, parts in results.values()]
        sides[side] = {name: mean for name, mean in zip(names, means, strict=True) if mean is not None}
    if any(len(side) < len(methods) for side in sides.values()):
        print(
            "not drawn: some runs did not measure the two sides (they ran on one device, or with samples on the host)"
        )
        return
    with runs.output_folder(arguments.out, chosen) as folder:
        path = folder / f"seconds.{suffix}"
        plots.bars(sides, path, x_label="seconds per round", methods=methods)
    print(f"drawn in {path}")


def seconds(chosen: Sequence[RunRecord]) -> dict[str, tuple[int, dict[str, Statistic]]]:
    """The number of finished runs of each setting, and their seconds per round: clients, server, both.

    Raises:
      UserError: no run is finished.
    """
    results, settings = {}, groups.by_setting(chosen)
    names = groups.short_names([setting for setting, _ in settings])
    for name, (_, members) in zip(names, settings, strict=True):
        if summaries := [run.summary() for run in _finished(members)]:
            parts = {part: Statistic.of(each.get(column) for each in summaries) for part, column in PARTS.items()}
            results[name] = len(summaries), parts
    if not results:
        raise UserError("no run is finished")
    return results


def _finished(members: Sequence[RunRecord]) -> list[RunRecord]:
    return [run for run in members if run.state == "finished"]
