"""The accuracy of each client is a count over its own test samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.analysis import clients, runs
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.engine.simulator import normalised


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
