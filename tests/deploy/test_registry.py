"""Every strategy on real clients, without processes or Flower: a fake post calls the client, and bits are compared."""

import shlex

import jax
import pytest

from fedjax_mr import config as configuration
from fedjax_mr import data
from fedjax_mr.checks import complete
from fedjax_mr.deploy import client, facts, mail, server
from fedjax_mr.deploy.roll import Roll, Terms
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.personal import PersonalEvaluation
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import build
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.federations import tree_equal

N, ROUNDS = 4, 2
SLOW = [
    *(name for name, row in STRATEGIES.items() if not row.only_simulated),
    "fedme --fedme_cluster_rounds=1",
    "fedme --nofedme_clustering",
    "scaffold --scaffold_variant=authors",
    "fedmr --server_optimizer=momentum",
    "fml --model=mlp,cnn_digits_small --architectures=cyclic",
]


class Real:
    """A federation of fake nodes, and the same in the simulator."""

    def __init__(self, folder, flags, *, faults=None, lost="wait", seconds=10.0):
        self.flags = [
            *("--dataset=digits", "--model=mlp", f"--clients={N}", "--cohort=3", f"--rounds={ROUNDS}", "--lr=0.02"),
            *("--local_epochs=2", "--batch_size=64", "--validation_share=0.1", "--client_test_share=0.2"),
            *("--public_share=0.1", "--public_max=20", "--devices=1", "--lanes=1", "--join_timeout=60"),
            *flags,
        ]
        self.config = complete(configuration.parse(self.flags))
        self.federated = data.federated_data(self.config)
        facts.divide(self.federated, folder)
        self.folder = folder
        self.samples = facts.ServerSamples.read(folder / "server.npz")
        self.model = facts.network_of(self.config, self.samples.facts)
        request = facts.Request(
            "ab" * 8,
            self.samples.facts,
            facts.agreement(self.config, self.model),
            STRATEGIES[self.config.strategy].label_counts,
        )
        post = mail.FakePost({100 + number: self.node(number) for number in range(N)}, faults)
        self.roll = Roll(post, request, num_clients=N, terms=Terms(lost, seconds, 60.0))

    def node(self, number, **changed):
        """Return the answering function of a client's node."""
        path, state = self.folder / f"client-{number}.npz", self.folder / f"state-{number}"
        settings = {"client-id": number, "data": str(path), "state": str(state)} | changed
        return lambda message: client.answer(message, settings, {"flags": shlex.join(self.flags)})

    def mailed(self):
        """Return the rounds of the real clients."""
        return server.MailRounds(
            self.config, facts.told_data(self.roll.everybody(), self.samples), self.model, self.roll
        )

    def simulated(self):
        """Return the rounds of the simulator."""
        axis = client_axis(devices=1, lanes=1, cohort_size=self.config.cohort)
        return build.build_rounds(self.config, self.federated, self.model, axis)


def after(rounds, count=ROUNDS):
    progress = rounds.init()
    reports = []
    for _ in range(count):
        progress, report = rounds.run(progress, 1)
        reports.append(jax.device_get(report))
    return progress, reports


@pytest.mark.slow
@pytest.mark.parametrize("flags", SLOW)
def test_real_clients_have_the_simulators_bits(flags, tmp_path):
    """The server's state, what a round reports, and the test of the clients' own models."""
    one = Real(tmp_path, shlex.split(f"--strategy={flags}"))
    simulated, mailed = one.simulated(), one.mailed()
    (theirs, reports), (ours, mailed_reports) = after(simulated), after(mailed)
    tree_equal(ours.server, theirs.server)
    tree_equal(mailed_reports, reports)
    if mailed.strategy.personal_model is not None:
        own = one.federated.client_test
        tests = PersonalEvaluation(simulated, one.federated, build.samples(one.federated, own.x, own.y))
        tree_equal(server.MailTests(mailed, len(own.y)).test(ours), tests.test(theirs))


@pytest.mark.parametrize("name", sorted(name for name, row in STRATEGIES.items() if row.only_simulated))
def test_what_is_only_simulated_is_refused_by_its_reason(name):
    with pytest.raises(UserError, match=f"{name} cannot run on real clients: .*samples"):
        server.check_deployable(complete(configuration.parse([f"--strategy={name}", "--clients=3", "--cohort=3"])))
