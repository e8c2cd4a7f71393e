"""The page of record says what the kept metrics say, and its verdicts follow their rules."""

import importlib
from pathlib import Path

import pytest

from fedjax_mr.analysis.paired import difference
from fedjax_mr.analysis.papers import Published
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import COLUMNS
from fedjax_mr.results import kept
from fedjax_mr.results.kept import KeptRun
from record import claims, comparisons, keep, tuning
from record.command import main

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_the_page_and_the_flag_files_are_those_of_the_kept_runs(capsys):
    assert main(["--check"]) == 0
    assert "are up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("own", "paper", "verdict"),
    [
        ([58.6], 59.8, "replicates"),
        ([58.2], 59.8, "lower"),
        ([61.4], 59.8, "higher"),
        ([55.0, 57.0, 59.0], 60.9, "replicates (spread)"),  # mean 57, deviation 2
        ([55.0, 57.0, 59.0], 61.1, "lower"),
        ([], 59.8, "not run"),
    ],
)
def test_verdict_beside_a_number(own, paper, verdict):
    published = Published("some", paper, None, "a table")
    assert comparisons.verdict(cell(own, published).own, published) == verdict


@pytest.mark.parametrize(
    ("own", "papers", "outcome"),
    [
        ([58.0], [59.0, 59.0], "replicates"),
        ([58.0], [59.0, 70.0], "replicates KDD'24"),
        ([58.0], [50.0, 59.0], "replicates v1"),
        ([55.0, 57.0, 59.0], [70.0, 60.9], "replicates v1 (spread)"),
        ([55.0, 57.0, 59.0], [57.0, 60.9], "replicates"),
        ([58.0], [60.0, 61.0], "lower"),
        ([58.0], [50.0], "higher"),
        ([58.0], [50.0, 60.0], "between"),
        ([58.0], [], ""),
        ([], [50.0, 60.0], "not run"),
    ],
)
def test_outcome_of_a_cell_beside_papers_that_disagree(own, papers, outcome):
    sources = ("FedMR KDD'24, Table 1", "FedMR v1, Table I")
    found = [Published("some", paper, None, source) for paper, source in zip(papers, sources, strict=False)]
    assert cell(own, *found).outcome == outcome


def cell(own, *published):
    by_seed = {str(seed): value for seed, value in enumerate(own)}
    return comparisons.Comparison("FedMR", "CIFAR-10", "IID", by_seed, [], list(published))


@pytest.mark.parametrize(
    ("differences", "better", "level"),
    [
        ([5.4], "one seed: +5.4", "one seed: +5.4"),
        ([0.2], "one seed: +0.2", "one seed: +0.2"),
        ([4.0, 5.0, 6.0], "holds (p = 0.013)", "not sure (p = 0.99)"),
        ([-4.0, -5.0, -6.0], "does not hold (p = 0.013)", "not sure (p = 0.99)"),
        ([-1.0, 3.0], "2 seeds: +1.0", "2 seeds: +1.0"),
        ([3.0, 3.0], "2 seeds: +3.0", "2 seeds: +3.0"),  # equal by chance, which a test would take for certainty
        ([0.1, -0.1, 0.0], "not sure (p = 1.00)", "holds (p < 0.001)"),
        ([0.0, 0.0, 0.0], "not sure (p = 1.00)", "holds (p < 0.001)"),
    ],
)
def test_verdicts(differences, better, level):
    own = {str(seed): value for seed, value in enumerate(differences)}
    found = difference(own, dict.fromkeys(own, 0.0))
    assert found is not None
    assert claims.verdicts([(found, False)]) == [better]
    assert claims.verdicts([(found, True)]) == [level]


def test_more_comparisons_make_a_verdict_harder():
    own, none = {"0": 4.0, "1": 5.0, "2": 6.0}, dict.fromkeys("012", 0.0)
    found, one = difference(own, none), difference({"0": 4.0}, none)
    assert found is not None and one is not None
    assert claims.verdicts([(found, False), (one, False)])[0] == "holds (p = 0.013)"
    assert claims.verdicts([(found, False)] * 4) == ["not sure (p = 0.052)"] * 4


def test_settings_of_claims_are_singled_out():
    first = claims.CLAIMS[0]
    runs = claims.runs_of([first], EXPERIMENTS / "results")
    assert set(claims.accuracies(first.better, runs, (5, 150))) == {"0"}
    several = claims.Chosen(first.better.table, {"strategy": "fedmr"})
    with pytest.raises(UserError, match="a second run of its seed"):
        claims.accuracies(several, runs, (5, 150))
    with pytest.raises(UserError, match="no evaluation"):
        claims.accuracies(first.better, runs, (500, 505))
    with pytest.raises(UserError, match="holds no run"):
        claims.accuracies(claims.Chosen(first.better.table, {"strategy": "moon"}), runs, (5, 150))


@pytest.fixture
def folder(tmp_path):
    """A page and the flag files in a folder of their own, with one kept run of FedMR on CIFAR-100, IID."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    for file in EXPERIMENTS.glob("*.flags"):
        (folder / file.name).write_text(file.read_text().replace("--flagfile=exp/", f"--flagfile={folder}/"))
    (folder / "RESULTS.md").write_text("Before.\n<!-- record table -->\nold\n<!-- end -->\nAfter.\n")
    keep_run(folder, "--strategy=fedmr", accuracy=0.4)
    return folder


def keep_run(folder, *flags, accuracy=None, rows=(), file="cifar100.flags", table="some"):
    """Add a run to a table beside the page, diverged if it has no accuracy."""
    config = configuration.parse([f"--flagfile={folder / file}", *flags])
    summary = {"accuracy_mean_last_10": accuracy, "rounds": config.rounds, "seconds": 600.0, "devices": ["cpu", "cpu"]}
    summary |= {"bytes_down": 8, "bytes_up": 16 if config.strategy == "scaffold" else 8}
    table = folder / "results" / f"{table}.jsonl.gz"
    table.parent.mkdir(exist_ok=True)
    runs = kept.read(table) if table.exists() else {}
    one = KeptRun(configuration.to_json(config), None if accuracy is None else summary, list(rows))
    keep.write({**runs, f"run {len(runs)}": one}, table)


def test_a_new_run_changes_page_and_flag_file(folder, capsys):
    place = f"--folder={folder}"
    before = {path: path.read_text() for path in folder.glob("*.*")}
    with pytest.raises(SystemExit) as ended:
        main(["--check", place])
    assert ended.value.code == 1 and {path: path.read_text() for path in before} == before
    assert main([place]) == 0
    text, flags = (folder / "RESULTS.md").read_text(), (folder / "cifar100.flags").read_text()
    assert text.startswith("Before.\n")
    assert "40.0 (n = 1)<br>papers 37.4, 37.0<br>**higher** |" in text
    assert "# Measured: FedMR 40.0 (seed 0); percent" in flags
    assert configuration.parse([f"--flagfile={folder / 'cifar100.flags'}"]).label_mode == "coarse"
    keep_run(folder, "--strategy=fedmr", "--seed=1", accuracy=0.38)
    keep_run(folder, "--strategy=fedmr", "--seed=2", "--lr=0.02", accuracy=0.9)  # of another setting
    assert main([place]) == 0
    assert "39.0 ± 1.4 (n = 2)" in (folder / "RESULTS.md").read_text()
    capsys.readouterr()
    assert main(["--check", place]) == 0


def test_the_head_of_a_flag_file_keeps_what_stands_around_its_measured_line(folder, capsys):
    place = f"--folder={folder}"
    path = folder / "ablation_fedcross.flags"
    path.write_text("# Expected: much.\n# Measured: old,\n# very old.\n\n# a comment\n--alpha=1.0\n")
    job = ("--alpha=1.0", "--rounds=150", "--strategy=fedcross")
    keep_run(folder, *job, "--fedcross_selection=lowest", accuracy=0.5, file="cifar10.flags")
    keep_run(folder, *job, "--fedcross_selection=lowest", "--seed=1", accuracy=0.6, file="cifar10.flags")
    keep_run(folder, *job, "--fedcross_selection=highest", "--momentum=0.9", accuracy=0.6, file="cifar10.flags")
    assert main([place]) == 0
    assert path.read_text() == (
        "# Expected: much.\n"
        "# Measured: 150 rounds, Dirichlet(1.0), LeNet-5, alpha 0.99: lowest 55.0 ± 7.1 (seeds 0, 1); percent, the "
        "mean of the\n# last ten evaluations (notebook/cifar10.md).\n"
        "\n# a comment\n--alpha=1.0\n"
    )
    path.write_text("--alpha=1.0\n")
    assert main([place]) == 2
    assert "has no line that begins with '# Measured:'" in capsys.readouterr().err


def test_all_methods_of_a_setting_stand_beside_fedavg(folder):
    page = folder / "RESULTS.md"
    page.write_text("<!-- record setting -->\n<!-- end -->\n")
    keep_run(folder, "--strategy=fedavg", accuracy=0.5, file="cifar10.flags")
    keep_run(folder, "--strategy=fedprox", accuracy=0.54, file="cifar10.flags")
    keep_run(folder, "--strategy=fedavg", "--server_optimizer=adam", accuracy=0.45, file="cifar10.flags")
    keep_run(folder, "--strategy=scaffold", accuracy=0.6, file="cifar10.flags")
    keep_run(folder, "--strategy=scaffold", "--scaffold_variant=authors", accuracy=0.44, file="cifar10.flags")
    assert main([f"--folder={folder}"]) == 0
    _, _, _, scaffold, first, fedavg, second, released, *rest, _ = page.read_text().splitlines()
    assert fedavg == "| FedAvg | 50.0 (n = 1) | 54.4, 52.8 | **lower** |  | 1.0 |"
    ran = "papers ran variant=authors"  # so a number of the other form gets no verdict
    assert scaffold == f"| SCAFFOLD, as in its paper | 60.0 (n = 1) | 54.5 | {ran} | +10.0, n = 1 | 1.5 |"
    assert released == "| SCAFFOLD, variant=authors | 44.0 (n = 1) | 54.5 | **lower** | -6.0, n = 1 | 1.5 |"
    assert first == "| FedProx | 54.0 (n = 1) | 54.3, 53.6 | **replicates** | +4.0, n = 1 | 1.0 |"
    assert second == "| FedAdam | 45.0 (n = 1) |  |  | -5.0, n = 1 | 1.0 |"
    assert len(rest) == len(comparisons.OTHERS) - 4 + 2 and all("not run" in row for row in rest)
    rates = [row.split(" | ")[0] for row in rest if row.startswith("| FedCross + server momentum")]
    assert rates == ["| FedCross + server momentum", "| FedCross + server momentum, server_lr=1"]


def test_equally_tuned_methods_stand_beside_tuned_fedavg(folder):
    page = folder / "RESULTS.md"
    page.write_text("<!-- record tuned -->\n<!-- end -->\n")
    trials, tests = f"{tuning.EQUAL}_tuning", tuning.EQUAL

    def keep(*flags, **options):
        keep_run(folder, *flags, file="cifar10.flags", **options)

    def trial(*flags, validation=None):
        rows = [] if validation is None else [{"round": 100, "validation_accuracy": validation}]
        more = ("--rounds=100", "--validation_share=0.2")
        keep(*flags, *more, table=trials, accuracy=validation and 0.9 - validation, rows=rows)

    for lr, alpha, validation in ((0.02, 0.9, 0.4), (0.05, 0.99, 0.5), (0.2, 0.95, None)):
        trial("--strategy=fedcross", f"--lr={lr}", f"--fedcross_alpha={alpha}", validation=validation)
    trial("--strategy=fedavg", "--lr=0.02", validation=0.45)
    trial("--strategy=fedavg", "--lr=0.05", validation=0.43)
    keep("--strategy=fedavg", "--seed=1", "--lr=0.02", table=tests, accuracy=0.5)
    for seed, accuracy in ((1, 0.6), (2, 0.62)):
        keep("--strategy=fedcross", f"--seed={seed}", "--lr=0.05", table=tests, accuracy=accuracy)  # 0.99: the default
    keep("--strategy=fedcross", "--seed=2", accuracy=0.61)
    assert main([f"--folder={folder}"]) == 0
    _, _, _, fedcross, fedavg, *rest, _ = page.read_text().splitlines()
    assert len(rest) == len(tuning.METHODS) - 2 and all("not run" in row for row in rest)
    assert fedavg == "| FedAvg | lr 0.02 | 2 | 45.0 | 50.0 (n = 1) |  |  | 1.0 |"
    chosen = "lr 0.05, alpha 0.99 | 3, 1 diverged | 50.0"
    assert fedcross == f"| FedCross | {chosen} | 61.0 ± 1.4 (n = 2) | +10.0, n = 1 | +1.0, n = 1 | 1.0 |"

    avg, cross = tuning.behind(folder / "results" / f"{tests}.jsonl.gz")
    job = [f"--flagfile={folder / 'cifar10.flags'}", "--strategy=fedcross"]
    run = configuration.parse([*job, "--lr=0.05", "--alpha=0.1"])
    assert cross.chose(run) and not avg.chose(run)
    assert not cross.chose(configuration.parse([*job, "--lr=0.05", "--fedcross_alpha=0.9"]))
    assert cross.budget(run) == "3 trials of 100 rounds, Dirichlet(0.5)"
    assert tuning.behind(folder / "results" / f"{trials}.jsonl.gz") == []


def test_the_leaderboard_says_how_a_setting_was_chosen(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS.parent / "docs" / "hooks"))
    hooks = importlib.import_module("kept")
    monkeypatch.setattr(hooks, "EXPERIMENTS", folder)
    hooks.lines.cache_clear()
    (folder / "results" / "some.jsonl.gz").unlink()  # its run has no evaluations

    def keep(table, strategy, lr, *flags):
        rows = [{"round": 100, "validation_accuracy": lr}]
        flags = (f"--strategy={strategy}", f"--lr={lr}", *flags)
        keep_run(folder, *flags, file="cifar10.flags", table=table, accuracy=lr, rows=rows)

    for strategy, lr in (("fedavg", 0.02), ("fedavg", 0.05), ("fedprox", 0.02)):
        keep("new_tuning", strategy, lr, "--rounds=100", "--validation_share=0.2")
    for strategy, lr in (("fedavg", 0.05), ("fedavg", 0.01), ("fedprox", 0.02)):
        keep("new_runs", strategy, lr)
    try:
        text = importlib.import_module("leaderboard").page()
    finally:
        hooks.lines.cache_clear()
    assert text.count("\n## ") + text.startswith("## ") == 1  # the trials have no board
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| [FedAvg](../methods/fedavg.md)", "0.05", "2 trials of 100 rounds"],
        ["| [FedProx](../methods/fedprox.md)", "0.02", "-"],  # a single trial chooses nothing
        ["| [FedAvg](../methods/fedavg.md)", "0.01", "-"],
    ]


def test_a_sentence_counts_the_outcomes(folder):
    page = folder / "RESULTS.md"
    page.write_text("<!-- record summary -->\n<!-- end -->\n")
    keep_run(folder, "--strategy=fedcross", "--partition=iid", accuracy=0.39)
    keep_run(folder, "--strategy=fedavg", "--alpha=0.1", accuracy=0.2, file="cifar10.flags")
    assert main([f"--folder={folder}"]) == 0
    assert page.read_text().splitlines()[1] == (
        "Of 24 cells 3 are run (3 runs): 1 replicates a number of the papers, "
        "1 is higher (FedMR: CIFAR-100, coarse, Dirichlet(0.5)), "
        "1 is lower (FedAvg: CIFAR-10, Dirichlet(0.1)). "
        "The papers themselves differ by up to 4.5 points in a cell."
    )


def test_longer_runs_stand_beside_what_they_had_reached_before(folder):
    assert configuration.parse([f"--flagfile={folder / 'cifar10.flags'}"]).rounds == comparisons.USUAL_ROUNDS
    page = folder / "RESULTS.md"
    page.write_text("<!-- record longer -->\n<!-- end -->\n<!-- record cost -->\n<!-- end -->\n")
    for strategy, before, after in (("fedmr", 0.4, 0.55), ("fedavg", 0.45, 0.47)):
        rows = [
            dict.fromkeys(COLUMNS, 1) | {"round": round, "accuracy": before if round <= 500 else after}
            for round in range(5, 1001, 5)
        ]
        flags = (f"--strategy={strategy}", "--alpha=0.1", "--rounds=1000")
        keep_run(folder, *flags, accuracy=after, rows=rows, file="cifar10.flags")
    assert main([f"--folder={folder}"]) == 0
    _, head, _, fedavg, fedmr, fedcross, *_ = text = page.read_text().splitlines()
    assert head.startswith("| method | after 500 rounds | after 1,000 | papers |")
    assert fedavg == "| FedAvg | 45.0 | 47.0 (n = 1) | 50.7, 46.1 | **replicates v1** |  |"
    assert fedmr == "| FedMR | 40.0 | 55.0 (n = 1) | 54.6, 54.2 | **replicates** | +8.0, n = 1 |"
    assert fedcross == "| FedCross |  | **not run** | 55.7 |  |  |"
    assert "| CIFAR-10 | FedMR | 1000 | 2 x cpu | 1 | 10 |" in text


def test_a_diverged_run_is_not_called_not_run(folder):
    page = folder / "RESULTS.md"
    page.write_text("<!-- record setting -->\n<!-- end -->\n<!-- record cost -->\n<!-- end -->\n")
    keep_run(folder, "--strategy=moon", file="cifar10.flags")
    assert main([f"--folder={folder}"]) == 0
    assert "| MOON | **diverged** |" in page.read_text() and "| CIFAR-10 | MOON |" not in page.read_text()


def test_a_seed_that_diverged_is_counted_beside_the_others(folder):
    page = folder / "RESULTS.md"
    page.write_text("<!-- record setting -->\n<!-- end -->\n")
    keep_run(folder, "--strategy=moon", accuracy=0.5, file="cifar10.flags")
    keep_run(folder, "--strategy=moon", "--seed=1", file="cifar10.flags")
    assert main([f"--folder={folder}"]) == 0
    assert "| MOON | 50.0 (n = 1, 1 diverged) |" in page.read_text()


def test_unknown_parts_are_refused(folder, capsys):
    (folder / "RESULTS.md").write_text("<!-- record tabel -->\n<!-- end -->\n")
    assert main([f"--folder={folder}"]) == 2
    assert "none of table, pairs, setting, claims, cost, headline, summary, longer" in capsys.readouterr().err


def test_the_readme_has_the_headline(folder):
    keep_run(folder, "--flagfile=" + str(folder / "cifar10.flags"), "--strategy=fedmr", "--alpha=0.5", accuracy=0.6)
    readme = folder.parent / "README.md"
    readme.write_text("First.\n<!-- record headline -->\n<!-- end -->\n")
    assert main([f"--folder={folder}"]) == 0
    assert "| FedMR | not run (54.6, 54.2) | 60.0 (59.8, 59.1) |" in readme.read_text()
