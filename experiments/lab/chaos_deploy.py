"""Rows ``clients`` and ``servers`` of chaos.py: real clients with fake messages, one side of which is hostile."""

import contextlib
import copy
import functools
import io
import json
import os
import random
import shlex
import struct
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from chaos_messages import ODD
from chaos_runs import World, Wrong
from fedjax_mr.config import config as configuration
from fedjax_mr.deploy import client, flower, protocol, relay, server, transport
from fedjax_mr.deploy.client_manager import ClientManager, ClientPolicy
from fedjax_mr.deploy.samples import ServerSamples, divide
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.testing.messages import Fault, fake_messenger

CLIENTS = 4
STEPS = tuple(kind for kind in client.KINDS if kind not in ("rejected", relay.KIND))  # of an honest federation
TEXTS = (
    "\x1b[2J\x1b]0;x\x07", "a\nfedjax-mr: round 9: accuracy 1.0", "\u202e", "x" * 10**5, "[" * 10**5, "{}", "[1]",
    "null", "--flagfile=/etc/passwd", "--import=/etc/passwd", "'", "../..", "\ud800", "",
)  # fmt: skip
SCALARS = (-1, 0, 1, 3, 2**24, 2**31 - 1, 2**31, 2**63, -(2**63), 1e308, float("inf"), float("nan"), True)
HEADERS = (
    "(1,)", "(2,)", "(-1, -4)", f"({10**14},)", f"({10**30},)", f"({10**30}, 0)", "(1,", "()", "1", "None", "(1.5,)",
    "(" * 500, "[1]", "(True,)",
)  # fmt: skip
DTYPES = ("'<f4'", "'|O'", "'<U2'", "[()]", "[('a', '<f4')]", "'<f4", "'V0'", "'<M8[ns]'", "3", "'>f4'")


class Place:
    """A federation whose honest messages and replies are known: made once in each process."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        """Divide the data, and let every client join, begin, train and test once."""
        flags = [
            f"--dataset={dataset}", "--partition=iid", "--model=mlp", "--strategy=scaffold", f"--clients={CLIENTS}",
            "--cohort=3", "--rounds=2", "--local_epochs=1", "--batch_size=16", "--client_test_share=0.2",
            "--validation_share=0.2", "--devices=1", "--lanes=1", "--import=none",
        ]  # fmt: skip
        self.folder, self.flags = folder, shlex.join(flags)
        config = resolve(configuration.parse(flags)).config
        divide(federated_data(config), folder)
        samples = ServerSamples.read(folder / "server.npz")
        model = protocol.network_of(config, samples.facts)
        self.manifest = protocol.RunManifest(
            "ab" * 8, samples.facts, protocol.agreement(config, model), label_counts=False
        )
        self.replies: dict[tuple[str, int], transport.Content] = {}
        self.messages: dict[tuple[str, int], transport.Message] = {}
        manager = self.manager(self.honest, "stop")
        self.clients = server.RemoteClients(
            config, protocol.remote_data(manager.wait_for_all(), samples), model, manager
        )
        progress, _ = self.clients.simulator.run(self.clients.simulator.init(), 1)
        self.expected = self.clients.test(progress)
        if silent := set(STEPS) - {kind for kind, _ in self.messages}:
            raise Wrong(f"this script is older than the protocol: nobody sent {' or '.join(sorted(silent))}")
        self.hostile = next(number for kind, number in self.replies if kind == "train")

    def honest(self, message: transport.Message) -> transport.Content:
        """Answer as a client does, and remember it."""
        number = message.node - 100
        node = {"client-id": number, "data": str(self.folder / f"client-{number}.npz")}
        reply = client.answer(message, node | {"state": str(self.folder / f"state-{number}")}, {"flags": self.flags})
        self.messages[message.kind, number], self.replies[message.kind, number] = message, reply
        return reply

    def manager(self, answer: Any, lost: str, faults: Any = None) -> ClientManager:
        """The clients of a new run."""
        messenger = fake_messenger({100 + number: answer for number in range(CLIENTS)}, faults)
        return ClientManager(messenger, self.manifest, num_clients=CLIENTS, policy=ClientPolicy(lost, 10.0, 30.0))


@functools.cache
def _place(dataset: Path, process: int) -> Place:
    folder = dataset.parent / f"deploy-{process}"
    folder.mkdir()
    return Place(folder, dataset)


def _world(world: World) -> Place:
    return _place(world.folder / "tiny.npz", os.getpid())


# --- Hostile clients -------------------------------------------------------------------------------------------------


def clients(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Let one client answer whatever it wants: the server gets the others' answers, and says one line about it."""
    place, chance = _world(world), random.Random(f"{world.seed}/clients/{number}")
    if chance.random() < 0.2:
        return _forged(chance)
    step, lost = chance.choice(STEPS), chance.choice(("untrained", "wait"))
    tried: list[str] = []

    def faults(message: transport.Message, before: int) -> Fault:
        if message.kind != step or message.node != 100 + place.hostile or (lost == "wait" and tried):
            return None
        seed = chance.random()

        def spoil(content: transport.Content) -> transport.Content:
            spoiled, how = _spoiled(random.Random(seed), content)
            tried.append(how)
            return spoiled

        return spoil

    # Replies are those of the first time: the manager is new, but its clients' work is the same.
    # The first time, the server rejected nobody, so there is no reply to "rejected" to repeat.
    reply = lambda message: place.replies.get((message.kind, message.node - 100), {})
    manager = place.manager(reply, lost, faults)
    said = io.StringIO()
    ended = ""
    try:
        with contextlib.redirect_stderr(said):
            manager.wait_for_all()
            manager.begin({})
            for kind in ("train", "evaluate"):
                requests = {node: {} for name, node in place.replies if name == kind}
                answers = manager.ask(kind, 0, requests, functools.partial(_read, place, kind), 2**22)
                for node in requests.keys() - {place.hostile}:
                    _require_same(answers[node], _read(place, kind, node, place.replies[kind, node]))
    except UserError as error:
        ended = str(error)
        if step in ("train", "evaluate") and lost == "untrained":
            raise Wrong(f"{tried}: it ended the run: {ended}") from None
    except Exception:  # broad: any error other than a UserError is a failure of the trial, reported with its place
        raise Wrong(f"{tried}: {traceback.format_exc()}") from None
    for line in [*said.getvalue().splitlines(), *filter(None, [ended])]:
        if not line.isprintable() or len(line) > 400 or (line is not ended and not line.startswith("fedjax-mr: ")):
            raise Wrong(f"{tried}: a line of {len(line)} characters: {line[:300]!r}")
    return 1, f"{step}: {tried[:1]}"


def _read(place: Place, kind: str, number: int, reply: transport.Content) -> Any:
    if kind == "train":
        return place.clients._read(number, reply)
    return place.clients.read(number, reply)


def _require_same(found: Any, expected: Any) -> None:
    if repr(found) != repr(expected):
        raise Wrong("another client's answer has changed")


def _forged(chance: random.Random) -> tuple[int, str]:
    """Read the bytes of a forged array."""
    header = f"{{'descr': {chance.choice(DTYPES)}, 'fortran_order': False, 'shape': {chance.choice(HEADERS)}, }}\n"
    content = struct.pack("<H", len(header)) + header.encode() + bytes(chance.choice((0, 3, 4, 8, 16)))
    forged = b"\x93NUMPY" + chance.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x09\x00")) + content
    for _ in range(chance.choice((0, 0, 1, 3))):
        place = chance.randrange(len(forged))
        forged = forged[:place] + bytes([chance.randrange(256)]) + forged[place + 1 :]
    try:
        array = flower._array("x", forged)
    except UserError:
        return 1, "a forged array: refused"
    except Exception:  # broad: any error other than a UserError is a failure of the trial, reported with its place
        raise Wrong(f"{forged[:200]!r}: {traceback.format_exc()}") from None
    if array.nbytes > len(forged):
        raise Wrong(f"{forged[:200]!r}: {array.nbytes} bytes from {len(forged)}")
    return 1, "a forged array: taken"


# --- Extreme values --------------------------------------------------------------------------------------------------

EXTREME = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e30, -1e30, 1e20, 1e-45, 0.0, -0.0)


def values(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Let one client send well-formed numbers that are extreme: the run goes on, and its state is finite."""
    place, chance = _world(world), random.Random(f"{world.seed}/values/{number}")
    record, lost = chance.choice(("upload", "upload", "metrics")), chance.choice(("untrained", "wait"))
    bad_step = chance.choice((None, None, 0, 5))
    value, few = chance.choice(EXTREME), chance.random() < 0.3
    tried = f"{record} of {value}, in {'one number' if few else 'every number'}, bad_step {bad_step}, --lost={lost}"

    def faults(message: transport.Message, before: int) -> Fault:
        if message.kind != "train" or message.node != 100 + place.hostile:
            return None

        def spoil(content: transport.Content) -> transport.Content:
            records = {name: dict(each) for name, each in content.items()}
            names = [name for name, each in records[record].items() if getattr(each, "dtype", None) == np.float32]
            for name in chance.sample(names, 1) if few else names:
                array = np.array(records[record][name])
                array.flat[:: array.size if few else 1] = value
                records[record][name] = array
            if bad_step is not None:
                records["metrics"] = {
                    name: np.full_like(each, bad_step) if name.endswith("bad_step") else each
                    for name, each in records["metrics"].items()
                }
            return records

        return spoil

    def answer(message: transport.Message) -> transport.Content:
        return place.replies.get((message.kind, message.node - 100), {})

    manager = place.manager(answer, lost, faults)
    remote, said = place.clients, io.StringIO()
    honest, remote.manager = remote.manager, manager
    try:
        with contextlib.redirect_stderr(said):
            manager.wait_for_all()
            manager.begin({})
            progress, report = remote.simulator.run(remote.simulator.init(), 1)
    except UserError as error:
        if isinstance(error, DivergedError):
            raise Wrong(f"{tried}: it ends the run: {error}") from None
        if not str(error).isprintable():
            raise Wrong(f"{tried}: {error!r}") from None
        return 1, f"{tried}: refused"
    except Exception:  # broad: any error other than a UserError is a failure of the trial, reported with its place
        raise Wrong(f"{tried}: {traceback.format_exc()}") from None
    finally:
        remote.manager = honest
    leaves = jax.tree.leaves(jax.device_get(progress.server))
    if not all(np.isfinite(leaf).all() for leaf in leaves if np.asarray(leaf).dtype.kind == "f"):
        raise Wrong(f"{tried}: the server's state is not finite:\n{said.getvalue()}")
    if int(report.bad_step) >= 0:
        raise Wrong(f"{tried}: the run counts as diverged:\n{said.getvalue()}")
    return 1, tried


# --- Hostile servers -------------------------------------------------------------------------------------------------


def servers(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Ask a client whatever a server wants: it answers, or says one line, and is as before for an honest server."""
    place, chance = _world(world), random.Random(f"{world.seed}/servers/{number}")
    who = chance.choice([node for kind, node in place.messages if kind == "train"])
    message = place.messages[chance.choice((*STEPS, "train")), who]
    node = {"client-id": who, "data": str(place.folder / f"client-{who}.npz"), "state": str(folder / "state")}
    flags, how = place.flags, ""
    for kind in ("join", "begin"):  # its folder is new
        client.answer(place.messages[kind, who], node, {"flags": flags})
    if chance.random() < 0.15:
        flags, how = f"{flags} {chance.choice(TEXTS)}", "flags"
    elif chance.random() < 0.1:
        message, how = transport.dataclasses.replace(message, kind=chance.choice((*TEXTS, *client.KINDS))), "kind"
    else:
        content, how = _spoiled(chance, message.content)
        message = transport.dataclasses.replace(message, content=content)
    said, tried = io.StringIO(), f"{message.kind[:20]!r}: {how}"
    try:
        with contextlib.redirect_stderr(said):
            reply = transport.reply(message, lambda message: client.answer(message, node, {"flags": flags}))
    except Exception:  # broad: any error other than a UserError is a failure of the trial, reported with its place
        raise Wrong(f"{tried}: {traceback.format_exc()}") from None
    refused = reply[transport.ENVELOPE].get("refused")
    if refused is not None and (not refused.isprintable() or not 10 < len(refused) <= 200):
        raise Wrong(f"{tried}: refused by {refused!r}")
    if refused is not None and not refused.startswith("client") and "run" not in refused:
        raise Wrong(f"{tried}: {refused!r} does not say who")
    for kind in ("join", "begin", "train"):
        again = client.answer(place.messages[kind, who], node, {"flags": place.flags})
        _require_same(again, place.replies[kind, who])
    return 1, f"{tried}: {'answered' if refused is None else 'refused'}"


# --- Spoiled contents ------------------------------------------------------------------------------------------------


def _spoiled(chance: random.Random, content: Mapping[str, Any]) -> tuple[Any, str]:
    """Change one thing in records; return them and a description of the change."""
    kind = chance.random()
    if kind < 0.04:
        return chance.choice((None, 5, [], "x", ())), "no records"
    records: dict[Any, Any] = {name: dict(record) for name, record in content.items()}
    name = chance.choice(sorted(records)) if records else ""
    if kind < 0.1 and records:
        del records[name]
        return records, f"{name} is gone"
    if kind < 0.16:
        return records | {name: chance.choice(ODD)}, f"{name} is no record"
    if kind < 0.22 and transport.ENVELOPE in records:
        records[transport.ENVELOPE]["refused"] = chance.choice((*TEXTS, *ODD))
        return records, "a refusal"
    if kind < 0.26:
        return records | {"more": {"x": np.zeros(chance.choice((1, 2**22)), np.float32)}}, "one record more"
    record = records.setdefault(name, {})
    key = chance.choice(sorted(record)) if record else "x"
    if kind < 0.32:
        record.pop(key, None)
        return records, f"{name}/{key} is gone"
    if kind < 0.36:
        return records | {name: record | {chance.choice(TEXTS): np.zeros(1)}}, f"{name} has one more"
    record[key], how = _other(chance, record.get(key))
    return records, f"{name}/{key} {how}"


def _other(chance: random.Random, value: Any) -> tuple[Any, str]:
    """Another value, mostly of the same kind, and a description."""
    if chance.random() < 0.2:
        return chance.choice(ODD), "of another type"
    if isinstance(value, np.ndarray):
        other = np.array(value)
        changes = [
            (other.astype(np.float64), "as float64"), (other[..., None], "of another shape"), (other[None], "longer"),
            (np.broadcast_to(other.ravel()[:1], (10**6, 10**6)) if other.size else other, "of 10^12 numbers"),
            (np.zeros(0, other.dtype), "empty"), (-other.astype(np.int64) - 1, "negative"),
        ]  # fmt: skip
        if other.dtype.kind == "f":
            with np.errstate(over="ignore"):
                changes += [(np.full_like(other, value), f"of {value}") for value in (np.nan, np.inf, 3e38)]
        else:
            changes += [(np.full_like(other, np.iinfo(other.dtype).max if other.dtype.kind in "iu" else 1), "largest")]
        return chance.choice(changes)
    if isinstance(value, str) and value.startswith("{") and chance.random() < 0.7:
        message = json.loads(value)
        key = chance.choice(sorted(message))
        message[key] = chance.choice((*TEXTS, *SCALARS, None, [], [1], {}, [[]], ["x"]))
        return json.dumps(message), f"with another {key}"
    if isinstance(value, str):
        return chance.choice(TEXTS), "another text"
    if isinstance(value, list):
        return chance.choice(([], [1] * 10**4, ["x"], [-1], copy.copy(value) * 2)), "another list"
    return chance.choice(SCALARS), "another number"
