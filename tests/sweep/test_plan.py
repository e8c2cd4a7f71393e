"""What a sweep is asked for: the product, or one line about what is wrong."""

import re
from pathlib import Path

import pytest

from fedjax_mr import sweep
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.sweep.__main__ import main

TINY = ("--model=logistic", "--rounds=6", "--eval_every=2", "--local_epochs=1", "--noprogress")
PRODUCT = (*TINY, "--strategies=fedavg,fedmr", "--seeds=0:2", "--grid", "alpha=0.1,0.5", "--sweep_dir=runs")


def test_the_product_of_strategies_settings_and_seeds():
    _, runs = sweep.plan([*PRODUCT, "--seeds=0:2,7", "--grid=local_epochs=1,2"])
    found = [(run.config.strategy, run.config.alpha, run.config.local_epochs, run.config.seed) for run in runs]
    assert found == [
        (strategy, alpha, epochs, seed)
        for strategy in ("fedavg", "fedmr")
        for alpha in (0.1, 0.5)
        for epochs in (1, 2)
        for seed in (0, 1, 7)
    ]
    assert len({run.folder for run in runs}) == len(runs)
    assert re.fullmatch(r"runs/fedavg-alpha=0.1-local_epochs=1-seed=0-[0-9a-f]{8}", str(runs[0].folder))


def test_five_trials_are_five_draws_of_the_clients():
    """The partition and the public set follow the seed, and nothing else."""
    flags = ["--strategies=local,fedme", "--seeds=0:5", "--public_share=0.1", "--grid=lr=0.1,0.2"]
    _, runs = sweep.plan(flags)
    key = lambda config: (config.strategy, config.lr, config.seed)
    hashes = {key(run.config): federated_data(run.config).hash() for run in runs}
    for (_, _, seed), found in hashes.items():
        assert found == hashes["local", 0.1, seed]
    assert len(set(hashes.values())) == 5


def test_settings_of_other_strategies_do_not_multiply():
    _, runs = sweep.plan(["--strategies=fedavg,fedmr", "--grid", "fedmr_unit=leaf,layer"])
    assert [(run.config.strategy, run.choice) for run in runs] == [
        ("fedavg", {}),
        ("fedmr", {"fedmr_unit": "leaf"}),
        ("fedmr", {"fedmr_unit": "layer"}),
    ]


def test_a_value_brings_others_along():
    grid = "partition=iid,dirichlet+alpha=0.1,dirichlet+alpha=1e+0"
    _, runs = sweep.plan(["--grid", grid, "--grid=model=logistic,mlp+lr=0.1", "--alpha=0.3", "--lr=0.2"])
    assert [(run.config.partition, run.config.alpha, run.config.model, run.config.lr) for run in runs] == [
        ("iid", 0.3, "logistic", 0.2),
        ("iid", 0.3, "mlp", 0.1),
        ("dirichlet", 0.1, "logistic", 0.2),
        ("dirichlet", 0.1, "mlp", 0.1),
        ("dirichlet", 1.0, "logistic", 0.2),
        ("dirichlet", 1.0, "mlp", 0.1),
    ]
    assert runs[3].folder.name.startswith("fedmr-partition=dirichlet-alpha=0.1-model=mlp-lr=0.1-seed=0-")


def test_without_flags_of_its_own_a_sweep_is_one_run():
    _, runs = sweep.plan(["--strategy=fedcross", "--seed=4"])
    assert [(run.config.strategy, run.config.seed, run.choice) for run in runs] == [("fedcross", 4, {})]


def test_a_sweep_may_come_from_a_flag_file():
    Path("table.flags").write_text("--strategies=fedavg,indep\n--seeds=0:3\n--grid=alpha=0.1,1\n--lr=0.01\n")
    _, runs = sweep.plan(["--flagfile=table.flags", "--sweep_dir=here"])
    assert len(runs) == 12
    assert {run.config.lr for run in runs} == {0.01}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--grid", "alhpa=1"], ["alhpa", "did you mean 'alpha'?", "known: ", "local_epochs"]),
        (["--grid", "run_dir=a,b"], ["run_dir", "known: "]),
        (["--grid", "alpha"], ["--grid=alpha has no values"]),
        (["--grid", "alpha=0.1,,1"], ["empty value"]),
        (["--grid", "alpha=0.1,x"], ["--alpha=x", "not a number"]),
        (["--grid", "alpha=0.1,-1"], ["--alpha=-1.0 is out of range"]),
        (["--grid", "model=lenet6"], ["did you mean 'lenet5'?"]),
        (["--grid", "seed=0,1"], ["--seeds=0,1"]),
        (["--grid", "strategy=fedmr"], ["--strategies=fedmr"]),
        (["--grid", "lr=1", "--grid", "lr=2"], ["lr twice"]),
        (["--grid", "lr=1+seed=7"], ["--grid=lr=1+seed=7 sets seed", "--seeds"]),
        (["--grid", "lr=1+strategy=fedprox"], ["sets strategy", "--strategies"]),
        (["--grid", "partition=iid+aplha=1"], ["aplha", "did you mean 'alpha'?"]),
        (["--grid", "partition=dirichlet+alpha=1", "--grid", "alpha=2"], ["alpha twice"]),
        (["--seeds=3:3"], ["'3:3' is not a seed or a range"]),
        (["--seeds=a"], ["'a' is not a seed or a range"]),
        (["--seeds=" + "9" * 5000], ["is not a seed or a range"]),
        (["--seeds=0:1000000000"], ["--seeds=0:1000000000: more than 10,000 seeds"]),
        (["--seeds=0:6000", "--grid=lr=1,2"], ["make 12,000 runs, more than 10,000"]),
        (["--strategies=fedav,fedmr"], ["did you mean 'fedavg'?"]),
        (["--strategies=fedavg,"], ["empty value"]),
        (["--run_dir=x"], ["--sweep_dir"]),
        (["--kept=nowhere"], ["--kept=nowhere holds no kept run", "NAME.jsonl.gz"]),
        (["--sedes=1"], ["did you mean --seeds?"]),
        (["--flagfile=none.flags"], ["cannot read the flag file"]),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(arguments, parts, trained, capsys):
    asked = trained()
    assert main(arguments) == 2
    out, shown = capsys.readouterr()
    assert out == "" and shown.startswith("fedjax-mr: ") and shown.count("\n") == 1
    assert all(part in shown for part in parts), shown
    assert not asked and not list(Path().iterdir())


def test_help_lists_the_sweeps_own_flags(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("--strategies", "--seeds", "--grid", "--dry_run"))
