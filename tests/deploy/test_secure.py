"""Secure FedMR with messages instead of processes: the simulator's bits, whatever ends an attempt.

The network has no convolutions: a CPU's library may add their products in another order in another program.
"""

import shlex

import jax
import numpy as np
import pytest

from fedjax_mr.config import config as configuration
from fedjax_mr.deploy import client, relay, server
from fedjax_mr.deploy.samples import divide
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.run import run
from fedjax_mr.secure.envelopes import Identity
from fedjax_mr.testing.messages import fake_messenger

pytest.importorskip("cryptography", reason="the messages are encrypted: pip install 'fedjax_mr[secure]'")
pytestmark = pytest.mark.slow

FLAGS = (
    "--dataset=digits --model=mlp --strategy=fedmr --fedmr_secure --fedmr_secure_repetitions=2 --clients=3 "
    "--cohort=3 --rounds=2 --batch_size=50 --local_epochs=1 --devices=1 --lanes=1 --eval_every=1 --seed=3"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with everybody's samples and keys, and what the simulator comes to."""
    folder = tmp_path_factory.mktemp("secure")
    config = configuration.parse(shlex.split(FLAGS))
    divide(federated_data(config), folder)
    lines = []
    for number in range(3):
        identity = Identity.new(number)
        identity.write(folder / f"{number}.key")
        lines.append(identity.public.line())
    (folder / "roster").write_text("\n".join(lines))
    simulated = run(configuration.parse(shlex.split(f"{FLAGS} --run_dir={folder}/simulated")))
    return folder, simulated


def real(folder, out, *, faults=None, lost="wait", choices="simulated", flags=""):
    """Run the same on three clients that answer messages."""
    flags = f"{FLAGS} --run_dir={out}/run {flags}"
    told = {"flags": flags, "lost": lost, "reply-timeout": 60.0, "server-data": str(folder / "server.npz")}
    node = lambda number: {
        "client-id": number,
        "data": str(folder / f"client-{number}.npz"),
        "state": str(out / str(number)),
        "key": str(folder / f"{number}.key"),
        "roster": str(folder / "roster"),
        "choices": choices,
    }
    handlers = {
        100 + number: lambda message, number=number: client.answer(message, node(number), told) for number in range(3)
    }
    config = resolve(configuration.parse(shlex.split(flags))).config
    return server.run(fake_messenger(handlers, faults), config, server.ServerOptions.of(told))


def same(result, simulated):
    jax.tree.map(np.testing.assert_array_equal, result.state, simulated.state)
    jax.tree.map(np.testing.assert_array_equal, result.variables, simulated.variables)


def once(kind, fault, node=101):
    """A fault of the first message of a kind and step to a node."""
    met = []

    def faults(message, before):
        step = message.content.get("relay", {}).get("step")
        if (message.kind, step, message.node) != (*kind, node) or met:
            return None
        met.append(message)
        return fault

    return faults


def of_nothing(content):
    return {**content, "bundles": {}}


@pytest.mark.parametrize(
    "faults",
    [
        None,
        lambda message, before: "double" if before == 0 else None,
        lambda message, before: "crash" if before == 0 else None,
        once(("train", None), "lose"),
        once((relay.KIND, 0), "lose"),
        once((relay.KIND, 1), "lose"),
        once((relay.KIND, 4), "lose"),
        once((relay.KIND, 1), of_nothing),
    ],
    ids=["plain", "double", "crash", "train", "send", "give back", "upload", "malformed"],
)
def test_the_simulators_bits(place, tmp_path, faults):
    """Also if clients drop out in the middle of an exchange: the next attempt has other keys and the same models."""
    folder, simulated = place
    same(real(folder, tmp_path, faults=faults), simulated)


def test_choices_of_the_clients_own_change_no_mean(place, tmp_path):
    folder, _ = place
    flags = "--rounds=1"
    simulated = run(configuration.parse(shlex.split(f"{FLAGS} {flags} --run_dir={tmp_path}/simulated")))
    found = real(folder, tmp_path, choices="random", flags=flags)
    close = lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found.variables, simulated.variables)


def test_a_drop_out_stops_the_run_if_it_is_to(place, tmp_path):
    folder, _ = place
    with pytest.raises(UserError, match="round 1: client 1 is lost"):
        real(folder, tmp_path, faults=once((relay.KIND, 1), "lose"), lost="stop")


def test_a_client_that_is_always_malformed_ends_the_run(place, tmp_path):
    folder, _ = place
    faults = lambda message, before: of_nothing if (message.kind, message.node) == (relay.KIND, 101) else None
    with pytest.raises(UserError, match=r"client 1 is lost .it did not send one bundle"):
        real(folder, tmp_path, faults=faults)


@pytest.mark.parametrize(
    ("flags", "lost", "line"),
    [
        ("--fedmr_secure_when=both", "wait", "real clients only exchange layers before the upload"),
        ("", "untrained", "an exchange of layers needs all clients of the round"),
    ],
)
def test_what_real_clients_do_not_do(place, tmp_path, flags, lost, line):
    folder, _ = place
    with pytest.raises(UserError, match=line):
        real(folder, tmp_path, flags=flags, lost=lost)
