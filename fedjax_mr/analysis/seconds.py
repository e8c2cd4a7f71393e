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

SIDES = {"clients": "clients_seconds_per_round", "server": "server_seconds_per_round"}


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
    rows = [["setting", "seeds", *(f"{part}, s per round" for part in next(iter(results.values()))[1])]]
    for name, (count, parts) in results.items():
        rows.append([name, str(count), *(tables.plus_minus(*value, digits=4) for value in parts.values())])
    text, suffix = (
        next((format for format in reversed(arguments.format) if format in known), first)
        for known, first in ((tables.FORMATS, "text"), (plots.FORMATS, "png"))
    )
    print(tables.FORMATS[text](rows))
    settings = [each for each in groups.by_setting(chosen) if finished(each[1])]
    names = groups.titles_of(settings)
    methods = {name: members[0].method() for name, (_, members) in zip(names, settings, strict=True)}
    means = {
        side: {name: parts[side].mean for name, (_, parts) in zip(names, results.values(), strict=True)}
        for side in SIDES
    }
    sides = {side: {name: mean for name, mean in each.items() if mean is not None} for side, each in means.items()}
    if sides != means:
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
        summaries = [run.summary() for run in finished(members)]
        if summaries:
            columns = SIDES | {"all": "seconds_per_round"}
            parts = {part: Statistic.of(each.get(column) for each in summaries) for part, column in columns.items()}
            results[name] = len(summaries), parts
    if not results:
        raise UserError("no run is finished")
    return results


def finished(members: Sequence[RunRecord]) -> list[RunRecord]:
    """The finished runs among some."""
    return [run for run in members if run.state == "finished"]
