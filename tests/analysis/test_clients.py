"""The accuracy of each client is a count over its own test samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.analysis import clients, runs
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.engine.simulator import normalised
from fedjax_mr.errors import UserError


def test_accuracy_of_each_client(finished):
    (run,) = runs.read([str(finished("fedmr"))])
    trained = runs.restore(run)
    found = clients.per_client(run, trained)
    own = trained.federated.client_test
    assert found.shape == (6,)
    test, logits_of = normalised(trained.federated.dataset, own.x, own.y), jax.jit(trained.model.apply)
    for client, accuracy in enumerate(found):
        rows = own.split.rows(client)
        x = own.x[rows].astype(np.float32) * test.scale + test.shift
        logits = np.asarray(logits_of(trained.deployed, jnp.asarray(x)))
        assert accuracy == pytest.approx(np.mean(logits.argmax(axis=-1) == own.y[rows]))


def test_the_worst_tenth():
    assert clients.worst_tenth(np.linspace(1.0, 0.0, 21)) == pytest.approx((0.0 + 0.05 + 0.10) / 3)
    assert clients.worst_tenth(np.array([0.4, 0.2])) == 0.2


def test_the_command_prints_a_line_per_run(finished, capsys, tmp_path):
    assert main(["clients", str(finished("fedmr")), str(finished("fedavg")), f"--out={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["fedmr", "6"], ["fedavg", "6"]]
    assert (tmp_path / "clients.png").stat().st_size > 10_000


@pytest.mark.slow
def test_domains_have_a_table_of_their_own(tmp_path, capsys):
    """Also for personal models; two domains of four clients."""
    random = np.random.default_rng(0)
    x, domain = random.normal(size=(240, 2)), np.repeat(["warm", "cold"], 120)
    y = (x[:, 0] > 0).astype(int) ^ (domain == "cold")  # a single linear model is right in one domain only
    parts = {"x": x[::2], "y": y[::2], "domain": domain[::2]}
    test = {"x_test": x[1::2], "y_test": y[1::2], "domain_test": domain[1::2]}
    np.savez(tmp_path / "samples.npz", **parts, **test)
    folders = []
    for strategy in ("fedavg", "local"):
        config = fmr.Config(
            strategy=strategy, run_dir=str(tmp_path / strategy), dataset=str(tmp_path / "samples.npz"),
            model="logistic", partition="domain", alpha=100.0, clients=8, cohort=8, rounds=20, eval_every=20, lr=0.5,
            local_epochs=1, batch_size=5, devices=1, progress=False,
        )  # fmt: skip
        folders.append(str(fmr.run(config).folder))
    assert main(["clients", *folders, f"--out={tmp_path}"]) == 0
    head, fedavg, local = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert head.split() == ["run", "cold", "warm", "mean", "worst"]
    assert all(float(number) > 0.9 for number in local.split()[-4:])
    cold, warm, mean, worst = map(float, fedavg.split()[-4:])
    assert worst == min(cold, warm) < 0.7 and mean == pytest.approx((cold + warm) / 2, abs=1e-4)
    (tmp_path / "local" / "clients.csv").unlink()
    with pytest.raises(UserError, match=r"local has no results per client .clients\.csv"):
        (run,) = runs.read(folders[1:])
        clients.per_client(run, runs.restore(run))
