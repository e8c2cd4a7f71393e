"""Methods by settings, as a paper prints its table."""

import dataclasses

import pytest

from fedjax_mr.analysis import layouts
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.config.config import Config
from fedjax_mr.strategies import fedcross, fedmr

CIFAR = Config(dataset="cifar10", model="lenet5", clients=100, cohort=10, rounds=60, eval_every=5)
METHODS = {"fedmr": fedmr.Hyper(), "fedcross": fedcross.Hyper(), "fedavg": None}


@pytest.fixture
def some_runs(keep):
    """Three methods, two alphas; FedMR's rate is its own.

    At alpha 0.1 FedMR has one seed of two, FedAvg diverged, and so did a third seed of FedCross.
    """
    accuracies = {"fedavg": (0.3, 0.4), "fedcross": (0.5, 0.6), "fedmr": (0.55, 0.65)}
    for strategy, values in accuracies.items():
        for alpha in (0.5, 0.1):
            for seed, value in enumerate(values if (strategy, alpha) != ("fedmr", 0.1) else values[:1]):
                config = dataclasses.replace(CIFAR, strategy=strategy, alpha=alpha, seed=seed, hyper=METHODS[strategy])
                lr = 0.02 if strategy == "fedmr" else 0.01
                end = "diverged.txt" if (strategy, alpha) == ("fedavg", 0.1) else "summary.json"
                keep(dataclasses.replace(config, lr=lr), [value] * 12, end=end)
    third = dataclasses.replace(CIFAR, strategy="fedcross", alpha=0.1, seed=2, lr=0.01, hyper=METHODS["fedcross"])
    keep(third, [0.1], end="diverged.txt")
    return ["runs"]


def test_in_text(some_runs, capsys):
    assert main(["table", "runs", "--layout=paper"]) == 0
    table, notes = capsys.readouterr().out.split("\n\n")
    rows = [line.split("  ") for line in table.splitlines()]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        ["method", "Dirichlet(0.1)", "Dirichlet(0.5)"],
        ["FedAvg", "diverged", "35.00 ± 7.07"],
        ["FedCross", "*55.00 ± 7.07 (n = 2, 1 diverged)*", "_55.00 ± 7.07_"],
        ["FedMR", "*55.00 (n = 1)*", "*60.00 ± 7.07*"],
    ]
    assert notes.splitlines() == [
        "Test accuracy in percent, mean of the last 10 evaluations; mean ± standard deviation over 2 seeds.",
        "All: CIFAR-10, LeNet-5, N = 100, K = 10, 60 rounds.",
        "FedMR: learning rate 0.02.",
        "Diverged: the loss or the weights were no longer finite; these seeds are not part of the mean.",
        "*best*, _second_",
    ]


def test_settings_that_words_do_not_tell_apart_have_cells_of_their_own(keep):
    for file, value in (("a/mine.npz", 0.5), ("b/mine.npz", 0.25)):
        keep(dataclasses.replace(CIFAR, dataset=file, strategy="fedavg"), [value])
    rows = layouts.paper_table(["runs"], format="csv").splitlines()
    assert rows[0] == 'method,"mine, dataset=a/mine.npz","mine, dataset=b/mine.npz"'
    assert "50.00" in rows[1] and "25.00" in rows[1]


def test_in_latex(some_runs, keep):
    keep(dataclasses.replace(CIFAR, dataset="cifar100", label_mode="coarse", strategy="fedavg", lr=0.01), [0.25])
    lines = layouts.paper_table(some_runs, format="latex", with_papers=True).splitlines()
    assert lines[:2] == [
        "% Test accuracy in percent, mean of all 1 or the last 10 evaluations; mean ± standard deviation over 2 seeds.",
        "% All: LeNet-5, N = 100, K = 10, 60 rounds.",
    ]
    assert lines[3].startswith("% Diverged: ")
    assert lines[4] == "% In brackets: FedMR KDD'24, Table 1; FedCross, Table 1."
    assert lines[5:] == [
        r"\begin{tabular}{lccc}",
        r"\toprule",
        r" & \multicolumn{2}{c}{CIFAR-10} & CIFAR-100 \\",
        r"\cmidrule(lr){2-3}",
        r"Method & Dirichlet(0.1) & Dirichlet(0.5) & Dirichlet(0.5) \\",
        r"\midrule",
        r"FedAvg & diverged & 35.00 $\pm$ 7.07 [54.42 $\pm$ 0.76] & 25.00 (n = 1) [32.41 $\pm$ 0.77] \\",
        r"FedCross & \textbf{55.00 $\pm$ 7.07 (n = 2, 1 diverged) [55.70 $\pm$ 0.74]} & \underline{55.00 $\pm$ 7.07 "
        r"[58.74 $\pm$ 0.67]} &  \\",
        r"FedMR & \textbf{55.00 (n = 1) [54.63 $\pm$ 0.55]} & \textbf{60.00 $\pm$ 7.07 [59.81 $\pm$ 0.60]} &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_a_methods_own_settings_are_rows_and_other_formats(keep):
    for unit, accuracy in (("leaf", 0.5), ("layer", 0.25)):
        keep(Config(strategy="fedmr", hyper=fedmr.Hyper(unit=unit)), [accuracy])
    assert layouts.paper_table(["runs"], format="csv", value="last").splitlines() == [
        "method,accuracy %", '"FedMR, unit = layer",25.00', '"FedMR, unit = leaf",50.00',
    ]  # fmt: skip
    assert "| FedMR, unit = leaf | **50.00** |" in layouts.paper_table(["runs"], format="markdown").splitlines()
    assert "| FedMR, unit = leaf |  |" in layouts.paper_table(["runs"], format="markdown", value="personal")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--papers"], "--papers needs --layout=paper"),
        (["--value=best"], "--value needs --layout=paper"),
        (["--layout=paper", "--target=0.5"], "--target needs --layout=lines"),
        (["--layout=paper", "--value=mean"], "invalid choice: 'mean'"),
        (["--layout=papers"], "invalid choice: 'papers'"),
        (["--layout=paper"], "no run is finished"),
    ],
)
def test_bad_input(keep, options, part, capsys):
    keep(Config(), [0.5], end=None)
    assert main(["table", "runs", *options]) == 2
    out, shown = capsys.readouterr()
    assert part in shown and shown.count("\n") == 1 and out == ""
