"""Plots of pFedHR's reassembly: similarity of blocks, candidates, and teachers of the clients.

``alike`` has the mean CKA of the inputs and of the outputs of every pair of blocks of the last round, sorted by group.
``candidates`` has the candidates of each round as strips of blocks: the colour is the client of a block, the number its
place in the client's network; squares are convolutions, discs dense blocks. ``teachers`` has the owners of the blocks
in each client's teacher, by round and in total. Only rounds with a checkpoint are drawn: train with
``--checkpoint_every=1 --keep_checkpoints=100``. ``--seconds`` reassembles the networks of the last round twice, and
prints the time of each step of the second pass, when everything is compiled.
"""

import argparse
import sys

import jax
import numpy as np

import block_plots
from fedjax_mr.analysis import command, runs, tables
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import read_info
from fedjax_mr.keys import random_key
from fedjax_mr.strategies.pfedhr import strategy as pfedhr
from fedjax_mr.strategies.pfedhr.strategy import Account
from fedjax_mr.terminal import interrupts

Strip = list[tuple[int, int, bool]]
"""Blocks in order: owner, place in the owner's network, and whether the block is dense."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser, several=False)
    runs.add_picture_arguments(parser)
    runs.add_restore_arguments(parser)
    parser.add_argument("--rounds", type=int, default=12, help="number of last rounds to draw. Default: 12")
    parser.add_argument("--seconds", action="store_true", help="measure the steps of the server")


def main(arguments: argparse.Namespace) -> None:
    """Plot the work of the server and print its numbers."""
    if arguments.rounds < 1:
        raise UserError(f"--rounds={arguments.rounds} must be at least 1")
    (run,) = records = runs.read(arguments.runs)
    if run.config.strategy != "pfedhr":
        raise UserError(f"{run.path}: {run.config.strategy} does not reassemble networks; name a run of pfedhr")
    numbers = [number for number in run.checkpoints() if number > 0][-arguments.rounds :]
    if not numbers:
        raise UserError(f"{run.path} has no checkpoint of a finished round")
    accounts = {number: Account(**read_info(run.path, number)) for number in numbers}
    last = accounts[numbers[-1]]

    num_clients, suffix = run.config.clients, arguments.format
    blocks = blocks_of(last)
    order = sorted(range(len(blocks)), key=lambda i: (last.groups[i], blocks[i]))
    names = [f"{owner}.{place}{' fc' if dense else ''}" for owner, place, dense in (blocks[i] for i in order)]
    groups = last.groups[order].tolist()
    alike = last.similarity[np.ix_(order, order)]
    strips = {f"round {number}": strips_of(account) for number, account in accounts.items()}
    teachers = {number: teachers_of(account) for number, account in accounts.items()}
    with runs.output_folder(arguments.out, records) as folder:
        block_plots.grouped(alike, names, groups, folder / f"alike.{suffix}", label="mean CKA")
        block_plots.strips(strips, folder / f"candidates.{suffix}", num_colours=num_clients)
        block_plots.teachers(teachers, num_clients, folder / f"teachers.{suffix}")

    rows = [("round", "clients", "blocks", "candidates", "of length", "different teachers")]
    for number, account in accounts.items():
        lengths = [len(strip) for strip in strips[f"round {number}"]]
        different = len(set(account.teachers.tolist()) - {-1})
        clients = ",".join(map(str, account.clients))
        span = f"{min(lengths)} to {max(lengths)}" if lengths else ""
        rows.append((str(number), clients, str(len(blocks_of(account))), str(len(lengths)), span, str(different)))
    print(tables.aligned(rows))
    if arguments.seconds:
        rebuilt = runs.rebuild(run, data_dir=arguments.data_dir, trust=arguments.trust)
        checkpoints = Checkpoints(run.path / "checkpoints")
        template = rebuilt.rounds.shapes(kept=checkpoints.kept_memories(numbers[-1]))
        state = checkpoints.restore_run(template, numbers[-1], model=rebuilt.model)[0].server
        print(tables.aligned([("step of the server", "seconds"), *measured(rebuilt, state)]))
    print(f"drawn in {folder}")


def blocks_of(account: Account) -> Strip:
    """All blocks of a round, from which its candidates are made."""
    columns = (account.owners.tolist(), account.places.tolist(), (account.kinds > 0).tolist())
    return list(zip(*columns, strict=True))


def strips_of(account: Account) -> list[Strip]:
    """The candidates of a round."""
    blocks = blocks_of(account)
    return [[blocks[i] for i in row if i >= 0] for row in account.chains]


def teachers_of(account: Account) -> dict[int, Strip]:
    """The teacher of each client of the round that has one."""
    strips = strips_of(account)
    pairs = zip(account.clients.tolist(), account.teachers.tolist(), strict=True)
    return {client: strips[teacher] for client, teacher in pairs if teacher >= 0}


def measured(rebuilt: runs.Rebuilt, state: pfedhr.State) -> list[tuple[str, str]]:
    """The seconds of each step of a reassembly after compilation, and the number of compiled programs."""
    problem, hyper = rebuilt.rounds.constants.problem, configuration.hyper(rebuilt.config)
    assert isinstance(hyper, pfedhr.Hyper)
    reassembler, rows = pfedhr.Reassembler(hyper, problem), range(problem.cohort_size)
    take = lambda row: jax.tree.map(lambda leaf: np.asarray(leaf)[row], state.models)
    networks = [pfedhr.client_blocks(problem.model, take(row), owner=row) for row in rows]
    for _ in range(2):
        seconds = reassembler.reassemble(networks, networks, random_key(0)).seconds
    lines = [(step, f"{value:.2f}") for step, value in seconds.items()]
    return [
        *lines,
        ("all steps", f"{sum(seconds.values()):.2f}"),
        ("compiled programs", str(reassembler.programs.traces)),
    ]


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
