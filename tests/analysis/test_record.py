"""The page of record says what the kept metrics say, and its verdicts follow their rules."""

import json
from pathlib import Path

import pytest

from fedjax_mr import config as configuration
from fedjax_mr.analysis import claims, record
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.analysis.papers import Published
from fedjax_mr.errors import UserError

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_the_page_and_the_flag_files_are_those_of_the_kept_runs(capsys):
    assert main(["record", "--check", f"--document={EXPERIMENTS / 'RESULTS.md'}"]) == 0
    assert "say what the kept metrics say" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("own", "paper", "verdict"),
    [
        ([58.6], 59.8, "replicates"),
        ([58.2], 59.8, "lower"),
        ([61.4], 59.8, "higher"),
        ([55.0, 57.0, 59.0], 60.9, "replicates within the spread of our seeds"),  # mean 57, deviation 2
        ([55.0, 57.0, 59.0], 61.1, "lower"),
        ([], 59.8, "not run"),
        ([58.6], None, ""),
    ],
)
def test_verdict_of_a_cell(own, paper, verdict):
    published = None if paper is None else Published("some", paper, None, "a table")
    by_seed = {str(seed): value for seed, value in enumerate(own)}
    assert record.Cell("FedMR", "CIFAR-10", "IID", by_seed, [], published).verdict == verdict


def test_seeds_are_paired():
    """Only common seeds count; the interval of 4, 5, 6 is 5 -+ 4.303 / sqrt(3), Student's quantile of two degrees."""
    better, worse = {"0": 54.0, "1": 65.0, "2": 46.0, "7": 0.0}, {"0": 50.0, "1": 60.0, "2": 40.0, "8": 99.0}
    found = record.difference(better, worse)
    assert found is not None and (found.count, found.mean) == (3, 5.0)
    assert found.low == pytest.approx(5 - 4.302653 / 3**0.5) and found.high == pytest.approx(5 + 4.302653 / 3**0.5)
    assert found.verdict == "holds (3 seeds)" and str(found) == "+5.0 [+2.5, +7.5], n = 3"
    assert record.difference({"0": 1.0}, {"1": 1.0}) is None


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [([1.0], "holds with one seed"), ([-1.0], "does not hold (one seed)"), ([-1.0, 3.0], "not sure (2 seeds)"),
     ([1.0, -3.0], "not sure (2 seeds)"), ([-2.9, -3.0], "does not hold (2 seeds)")],
)  # fmt: skip
def test_verdict_of_a_claim(differences, verdict):
    own = {str(seed): value for seed, value in enumerate(differences)}
    found = record.difference(own, dict.fromkeys(own, 0.0))
    assert found is not None and found.verdict == verdict


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [([1.0], "holds with one seed"), ([-1.6], "does not hold (one seed)"), ([0.1, -0.1, 0.0], "holds (3 seeds)"),
     ([1.0, -1.0], "not sure (2 seeds)"), ([2.0, 3.0], "does not hold (2 seeds)")],
)  # fmt: skip
def test_verdict_of_being_level(differences, verdict):
    own = {str(seed): value for seed, value in enumerate(differences)}
    found = claims.difference(own, dict.fromkeys(own, 0.0))
    assert found is not None and found.level == verdict


def test_settings_of_claims_are_singled_out():
    kept, (first, *_) = EXPERIMENTS / "results", claims.CLAIMS
    assert set(claims.accuracies(first.better, kept, (5, 150))) == {"0"}
    several = claims.Chosen(first.better.folder, {"strategy": "fedmr"})
    with pytest.raises(UserError, match="a second run of its seed"):
        claims.accuracies(several, kept, (5, 150))
    with pytest.raises(UserError, match="no evaluation"):
        claims.accuracies(first.better, kept, (500, 505))
    with pytest.raises(UserError, match="holds no run"):
        claims.accuracies(claims.Chosen(first.better.folder, {"strategy": "moon"}), kept, (5, 150))


@pytest.fixture
def folder(tmp_path):
    """A page and the flag files in a folder of their own, with one kept run of FedMR on CIFAR-100, IID."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    for name in ("cifar10.flags", "cifar100.flags", "fedmr_authors.flags"):
        (folder / name).write_text((EXPERIMENTS / name).read_text().replace("exp/", f"{folder}/"))
    (folder / "RESULTS.md").write_text("Before.\n<!-- record table -->\nold\n<!-- end -->\nAfter.\n")
    keep(folder, "--strategy=fedmr", accuracy=0.4)
    return folder


def keep(folder, *flags, accuracy, file="cifar100.flags"):
    config = configuration.parse([f"--flagfile={folder / file}", *flags])
    kept = folder / "results" / "some" / f"{config.strategy}-{len(list(folder.rglob('config.json')))}"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text(json.dumps(configuration.to_json(config)))
    summary = {"accuracy_mean_last_10": accuracy, "rounds": 500, "seconds": 600.0, "devices": ["cpu", "cpu"]}
    (kept / "summary.json").write_text(json.dumps(summary))


def test_a_new_run_changes_page_and_flag_file(folder, capsys):
    page = f"--document={folder / 'RESULTS.md'}"
    before = {path: path.read_text() for path in folder.glob("*.*")}
    with pytest.raises(SystemExit) as ended:
        main(["record", "--check", page])
    assert ended.value.code == 1 and {path: path.read_text() for path in before} == before
    assert main(["record", page]) == 0
    text, flags = (folder / "RESULTS.md").read_text(), (folder / "cifar100.flags").read_text()
    assert "40.0 (n = 1)<br>paper 37.4 ± 0.3<br>**higher**" in text and text.startswith("Before.\n")
    assert "# Measured: FedMR 40.0 (seed 0): percent" in flags
    assert configuration.parse([f"--flagfile={folder / 'cifar100.flags'}"]).label_mode == "coarse"
    keep(folder, "--strategy=fedmr", "--seed=1", accuracy=0.38)
    keep(folder, "--strategy=fedmr", "--seed=2", "--lr=0.02", accuracy=0.9)  # another setting is no part of the record
    assert main(["record", page]) == 0
    assert "39.0 ± 1.4 (n = 2)" in (folder / "RESULTS.md").read_text()
    capsys.readouterr()
    assert main(["record", "--check", page]) == 0


def test_other_methods_stand_beside_fedavg(folder):
    page = folder / "RESULTS.md"
    page.write_text("<!-- record others -->\n<!-- end -->\n")
    keep(folder, "--strategy=fedavg", accuracy=0.5, file="cifar10.flags")
    keep(folder, "--strategy=fedprox", accuracy=0.54, file="cifar10.flags")
    keep(folder, "--strategy=fedavg", "--server_optimizer=adam", accuracy=0.45, file="cifar10.flags")
    keep(folder, "--strategy=scaffold", accuracy=0.6, file="cifar10.flags")
    keep(folder, "--strategy=scaffold", "--scaffold_variant=authors", accuracy=0.44, file="cifar10.flags")
    assert main(["record", f"--document={page}"]) == 0
    _, _, _, scaffold, first, second, released, *rest, _ = page.read_text().splitlines()
    assert scaffold == "| SCAFFOLD | 60.0 (n = 1) | 54.5 ± 0.4 | **higher** | +10.0, n = 1 |"
    assert released == "| SCAFFOLD, variant=authors | 44.0 (n = 1) | 54.5 ± 0.4 | **lower** | -6.0, n = 1 |"
    assert first == "| FedProx | 54.0 (n = 1) | 54.3 ± 1.3 | **replicates** | +4.0, n = 1 |"
    assert second == "| FedAdam | 45.0 (n = 1) |  |  | -5.0, n = 1 |"
    assert len(rest) == len(record.OTHERS) - 4 and all("not run" in row for row in rest)


def test_unknown_parts_are_refused(folder, capsys):
    (folder / "RESULTS.md").write_text("<!-- record tabel -->\n<!-- end -->\n")
    assert main(["record", f"--document={folder / 'RESULTS.md'}"]) == 2
    assert "none of table, pairs, others, claims, cost, headline" in capsys.readouterr().err


def test_the_readme_has_the_headline(folder):
    keep(folder, "--flagfile=" + str(folder / "cifar10.flags"), "--strategy=fedmr", "--alpha=0.5", accuracy=0.6)
    readme = folder.parent / "README.md"
    readme.write_text("First.\n<!-- record headline -->\n<!-- end -->\n")
    assert main(["record", f"--document={folder / 'RESULTS.md'}"]) == 0
    assert "| FedMR | not run (54.6 ± 0.6) | 60.0, n = 1 (59.8 ± 0.6) |" in readme.read_text()
