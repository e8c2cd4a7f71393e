"""The jobs of the clients in simulated time: training and transfers, arrivals, versions of the server, staleness.

A row is a client, the fastest one on top, and a bar is a job. The events are computed from the configuration of the
run, which needs --fleet, --deadline, --over_select or --mode=async. The histogram is over the whole run.
"""

import argparse

import numpy as np

from fedjax_mr import plots
from fedjax_mr.analysis import runs
from fedjax_mr.clock.schedule import Events
from fedjax_mr.config import titles
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.simulated_time import Devices, devices_of, events_of

MOST_JOBS = 120  # drawn by default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser, several=False)
    parser.add_argument("--first", type=int, default=1, metavar="ROUND", help="first round to draw. Default: 1")
    parser.add_argument("--rounds", type=int, metavar="COUNT", help=f"rounds to draw. Default: about {MOST_JOBS} jobs")
    runs.add_restore_arguments(parser)
    runs.add_picture_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Draw the timeline and print its path."""
    (run,) = runs.read(arguments.runs)
    config, federated, model = runs.problem_of(run, data_dir=arguments.data_dir, trust=arguments.trust)
    events = events_of(config, federated, model)
    if events is None and config.mode == "async":
        raise UserError(f"{config.strategy} selects its clients during the training, so only a run knows its jobs")
    if events is None:
        raise UserError(f"{run.path} has no simulated time: train it with --fleet, --deadline or --mode=async")
    rounds = len(events.times)
    count = max(1, MOST_JOBS * rounds // len(events.jobs)) if arguments.rounds is None else arguments.rounds
    if not 1 <= arguments.first <= rounds or count < 1:
        raise UserError(
            f"--first={arguments.first} and --rounds={count} are not within the {rounds} rounds of {run.path}"
        )
    last = min(arguments.first + count - 1, rounds)
    devices, _ = devices_of(config, federated, model)
    jobs, order = jobs_of(events, devices)
    begin = float(events.times[arguments.first - 2]) if arguments.first > 1 else 0.0
    window = begin, float(events.times[last - 1])
    unit, x_label = plots.unit_of("clock", window[1])
    used = events.jobs["used"] > 0
    staleness = jobs.staleness[used]
    inside = (jobs.start < window[1]) & (jobs.end > window[0])
    drawn = plots.Jobs(*(each[inside] / unit if each.dtype == np.float64 else each[inside] for each in jobs))
    counted = "rounds" if events.schedule is None else "versions"
    with runs.output_folder(arguments.out, [run]) as folder:
        path = folder / f"timeline.{arguments.format}"
        plots.timeline(
            drawn,
            events.times[arguments.first - 1 : last] / unit,
            path,
            names=[f"client {client}" for client in order],
            window=(window[0] / unit, window[1] / unit * 1.01),
            all_staleness=staleness,
            x_label=x_label,
            y_label=f"{len(order)} clients, the fastest on top",
            title=f"{titles.run(config)}: {counted} {arguments.first} to {last} of {rounds}",
        )
    print(f"{used.sum()} of {len(used)} jobs made {rounds} versions in {events.times[-1]:.6g} simulated seconds")
    if events.schedule is not None:
        print(f"staleness: mean {staleness.mean():.3f}, largest {staleness.max()}")
    print(f"drawn in {path}")


def jobs_of(events: Events, devices: Devices) -> tuple[plots.Jobs, np.ndarray]:
    """The jobs of a run, in seconds, and the clients in the order of their rows: [N], the fastest first.

    A client's speed is the mean seconds of its jobs without their random parts.
    """
    table = events.jobs
    own = np.arange(len(devices.steps))
    order = np.argsort(devices.seconds(own, np.zeros((len(own), 2))).total, kind="stable")
    seconds = devices.seconds(table["client"], devices.draws(np.arange(len(table))))
    used, dropped = table["used"] > 0, (table["used"] == 0) & (events.schedule is None)
    end = np.where(
        dropped, np.minimum(table["arrival"], events.times[table["version"] % len(events.times)]), table["arrival"]
    )
    train = table["start"] + seconds.download
    trained = np.where(used, end - seconds.upload, train + seconds.compute)  # a deadline may have ended it earlier
    staleness = np.where(used, table["used"] - 1 - table["version"], 0)
    return plots.Jobs(
        np.argsort(order)[table["client"]], table["start"], train, trained, end, staleness, used, dropped
    ), order
