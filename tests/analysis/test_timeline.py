"""The timeline of a run, computed from its configuration."""

import dataclasses

import numpy as np
import pytest
from matplotlib.figure import Figure

import fedjax_mr as fmr
from fedjax_mr.analysis import timeline
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.config import config as configuration
from fedjax_mr.experiment.build import build_model
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.simulated_time import devices_of, events_of

CONFIG = fmr.Config(strategy="fedavg", model="logistic", clients=12, cohort=3, rounds=6, fleet="classes")
LATE = {"deadline": 400.0, "over_select": 1.5, "late": "partial"}
ASYNC = {"mode": "async", "in_flight": 6, "refill": "arrival"}


@pytest.mark.parametrize("changes", [{}, LATE, ASYNC], ids=["synchronous", "late", "asynchronous"])
def test_jobs_are_those_of_the_events(changes):
    config = dataclasses.replace(CONFIG, **changes)
    federated = federated_data(config)
    model = build_model(config, federated.dataset)
    events = events_of(config, federated, model)
    devices, _ = devices_of(config, federated, model)
    jobs, order = timeline.jobs_of(events, devices)
    assert sorted(order) == list(range(12))
    np.testing.assert_array_equal(order[jobs.row], events.jobs["client"])
    np.testing.assert_array_equal(jobs.end[jobs.used], events.jobs["arrival"][jobs.used])
    for earlier, later in ((jobs.start, jobs.train), (jobs.train, jobs.trained), (jobs.trained, jobs.end)):
        assert np.all((later >= earlier - 1e-9)[jobs.used])
    if not changes:  # nothing is cut short
        whole = devices.seconds(events.jobs["client"], devices.draws(np.arange(len(events.jobs))))
        np.testing.assert_allclose(jobs.trained - jobs.train, whole.compute)
    assert jobs.dropped.any() == (changes == LATE) and (jobs.staleness.max() > 0) == (changes == ASYNC)
    if changes == LATE:  # the round has ended
        np.testing.assert_array_less(jobs.end[jobs.dropped], events.times[events.jobs["version"]][jobs.dropped] + 1e-9)


def test_the_command(tmp_path, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (seen.append(figure), path.touch()))
    for name, changes in {"late": LATE, "async": ASYNC, "none": {"fleet": None}}.items():
        (tmp_path / name).mkdir()
        configuration.save(dataclasses.replace(CONFIG, **changes), tmp_path / name)
    assert main(["timeline", str(tmp_path / "late"), "--first=2", "--rounds=3"]) == 0
    assert main(["timeline", str(tmp_path / "async")]) == 0
    printed = capsys.readouterr().out
    assert "18 of 30 jobs made 6 versions" in printed and "staleness: mean" in printed
    (bars,), (jobs, histogram) = (figure.axes for figure in seen)
    assert "rounds 2 to 4 of 6" in bars.get_title() and "versions 1 to 6 of 6" in jobs.get_title()
    assert len(histogram.patches) > 1
    for arguments, words in (
        (["none"], "has no simulated time"),
        (["late", "--first=9"], "--first=9"),
        (["late", "--rounds=0"], "--rounds=0"),
    ):
        assert main(["timeline", str(tmp_path / arguments[0]), *arguments[1:], f"--out={tmp_path / 'out'}"]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
