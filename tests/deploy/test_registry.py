"""Every strategy on real clients, without processes and Flower: a fake messenger calls the client; bits are equal."""

import dataclasses
import functools
import json
import re
import shlex

import jax
import numpy as np
import pytest

from fedjax_mr.clock.schedule import simulate
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.deploy import client, protocol, server, wire
from fedjax_mr.deploy.asynchronous import AsynchronousClients, read_seconds
from fedjax_mr.deploy.client_manager import ClientManager, ClientPolicy
from fedjax_mr.deploy.samples import ServerSamples, divide
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import build, simulated_time
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.folder import ARRIVALS
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.federations import tree_close, tree_equal
from fedjax_mr.testing.messages import fake_messenger

N, ROUNDS = 4, 2
SLOW = [
    *(f"{name}{' --adapter=lora' * row.adapters}" for name, row in STRATEGIES.items() if not row.only_simulated),
    "fedme --fedme_cluster_rounds=1",
    "fedme --nofedme_clustering",
    "scaffold --scaffold_variant=authors",
    "fedmr --server_optimizer=momentum",
    "fedmr --compress=topk --compress_ratio=0.05 --error_feedback=ef",
    "fedavg --compress=int8 --compress_download=int8",
    "fedcross --dp_clip=0.5 --robust=median",
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
        self.uploads = []  # as they leave the clients
        self.config = resolve(configuration.parse(self.flags)).config
        self.federated = federated_data(self.config)
        divide(self.federated, folder)
        self.folder = folder
        self.samples = ServerSamples.read(folder / "server.npz")
        self.model = protocol.network_of(self.config, self.samples.facts)
        manifest = protocol.RunManifest(
            "ab" * 8,
            self.samples.facts,
            protocol.agreement(self.config, self.model),
            STRATEGIES[self.config.strategy].label_counts,
        )
        messenger = fake_messenger({100 + number: self.node(number) for number in range(N)}, faults)
        self.manager = ClientManager(messenger, manifest, num_clients=N, policy=ClientPolicy(lost, seconds, 60.0))

    def node(self, number, **changed):
        """The function of a client's node that answers messages."""
        path, state = self.folder / f"client-{number}.npz", self.folder / f"state-{number}"
        settings = {"client-id": number, "data": str(path), "state": str(state)} | changed

        def answer(message):
            content = client.answer(message, settings, {"flags": shlex.join(self.flags)})
            self.uploads += [content["upload"]] if message.kind == "train" else []
            return content

        return answer

    def mailed(self):
        """The real clients, with the server's simulator."""
        return server.RemoteClients(
            self.config, protocol.remote_data(self.manager.wait_for_all(), self.samples), self.model, self.manager
        )

    def simulated(self):
        """The simulator of the same federation."""
        task = build.task(self.config, self.federated)
        model = build.build_model(self.config, self.federated.dataset, task=task)
        return build.simulator_of(self.config, self.federated, model)


def after(simulator, count=ROUNDS):
    progress = simulator.init()
    reports = []
    for _ in range(count):
        progress, report = simulator.run(progress)
        reports.append(report)
    return progress, reports


@pytest.mark.slow
@pytest.mark.parametrize("flags", SLOW)
def test_real_clients_have_the_simulators_bits(flags, tmp_path):
    """The server's state, what a round reports, and the test of the clients' own models.

    Convolutions may differ in the last digits: a CPU's library may add their products in another order. So may FedGen's
    generator, whose training is part of another program.
    """
    one = Real(tmp_path, shlex.split(f"--strategy={flags}"))
    simulated, mailed = one.simulated(), one.mailed()
    (theirs, reports), (ours, mailed_reports) = after(simulated), after(mailed.simulator)
    same = functools.partial(tree_close, rtol=1e-5, atol=1e-6) if "cnn" in flags or "fedgen" in flags else tree_equal
    same(ours.server, theirs.server)
    same(mailed_reports, reports)
    if simulated.rounds.strategy.personal_model is not None:
        tested = mailed.simulator.personal(ours), simulated.personal(theirs)
        same(*(each._replace(task=None) for each in tested))


def small_data(folder, task):
    """The path of an .npz file for a task: times of events, masks of bright pixels, or texts with their next tokens."""
    random, arrays = np.random.default_rng(0), {}
    if task == "survival":
        arrays |= {"x": random.normal(size=(240, 3)), "y": np.stack([random.exponential(size=240), np.ones(240)], 1)}
    elif task == "segmentation":
        x = random.integers(0, 255, (80, 8, 8), np.uint8)
        arrays |= {"x": x, "y": (x > 100).astype(int) + (x > 200)}
    else:
        tokens = random.integers(1, 9, (80, 7))
        arrays |= {"x": tokens[:, :-1], "y": tokens[:, 1:]}
    np.savez(folder / f"{task}.npz", task=task, **arrays)
    return folder / f"{task}.npz"


OTHERS = [
    pytest.param("regression", "--dataset=diabetes --model=logistic --loss=huber", marks=pytest.mark.slow),
    (
        "classification",
        "--model=logistic --metrics=macro_f1,recall,auroc_of_class,confusion --loss=weighted "
        "--loss_weights=1,2,3,4,5,6,7,8,9,1",
    ),
    # its histograms take more than a small message
    pytest.param("survival", "--dataset={} --model=logistic", marks=pytest.mark.slow),
    pytest.param("segmentation", "--dataset={} --model=unet --public_share=0", marks=pytest.mark.slow),
    pytest.param("language", "--dataset={} --model=lstm1 --public_share=0", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("task", "flags"), OTHERS)
def test_other_tasks_and_metrics_have_the_simulators_numbers(task, flags, tmp_path):
    """The model that the chosen loss makes, and each sum of each metric, with one number per class and tables too."""
    flags = flags.format(small_data(tmp_path, task)) if "{}" in flags else flags
    one = Real(tmp_path / "real", ["--strategy=fedavg", "--local_epochs=1", "--partition=iid", *flags.split()])
    simulated, mailed = one.simulated(), one.mailed()
    assert mailed.simulator.model.task == simulated.model.task and simulated.model.task.name == task
    (theirs, _), (ours, _) = after(simulated, 1), after(mailed.simulator, 1)
    rtol = {"segmentation": 1e-4, "regression": 1e-5}.get(task)  # XLA may add in another order
    same = functools.partial(tree_close, rtol=rtol, atol=rtol / 10) if rtol else tree_equal
    same(ours.server, theirs.server)
    same(mailed.simulator.test(ours), simulated.test(theirs))
    personal, expected = mailed.simulator.personal(ours), simulated.personal(theirs)
    for name in ("metrics", "validation", "count", "loss"):
        same(getattr(personal, name), getattr(expected, name))


@pytest.mark.slow
def test_compressed_messages_are_small_on_the_wire(tmp_path):
    """One bit per weight in place of 32: bytes of the clients' answers, and the simulator's bits."""
    sizes = {}
    for name, flags in {"plain": [], "signs": ["--compress=sign", "--error_feedback=ef"]}.items():
        one = Real(tmp_path / name, ["--strategy=fedmr", "--model=logistic", *flags])
        mailed = one.mailed()
        progress, reports = after(mailed.simulator, 1)
        sizes[name] = sum(each.nbytes for each in jax.tree.leaves(one.uploads))
        assert sizes[name] == reports[-1].traffic.num_bytes()[1]
    tree_equal(progress.server, after(one.simulated(), 1)[0].server)
    assert sizes["signs"] < sizes["plain"] / 25


def test_noise_is_drawn_from_a_secret_of_the_client_and_the_whole_request(tmp_path):
    """Otherwise the server could compute it, or subtract the uploads for two payloads and be rid of it."""
    messages = []
    flags = ["--strategy=fedmr", "--dp_clip=0.001", "--dp_noise=5"]
    one = Real(tmp_path, flags, faults=lambda message, before: messages.append(message))
    after(one.mailed().simulator, 1)
    request = next(each for each in messages if each.kind == "train")
    answer = one.node(request.node - 100)

    def noise(request):
        upload = answer(request)["upload"]
        return np.concatenate([(upload[name] - sent).ravel() for name, sent in request.content["payload"].items()])

    drawn = noise(request)
    assert abs(np.std(drawn) / 0.005 - 1) < 0.05
    np.testing.assert_array_equal(noise(request), drawn)
    doubled = {name: 2 * sent for name, sent in request.content["payload"].items()}
    other = noise(dataclasses.replace(request, content={**request.content, "payload": doubled}))
    (secret,) = tmp_path.glob(f"state-{request.node - 100}/**/secret.npz")
    assert secret.stat().st_mode & 0o077 == 0
    secret.unlink()
    for independent in (other, noise(request)):
        assert abs(np.corrcoef(drawn, independent)[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dp_noise_on": "mean"}, "the server sees every upload of real clients"),
        ({"dp_target_epsilon": 2.0}, "real clients need to know their noise"),
    ],
)
def test_privacy_that_real_clients_cannot_have_is_refused(flags, words):
    with pytest.raises(UserError, match=words):
        server.check_deployable(Config(strategy="fedmr", clients=3, cohort=3, dp_clip=1.0, **flags))


@pytest.mark.parametrize("name", sorted(name for name, row in STRATEGIES.items() if row.only_simulated))
def test_what_is_only_simulated_is_refused_by_its_reason(name):
    reason = re.escape(STRATEGIES[name].only_simulated)
    with pytest.raises(UserError, match=f"{name} cannot run on real clients: .*{reason}"):
        server.check_deployable(Config(strategy=name, clients=3, cohort=3))


def test_a_client_with_a_memory_is_not_drawn_twice(tmp_path):
    """Two tasks of one round would read and write the one memory that a real client has: nobody is asked."""
    asked = []
    flags = ["--strategy=scaffold", "--model=logistic"]
    one = Real(tmp_path, flags, faults=lambda message, before: asked.append(message.kind))
    mailed = one.mailed()
    _, rows = mailed.simulator.rounds._call_begin(mailed.simulator.init())
    twice = rows._replace(client_id=np.array([3, 1, 3]), occurrence=np.array([0, 0, 1]))
    with pytest.raises(UserError, match="client 3 was drawn twice in a round, and a real client has one memory"):
        mailed._train_remotely(0, twice)
    assert "train" not in asked


# --- Lost clients -----------------------------------------------------------------------------------------------------


def with_upload(change):
    """A fault that corrupts a reply by a function of the upload's arrays."""
    return lambda content: {**content, "upload": change(dict(content["upload"]))}


def not_finite(upload):
    name = min(upload)
    return upload | {name: np.full_like(upload[name], np.nan)}


def other_shape(upload):
    name = min(upload)
    return upload | {name: upload[name][..., None]}


@pytest.mark.slow
def test_after_single_failures_the_weights_are_those_of_the_undisturbed_run(tmp_path, capsys):
    """A reply is lost, not finite, of another shape, without arrays, doubled; a client program dies after its work."""
    at = {
        (0, 0): "lose",
        (0, 1): with_upload(not_finite),
        (0, 2): "crash",
        (1, 0): with_upload(other_shape),
        (1, 1): "double",
        (1, 2): with_upload(lambda upload: {}),
    }
    asked = []

    def faults(message, before):
        if message.kind != "train" or (message.round, message.node) in asked:
            return None
        asked.append((message.round, message.node))
        return at[message.round, sum(round == message.round for round, _ in asked) - 1]

    flags = ["--strategy=scaffold"]
    undisturbed, _ = after(Real(tmp_path / "quiet", flags).mailed().simulator)
    disturbed, _ = after(Real(tmp_path / "loud", flags, faults=faults).mailed().simulator)
    tree_equal(disturbed, undisturbed)
    assert len(asked) == 6
    said = capsys.readouterr().err
    for words in ("no reply within", "numbers that are not finite", "expected float32", "lacks"):
        assert said.count(words) == 1, said


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in STRATEGIES.items() if not (row.only_simulated or row.adapters)])
def test_an_untrained_client_sends_back_what_it_got(name, tmp_path):
    """One client is lost in every round: its model counts as it was sent, with the size 0, and all stays finite."""
    first = []

    def faults(message, before):
        if message.kind == "train" and not first:
            first.append(message.node)
        return "lose" if message.kind == "train" and message.node in first else None

    one = Real(tmp_path, [f"--strategy={name}", "--cohort=4"], faults=faults, lost="untrained")
    try:
        mailed = one.mailed()
    except UserError as error:
        assert "--lost=untrained needs a strategy whose clients send back the model" in str(error)
        return
    _, rows = mailed.simulator.rounds._call_begin(mailed.simulator.init())
    row = jax.tree.map(lambda leaf: np.asarray(leaf)[0], rows)
    tree_equal(mailed._untrained(0, row)[0]["model"], row.payload["model"])
    progress, reports = after(mailed.simulator)
    assert [float(report.info["clients_lost"]) for report in reports] == [1, 1]
    for leaf in jax.tree.leaves(jax.device_get(progress.server)):
        assert leaf.dtype.kind != "f" or np.isfinite(leaf).all()


def test_a_lost_client_leaves_scaffolds_control_variate_the_mean_of_the_clients(tmp_path):
    """The lost client's own control variate stays zero, so the server's mean must count it as zero."""
    lost = lambda message, before: "lose" if message.kind == "train" and message.node == 100 else None
    one = Real(tmp_path, ["--strategy=scaffold", "--cohort=4", "--model=logistic"], faults=lost, lost="untrained")
    progress, _ = after(one.mailed().simulator, 3)
    for name, control in wire.pack(jax.device_get(progress.server.control)).items():
        newest = [max(folder.rglob("memory-*.npz"), key=lambda path: path.stem) for folder in tmp_path.glob("state-*")
                  if list(folder.rglob("memory-*.npz"))]  # fmt: skip
        assert len(newest) == N - 1
        np.testing.assert_allclose(control, sum(np.load(path)[name] for path in newest) / N, atol=1e-6)


# --- Asynchronous clients: the simulation of the seconds that their jobs took

LATE = ["--mode=async", "--validation_share=0", "--client_test_share=0", "--local_epochs=1", "--staleness=constant"]
SECONDS = (1.0, 2.0, 50.0, 3.0)  # of each client


def asynchronous(one, folder, done):
    """Asynchronous clients with a new server, which continues a run folder."""
    manager = ClientManager(one.manager._messenger, one.manager.manifest, num_clients=N, policy=one.manager.policy)
    ours = AsynchronousClients(
        one.config, protocol.remote_data(manager.wait_for_all(), one.samples), one.model, manager
    )
    ours.resume(folder, done)
    return ours


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
def test_a_slow_client_does_not_hold_the_others(strategy, tmp_path):
    """The run is, bit for bit, the simulation with the seconds that its jobs took; also after the server was killed."""
    (tmp_path / "run").mkdir()
    late = lambda message, before: SECONDS[message.node - 100] if message.kind == "train" else None
    flags = [*LATE, "--cohort=2", "--in_flight=4", "--rounds=4", f"--strategy={strategy}"]
    one = Real(tmp_path, flags, faults=late, seconds=600.0)
    first = asynchronous(one, tmp_path / "run", 0)
    progress, _ = after(first.simulator, 2)
    again = asynchronous(one, tmp_path / "run", 2)
    progress = again.simulator.rounds.place(jax.device_get(progress))
    for _ in range(2):
        progress, report = again.simulator.run(progress)
    assert again.manager.now() < 50 and report.info["staleness_max"] >= 1
    seconds = json.loads((tmp_path / "run" / ARRIVALS).read_text())["seconds"]
    durations = lambda job, client: seconds.get(str(job), np.inf)
    events = simulated_time.events_of(one.config, one.federated, one.model, duration=durations)
    assert not np.isin(events.jobs["client"][events.jobs["used"] > 0], 2).any()
    simulated = build.simulator_of(one.config, one.federated, one.model, events=events)
    tree_equal(progress.server.inner, after(simulated, 4)[0].server.inner)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[]", "it is a list, not an object"),
        ("{}", "seconds is missing"),
        ('{"seconds": {"x": 1}}', "a name in seconds is 'x', not a whole number"),
        ('{"seconds": {"0": NaN}}', "seconds.0 is nan, not a finite number"),
        ('{"seconds": {"0": 1' + 400 * "0" + "}}", "not a finite number"),
        ('{"seconds": {"0": [1]}}', "seconds.0 is a list"),
        ('{"seconds": {"0": -1}}', "job 0 has -1 seconds"),
        ('{"seconds": {"-1": 1}}', "job -1 has 1 seconds"),
        (None, "is missing"),
    ],
)
def test_a_damaged_record_of_arrivals_is_one_line(content, part, tmp_path):
    if content is not None:
        (tmp_path / ARRIVALS).write_text(content)
    with pytest.raises(UserError) as caught:
        read_seconds(tmp_path / ARRIVALS)
    assert part in str(caught.value) and str(caught.value).endswith(": start anew")


def test_a_record_that_lacks_jobs_of_the_past_versions_is_one_line(tmp_path):
    """Its times would be infinite."""
    clients = AsynchronousClients.__new__(AsynchronousClients)
    (tmp_path / ARRIVALS).write_text('{"seconds": {"0": 1, "1": 2}}')
    clients._events = lambda versions: simulate(
        versions, num_clients=6, in_flight=4, cohort=2, refill="update",
        choose=lambda draw, excluded, count, history: np.flatnonzero(~excluded)[:count],
        duration=lambda job, client: clients._seconds.get(job, np.inf),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"arrivals.json is damaged \(it lacks jobs of the first 2 versions\)"):
        clients.resume(tmp_path, 2)


def test_bad_settings_have_one_line(tmp_path):
    flags = ["--mode=async", "--strategy=fedavg", "--cohort=2", "--in_flight=4", "--model=logistic"]
    one = Real(tmp_path, flags)
    server.check_deployable(one.config)
    with pytest.raises(UserError, match="busy clients cannot test"):
        AsynchronousClients(
            one.config, protocol.remote_data(one.manager.wait_for_all(), one.samples), one.model, one.manager
        )
    for flag, words in (("--refill=arrival", "remove --refill"), ("--fleet=classes", "remove --fleet")):
        with pytest.raises(UserError, match=words):
            server.check_deployable(Real(tmp_path / words, ["--mode=async", "--strategy=fedavg", flag]).config)
