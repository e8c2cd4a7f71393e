"""How pFedHR took the clients' networks apart and reassembled them: pictures from a run's folder.

Drawn are ``alike`` (the mean CKA of the inputs and of the outputs of every two blocks of the last round, sorted by
group), ``candidates`` (the candidates of each round as strips of blocks, coloured by the client that they are from,
squares for convolutions and discs for dense blocks, with the block's place in the client's network) and
``teachers`` (the owners of the blocks in each client's teacher, round by round and in total). Rounds are those with
a checkpoint: train with ``--checkpoint_every=1 --keep_checkpoints=100``. ``--seconds`` reassembles the last round's
networks twice more and prints how long each step of the second time took, when everything was compiled.
"""

import argparse

import jax
import numpy as np

from fedjax_mr.analysis import plots, runs, tables
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import read_info
from fedjax_mr.strategies.pfedhr import strategy as pfedhr
from fedjax_mr.strategies.pfedhr.strategy import Account

Strip = list[tuple[int, int, bool]]
"""Blocks in order: the owner, the place in its network, and whether it is a dense one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser, several=False)
    runs.add_picture_arguments(parser)
    runs.add_restore_arguments(parser)
    parser.add_argument("--rounds", type=int, default=12, help="the last rounds that are drawn (default: 12)")
    parser.add_argument("--seconds", action="store_true", help="measure the steps of the server's part")


def main(arguments: argparse.Namespace) -> None:
    """Draw the server's work and print its numbers."""
    if arguments.rounds < 1:
        raise UserError(f"--rounds={arguments.rounds} is too small: at least 1")
    (run,) = chosen = runs.read(arguments.runs)
    if run.config.strategy != "pfedhr":
        raise UserError(f"{run.path}: {run.config.strategy} reassembles nothing; this is for runs of pfedhr")
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
    with runs.output_folder(arguments.out, chosen) as folder:
        plots.grouped(alike, names, groups, folder / f"alike.{suffix}", label="mean CKA")
        plots.strips(strips, folder / f"candidates.{suffix}", num_colours=num_clients)
        plots.teachers(teachers, num_clients, folder / f"teachers.{suffix}")

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
        state = Checkpoints(run.path / "checkpoints").restore(rebuilt.rounds.shapes(), numbers[-1])[0].server
        print(tables.aligned([("step of the server", "seconds"), *measured(rebuilt, state)]))
    print(f"drawn in {folder}")


def blocks_of(account: Account) -> Strip:
    """Return all blocks of a round, sources of its candidates."""
    columns = (account.owners.tolist(), account.places.tolist(), (account.kinds > 0).tolist())
    return list(zip(*columns, strict=True))


def strips_of(account: Account) -> list[Strip]:
    """Return the candidates of a round."""
    blocks = blocks_of(account)
    return [[blocks[i] for i in row if i >= 0] for row in account.chains]


def teachers_of(account: Account) -> dict[int, Strip]:
    """Return each client's teacher, for the clients of the round that have one."""
    strips = strips_of(account)
    pairs = zip(account.clients.tolist(), account.teachers.tolist(), strict=True)
    return {client: strips[teacher] for client, teacher in pairs if teacher >= 0}


def measured(rebuilt: runs.Rebuilt, state: pfedhr.State) -> list[tuple[str, str]]:
    """Return the seconds of each step of a reassembly once everything is compiled, and the number of programs."""
    problem, hyper = rebuilt.rounds.constants.problem, configuration.hyper(rebuilt.config)
    assert isinstance(hyper, pfedhr.Hyper)
    reassembler, rows = pfedhr.Reassembler(hyper, problem), range(problem.cohort_size)
    take = lambda row: jax.tree.map(lambda leaf: np.asarray(leaf)[row], state.models)
    networks = [pfedhr.client_blocks(problem.model, take(row), owner=row) for row in rows]
    for _ in range(2):
        seconds = reassembler.reassemble(networks, networks, jax.random.key(0)).seconds
    lines = [(step, f"{value:.2f}") for step, value in seconds.items()]
    return [
        *lines,
        ("all steps", f"{sum(seconds.values()):.2f}"),
        ("compiled programs", str(reassembler.programs.traces)),
    ]
