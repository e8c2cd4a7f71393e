"""The federation of some clients is as if the others had never existed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import trees
from fedjax_mr.engine.round import start
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.engine.trials import OneTrial, of_coalition
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.parts import averaging, select_uniformly
from fedjax_mr.testing import federations
from fedjax_mr.whatif import train
from fedjax_mr.whatif.__main__ import main
from fedjax_mr.whatif.vacant import takes_vacant_slots

ROUNDS = 2
REFUSED = {
    "adaptivefl": "selects its clients itself",
    "centralized": "selects its clients itself",
    "clusamp": "selects its clients itself",
    "dpsgd": "about every client on the server",
    "fedsa": "about every client on the server",
    "gossipmr": "about every client on the server",
    "hierfavg": "belong to other edges",
    "kgt": "about every client on the server",
    "local": "deploys no model",
}
QUICK = ("fedmr", *REFUSED)  # of FedAvg, all other tests are
TRIED = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name, row in STRATEGIES.items()
    if not callable(row.needs_public) and not row.needs_public and not row.adapters
]


def divided(*clients, rows=None):
    """A federation of some clients of the small one, made without the others."""
    whole = dataclasses.replace(federations.federated(), public=None)
    return dataclasses.replace(whole, train=whole.train.of_clients(np.array(clients)))


EVERYONE = range(len(federations.SIZES))


def simulator(strategy, *clients, cohort=6, federated=None, **setting):
    row = STRATEGIES[strategy]
    hyper = federations.default_hyper(strategy)
    return federations.SharingSimulator(
        row.build if row.hyper else strategy,
        federations.network_of("linear"),
        federated or divided(*clients or EVERYONE),
        cohort=cohort,
        local=fmr.local.setting(**{"lr": 0.05, "batch_size": 4, "epochs": 2} | setting),
        hyper=hyper,
        layout=fmr.Layout(devices=1),
    )


def trained(rounds):
    state, report = rounds.run(rounds.init(), ROUNDS)
    return rounds.deployed(state), int(report.steps), float(report.train_loss)  # a vacant slot trains no step


@functools.cache
def takes(strategy):
    return takes_vacant_slots(simulator(strategy).rounds.constants)


def coalition(strategy, of, clients):
    constants = of_coalition(of.rounds.constants, clients, vacant=takes(strategy))
    return Rounds(constants, of.axis, trial=OneTrial(of.axis, code=of.code))


@pytest.mark.parametrize("strategy", TRIED)
def test_a_coalition_is_a_federation_without_the_others(strategy, close):
    """The first clients have the same numbers, and so the same keys, in a federation that never had the others."""
    whole = simulator(strategy)
    reason = train.refusal(whole)
    if reason:
        assert REFUSED.get(strategy, "deploys no model") in reason
        return
    assert strategy not in REFUSED
    close(trained(coalition(strategy, whole, [0, 1, 2])), trained(simulator(strategy, 0, 1, 2, cohort=3).rounds))


def test_which_servers_take_vacant_slots():
    assert [takes(strategy) for strategy in ("fedavg", "fedmr", "scaffold")] == [True, False, True]


@pytest.mark.parametrize("since", [0, 1, 1000])
def test_a_server_that_counts_slots_takes_no_vacant_ones(since):
    """Also one that counts them only in later rounds."""

    def build(hyper, problem):
        average = averaging(problem)

        def server_update(state, uploads, cohort, round, key):
            new, info = average.server_update(state, uploads, cohort, round, key)
            factor = jnp.where(round >= since, len(cohort.ids), 1).astype(jnp.float32)
            return new._replace(model={"params": trees.scale(new.model["params"], factor)}), info

        return average._replace(server_update=server_update)

    one = federations.SharingSimulator(build, federations.network_of("linear"), divided(*EVERYONE), cohort=6)
    assert not takes_vacant_slots(one.rounds.constants)


@pytest.mark.parametrize("strategy", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_cohorts_are_drawn_from_those_present(strategy, close):
    whole = simulator(strategy, cohort=2)
    close(trained(coalition(strategy, whole, [0, 1, 2])), trained(simulator(strategy, 0, 1, 2, cohort=2).rounds))


def test_what_absent_clients_have_does_not_matter(equal):
    whole = divided(*EVERYONE)
    absent = np.concatenate([whole.train.rows(client) for client in (1, 3, 4)])
    x = whole.dataset.x.copy()
    x[absent] = 1e30
    spoiled = dataclasses.replace(whole, dataset=dataclasses.replace(whole.dataset, x=x))
    for cohort in (6, 2):
        one, other = (simulator("fedavg", cohort=cohort, federated=each) for each in (whole, spoiled))
        equal(*(trained(coalition("fedavg", each, [0, 2, 5])) for each in (one, other)))


def test_an_absent_client_changes_as_little_of_the_cohorts_as_possible():
    """The others come in the same order, so that differences are the client's alone."""
    constants, present = simulator("fedavg", cohort=3).rounds.constants, (0, 7, 8, 21, 33)
    many = {"num_clients": 40, "sizes": np.full(40, 9, np.int32), "label_counts": np.full((40, 3), 3, np.int32)}
    constants = constants._replace(problem=dataclasses.replace(constants.problem, **many))
    everyone = dataclasses.replace(constants.problem, cohort_size=40, sizes=jax.numpy.asarray(many["sizes"]))
    problems = everyone, of_coalition(constants, present).problem
    select = jax.jit(lambda seed: [select_uniformly(problem, jax.random.key(seed)) for problem in problems])
    for seed in range(20):
        every, some = jax.device_get(select(seed))
        assert some.ids.tolist() == [client for client in every.ids.tolist() if client in present][:3]
        assert (some.sizes == 9).all()


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """All coalitions of six clients, of which the last two have equal samples that are trained in one batch."""
    rows = [divided(*EVERYONE).train.rows(client) for client in EVERYONE]
    federated = dataclasses.replace(divided(*EVERYONE), train=fmr.data.Split.of([*rows[:4], rows[1], rows[1]]))
    equal = simulator("fedavg", federated=federated, batch_size=16)
    folder = tmp_path_factory.mktemp("whatif")
    return equal, folder, fmr.what_if(equal, rounds=ROUNDS, seeds=(0, 1), folder=folder, block=7)


def test_each_value_is_that_of_a_run(table):
    simulator, _, result = table
    for clients in ((), (0, 2, 5), (0, 1, 2, 3, 4, 5)):
        for seed, found in zip(result.seeds, result.value(clients, "loss"), strict=True):
            constants = simulator.rounds.constants._replace(key=fmr.keys.random_key(seed))
            if clients:
                rounds = Rounds(of_coalition(constants, clients), simulator.axis)
                model = trained(rounds)[0]
            else:
                model = start(constants).server.model
            assert found == pytest.approx(simulator.evaluation.one(model).loss, rel=1e-5)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_contributions_are_efficient_and_symmetric(table, metric):
    _, _, result = table
    found = result.contributions(metric)
    sign = -1 if metric == "loss" else 1
    gain = sign * (result.value(EVERYONE, metric) - result.value((), metric))
    assert (gain > 0).all()
    for rule in ("shapley", "orders", "truncated"):
        np.testing.assert_allclose(
            found[rule].sum(axis=1), gain, atol=0 if rule != "truncated" else 0.05 * abs(gain).max(), rtol=1e-9
        )
    for rule in ("shapley", "banzhaf", "leave_one_out", "alone"):
        for client in (1, 4):  # clients 1, 4 and 5 have the same samples
            np.testing.assert_allclose(found[rule][:, client], found[rule][:, 5], atol=1e-5)
    assert abs(found["shapley"][:, 0] - found["shapley"][:, 5]).max() > 1e-3


def test_a_killed_call_continues_after_its_last_block(table, tmp_path, monkeypatch):
    simulator, _, whole = table
    blocks, one_block = [], train._train_block

    def killed(*arguments, **options):
        blocks.append(arguments[2])
        if len(blocks) == 2:
            raise KeyboardInterrupt
        return one_block(*arguments, **options)

    options = {"coalitions": "leave_one_out", "rounds": ROUNDS, "seeds": (0, 1), "folder": tmp_path, "block": 7}
    monkeypatch.setattr(train, "_train_block", killed)
    with pytest.raises(KeyboardInterrupt):
        fmr.what_if(simulator, **options)
    result = fmr.what_if(simulator, **options)
    assert [len(block) for block in blocks] == [7, 7, 7]  # 2 x 7 coalitions of at least one client
    for coalition in result.coalitions:
        np.testing.assert_allclose(result.value(coalition, "loss"), whole.value(coalition, "loss"), rtol=1e-5)
    fmr.what_if(simulator, **options)
    assert len(blocks) == 3
    with pytest.raises(UserError, match=r"another federation \(rounds was 2 and is 3\)"):
        fmr.what_if(simulator, **options | {"rounds": 3})
    lines = (tmp_path / "coalitions.csv").read_text().splitlines()
    assert lines[0].startswith("seed,clients,coalition,accuracy") and len(lines) == 1 + 2 * 8
    assert (
        (tmp_path / "contributions.csv")
        .read_text()
        .startswith("client,name,samples,metric,rule,mean,std,seeds\n0,0,7,")
    )
    assert (tmp_path / "contributions.png").stat().st_size > 1000


def test_a_method_that_needs_two_clients_says_so_before_it_trains(monkeypatch):
    monkeypatch.setattr(train, "_train_block", None)
    with pytest.raises(
        UserError, match="a federation of 1 client cannot train: fedcross mixes each model with another"
    ):
        fmr.what_if(simulator("fedcross"), rounds=1)


def test_a_federation_that_diverges_is_named():
    with pytest.raises(DivergedError, match="the federation of clients 0 1 2 3 4 5 diverged with seed 0"):
        fmr.what_if(simulator("fedavg", lr=1e38), coalitions=[], rounds=1)


def test_bad_input(tmp_path, capsys):
    whole = simulator("fedavg")
    for options, message in (
        ({}, "rounds=None must be"),
        ({"rounds": 1, "coalitions": [{9}]}, "a coalition has client 9, but the clients are 0..5"),
        ({"rounds": 1, "coalitions": "some"}, "coalitions=some is none of"),
        ({"rounds": 1, "metric": "acuracy"}, "did you mean 'accuracy'"),
    ):
        with pytest.raises(UserError, match=message):
            fmr.what_if(whole, **options)
    with pytest.raises(UserError, match="2\\^17 federations"):
        train.sets_of("all", 17, np.zeros((0, 17), int))
    digits = [
        "--dataset=digits",
        "--clients=4",
        "--cohort=4",
        "--rounds=1",
        "--model=logistic",
        f"--whatif_dir={tmp_path}",
    ]
    for flags, message in (
        (["--strategy=local"], "deploys no model"),
        (["--mode=async", "--cohort=1"], "leave out the flags of simulated time"),
        (["--run_dir=x"], "remove --run_dir"),
        (["--dp_clip=1", "--dp_noise=1"], "differential privacy"),
    ):
        assert main([*digits, *flags]) == 2
        assert message in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "--whatif_dir" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    flags = ["--dataset=digits", "--clients=3", "--cohort=2", "--rounds=2", "--model=logistic", "--strategy=fedavg"]
    assert main([*flags, "--seeds=0:2", "--approximations", f"--whatif_dir={tmp_path}"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[1].split()[:3] == ["client", "samples", "shapley"]
    assert output.out.count("rank correlation with shapley") == 2 and " fedsv " in output.out
    assert "16 of 16 federations trained" in output.err and "2 of 2 runs observed" in output.err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        "approximations.png", "coalitions.csv", "coalitions.png", "contributions.csv", "contributions.png",
        "uploads.csv", "whatif.json",
    ]  # fmt: skip
    result = fmr.run(
        fmr.Config(
            dataset="digits",
            clients=3,
            cohort=2,
            rounds=2,
            model="logistic",
            strategy="fedavg",
            run_dir=str(tmp_path / "run"),
        )
    )
    last = (tmp_path / "coalitions.csv").read_text().splitlines()[8].split(",")
    assert last[:3] == ["0", "3", "0 1 2"]
    assert float(last[3]) == pytest.approx(result.summary["accuracy_last"], abs=0.003)
