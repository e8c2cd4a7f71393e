"""What pFedHR's server did, read from a run's checkpoints and drawn."""

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import plots
from fedjax_mr.analysis import reassembly
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.strategies.pfedhr.strategy import Account


def account():
    """Two clients, 3 and 7: two blocks and one; two candidates, and a client that was matched with none."""
    row = lambda *values: np.array(values, np.int32)
    return Account(
        clients=row(3, 7),
        owners=row(3, 3, 7),
        places=row(0, 1, 1),
        kinds=row(0, 1, 1),
        groups=row(1, 0, 0),
        similarity=np.eye(3, dtype=np.float32),
        chains=np.array([[0, 1, -1], [0, 2, -1]], np.int32),
        teachers=row(1, -1),
    )


def test_an_account_in_words():
    found = account()
    assert reassembly.blocks_of(found) == [(3, 0, False), (3, 1, True), (7, 1, True)]
    assert reassembly.strips_of(found) == [[(3, 0, False), (3, 1, True)], [(3, 0, False), (7, 1, True)]]
    assert reassembly.teachers_of(found) == {3: [(3, 0, False), (7, 1, True)]}


def test_pictures_of_nothing_can_be_drawn(tmp_path):
    plots.strips({"round 1": []}, tmp_path / "strips.png", num_colours=2)
    plots.teachers({1: {}}, 30, tmp_path / "teachers.png")
    assert (tmp_path / "strips.png").stat().st_size > 1000 and (tmp_path / "teachers.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "pfedhr"
    config = fmr.Config(
        strategy="pfedhr", run_dir=str(folder), clients=4, cohort=2, rounds=2, model="cnn_digits",
        public_share=0.1, public_max=40, local_epochs=1, devices=1, progress=False, eval_every=1, keep_checkpoints=5,
        hyper=fmr.strategies.pfedhr.Hyper(groups=2, max_candidates=2, server_epochs=1),
    )  # fmt: skip
    return fmr.run(config).folder


@pytest.mark.slow
def test_the_command_draws_and_tells(run, capsys):
    assert main(["reassembly", str(run), "--seconds"]) == 0
    printed = capsys.readouterr().out
    assert "candidates" in printed and "matching" in printed and "compiled programs" in printed
    for name in ("alike", "candidates", "teachers"):
        assert (run / "analysis" / f"{name}.png").stat().st_size > 5000


@pytest.fixture
def made_up(keep):
    """The folder of a run that never was, with two rounds of the account above."""
    folder = keep(fmr.Config(strategy="pfedhr", clients=8, cohort=2), [0.4, 0.5])
    (folder / "info").mkdir()
    for number in (1, 2):
        Checkpoints(folder / "checkpoints").save(number, {"nothing": np.zeros(1)}, {})
        np.savez(folder / "info" / f"{number}.npz", allow_pickle=False, **account()._asdict())
    return folder


def test_the_command_draws_what_a_run_kept(made_up, capsys):
    assert main(["reassembly", str(made_up)]) == 0
    title, *rows = (line.split() for line in capsys.readouterr().out.splitlines()[:3])
    assert "candidates" in title
    assert [row[:4] for row in rows] == [["1", "3,7", "3", "2"], ["2", "3,7", "3", "2"]]
    for name in ("alike", "candidates", "teachers"):
        assert (made_up / "analysis" / f"{name}.png").stat().st_size > 5000


def test_bad_input(made_up, keep, capsys):
    assert main(["reassembly", str(made_up), "--rounds=0"]) == 2
    assert main(["reassembly", str(keep(fmr.Config(strategy="fedavg"), [0.5]))]) == 2
    assert "name a run of pfedhr" in capsys.readouterr().err
