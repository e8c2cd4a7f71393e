"""Curves and their bands are the numbers of the run folders."""

import dataclasses
import json

import pytest
from matplotlib.figure import Figure

from fedjax_mr.analysis import groups, learning, runs
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.strategies import fedmr


@pytest.fixture
def root(tmp_path):
    """Two seeds of FedMR and one of FedAvg at each of two alphas; seed 1 has one evaluation less."""
    seeds = (("fedmr", 0, (0.1, 0.2, 0.6)), ("fedmr", 1, (0.3, 0.2)), ("fedavg", 0, (0.5, None, 0.7)))
    for alpha in (0.1, 0.5):
        for strategy, seed, values in seeds:
            config = Config(strategy=strategy, alpha=alpha, seed=seed)
            folder = tmp_path / configuration.digest(config)
            folder.mkdir()
            configuration.save(config, folder)
            shown = ["null" if value is None else value * (0.9 + alpha) for value in values]
            lines = (f'{{"round": {5 * i}, "accuracy": {value}}}\n' for i, value in enumerate(shown, 1))
            (folder / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


def test_mean_and_deviation_at_the_rounds_of_all_seeds(root):
    panels, methods, *_ = learning.curves(groups.find([root]), column="accuracy", panels="alpha")
    assert set(panels) == {"Dirichlet(0.1)", "Dirichlet(0.5)"}
    assert methods == {"FedMR (n = 2)": "fedmr", "FedAvg (n = 1)": "fedavg"}
    rounds, means, deviations = panels["Dirichlet(0.1)"]["FedMR (n = 2)"]
    assert rounds == [5, 10]
    assert means == pytest.approx([0.2, 0.2])
    assert deviations == pytest.approx([0.02**0.5, 0.0], abs=1e-9)
    rounds, means = panels["Dirichlet(0.5)"]["FedAvg (n = 1)"]
    assert (rounds, means) == ([5, 10, 15], pytest.approx([0.7, float("nan"), 0.98], nan_ok=True))


def test_several_columns_are_lines_of_the_runs_that_have_them(root):
    """As in KDD'24, Figure 5: single models beside their mean, and FedAvg, which has none."""
    for run in groups.find([root]):
        if run.config.strategy == "fedmr":
            path = run.path / "metrics.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps(row | {"model_3_accuracy": row["accuracy"] / 2}) + "\n" for row in rows))
    panels, methods, *_ = learning.curves(groups.find([root]), column="accuracy,model_3_accuracy", panels="alpha")
    single = "FedMR, model 3 accuracy (n = 2)"
    assert set(panels["Dirichlet(0.1)"]) == {"FedMR (n = 2)", single, "FedAvg (n = 1)"} and methods[single] == "fedmr"
    assert panels["Dirichlet(0.1)"][single][1] == pytest.approx([0.1, 0.1])


def test_over_simulated_time_and_bytes(root, tmp_path, capsys):
    """x is averaged over the seeds as the values are, in units of which there are enough."""
    for run in groups.find([root]):
        rows = [
            {"round": at, "accuracy": at / 100, "bytes_down": 10**6 * at, "bytes_up": 10**6 * at, "bytes_peer": 1}
            | ({} if run.config.strategy == "fedavg" else {"clock": 3600.0 * at * (1 + run.config.seed)})
            for at in (5, 10)
        ]
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = [run for run in groups.find([root]) if run.config.strategy == "fedmr"]
    drawn = learning.curves(ours, column="accuracy", panels="alpha", x="clock")
    hours, means, _ = drawn.panels["Dirichlet(0.1)"]["FedMR (n = 2)"]
    assert (hours, means) == ([7.5, 15.0], [0.05, 0.1]) and drawn.x_label == "simulated hours"
    drawn = learning.curves(ours, column="accuracy", panels="alpha", x="bytes")
    assert drawn.panels["Dirichlet(0.1)"]["FedMR (n = 2)"][0] == pytest.approx([10.000001, 20.000001])
    assert drawn.x_label == "sent (MB)"
    assert main(["curves", str(root), "--x=clock", f"--out={tmp_path / 'none'}"]) == 2
    assert "has no simulated time: train it with --fleet, or use --x=rounds" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_without_panels_the_settings_name_the_curves(root):
    (series,) = learning.curves(groups.find([root]), column="accuracy")[0].values()
    assert set(series) == {
        f"{name}, Dirichlet({alpha}) (n = {count})" for name, count in (("FedAvg", 1), ("FedMR", 2))
        for alpha in (0.1, 0.5)
    }  # fmt: skip


def test_a_seed_that_diverged_is_marked_and_is_not_part_of_the_mean(root, tmp_path, monkeypatch):
    """As in the table: the mean is that of the seeds that did not diverge."""
    for run in groups.find([root]):
        if (run.config.strategy, run.config.seed, run.config.alpha) == ("fedmr", 1, 0.1):
            (run.path / "diverged.txt").write_text("diverged\n")
        if run.config.strategy == "fedavg":
            (run.path / "diverged.txt").write_text("diverged\n")
    drawn = learning.curves(groups.find([root]), column="accuracy", panels="alpha")
    mr, avg = f"FedMR (n = 1 to 2; {learning.CROSS} 1 diverged)", f"FedAvg ({learning.CROSS} 2 diverged)"
    assert drawn.panels["Dirichlet(0.1)"][mr] == ([5, 10, 15], pytest.approx([0.1, 0.2, 0.6]))
    assert drawn.panels["Dirichlet(0.1)"][avg][0] == [5, 10, 15]  # all seeds: what there is
    assert drawn.crosses["Dirichlet(0.1)"] == {mr: ([10], [0.2]), avg: ([15], [pytest.approx(0.7)])}
    assert drawn.crosses["Dirichlet(0.5)"][mr] == ([], [])
    (root / "early").mkdir()  # diverged before its first evaluation
    configuration.save(Config(strategy="fedmr", alpha=0.1, seed=2), root / "early")
    (root / "early" / "diverged.txt").write_text("diverged\n")
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (seen.append(figure), path.touch()))
    assert main(["curves", str(root), "--panels=alpha", f"--out={tmp_path}"]) == 0
    crosses = [line for line in seen[0].axes[0].get_lines() if line.get_marker() == "x"]
    assert sorted(map(tuple, (line.get_xydata().ravel() for line in crosses))) == [(10, 0.2), (15, pytest.approx(0.7))]
    assert f"FedMR (n = 1 to 2; {learning.CROSS} 2 diverged)" in [
        text.get_text() for text in seen[0].legends[0].get_texts()
    ]


def test_bands_end_at_what_an_accuracy_can_be(root, tmp_path, monkeypatch):
    for run in groups.find([root]):
        seed = run.config.seed
        (run.path / "metrics.jsonl").write_text(f'{{"round": 5, "accuracy": {0.99 - 0.3 * seed}}}\n')
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (seen.append(figure), path.touch()))
    assert main(["curves", str(root), "--panels=alpha", f"--out={tmp_path}"]) == 0
    (band,) = seen[0].axes[0].collections
    assert band.get_paths()[0].get_extents().y1 == 1.0 < 0.84 + 0.3 / 2**0.5
    assert seen[0].axes[0].get_ylim()[1] < 1.05


def test_a_setting_of_a_strategy_divides_only_its_own_runs(root):
    config = Config(strategy="fedmr", alpha=0.1, hyper=fedmr.Hyper(unit="layer"))
    folder = root / "layer"
    folder.mkdir()
    configuration.save(dataclasses.replace(config, seed=0), folder)
    (folder / "metrics.jsonl").write_text('{"round": 5, "accuracy": 0.25}\n')
    (series,) = learning.curves(groups.find([root]), column="accuracy")[0].values()
    assert series["FedMR, Dirichlet(0.1), unit = layer (n = 1)"] == ([5], [0.25])


def test_a_division_is_a_panel(root):
    for alpha in (0.1, 0.5):  # which IID runs do not have
        config = Config(strategy="fedavg", partition="iid", alpha=alpha)
        folder = root / f"iid{alpha}"
        folder.mkdir()
        configuration.save(config, folder)
        (folder / "metrics.jsonl").write_text('{"round": 5, "accuracy": 0.25}\n')
    panels, *_ = learning.curves(groups.find([root]), column="accuracy", panels="partition,alpha")
    assert list(panels) == ["Dirichlet(0.1)", "Dirichlet(0.5)", "IID"]
    assert panels["IID"] == {"FedAvg (n = 1)": ([5], [0.25])}  # one setting and seed twice counts once


def test_the_command_draws(root, tmp_path, capsys):
    assert main(["curves", str(root), "--panels=alpha", f"--out={tmp_path / 'pictures'}"]) == 0
    assert (tmp_path / "pictures" / "accuracy.png").stat().st_size > 10_000
    assert "accuracy.png" in capsys.readouterr().out


def test_a_picture_of_many_runs_goes_beside_them(root, capsys):
    assert main(["curves", str(root), "--format=svg"]) == 0
    text = (root / "analysis" / "accuracy.svg").read_text()
    assert text.startswith("<?xml") and capsys.readouterr().out == f"drawn in {root / 'analysis' / 'accuracy.svg'}\n"
    (run,) = groups.find([next(root.glob("*/config.json")).parent])
    with runs.output_folder(None, [run]) as folder:
        assert folder == run.path / "analysis"
    assert list((root / "analysis").iterdir()) == [root / "analysis" / "accuracy.svg"]


def test_without_a_folder_of_the_runs_it_goes_where_runs_go(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    one, two, *_ = sorted(path.name for path in root.iterdir())
    (root / "runs").mkdir()
    (root / one).rename(root / "runs" / one)
    for places, folder in (
        ((f"runs/{one}", two), "runs/analysis"),
        ((f"{root}/runs/{one}", f"{root}/{two}"), "runs/analysis"),
        ((two,), f"{two}/analysis"),
        ((f"runs/{one}", two, "--out=mine"), "mine"),
    ):
        assert main(["curves", *places, "--format=svg"]) == 0
        assert capsys.readouterr().out == f"drawn in {folder}/accuracy.svg\n"
        assert (root / folder / "accuracy.svg").exists()
    assert not (root / "analysis").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--column=acc"], "has no column acc"),
        (["--panels=alhpa"], "did you mean 'alpha'?"),
        (["--panels=seed"], "'seed'"),
        (["--format=gif"], "invalid choice: 'gif'"),
    ],
)
def test_bad_input(root, arguments, part, capsys):
    assert main(["curves", str(root), *arguments]) == 2
    shown = capsys.readouterr().err
    assert part in shown and shown.count("\n") == 1
    assert not (root / "analysis").exists()
