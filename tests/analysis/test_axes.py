"""Plots for Python return axes with the numbers of the runs."""

import matplotlib
import pytest
from matplotlib.figure import Figure

import fedjax_mr as fmr
from fedjax_mr.analysis import plot_curves
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.config.config import Config


@pytest.fixture(autouse=True)
def kept(keep):
    for seed in range(2):
        keep(Config(strategy="fedavg", seed=seed), [0.4, 0.5])
        keep(Config(strategy="fedmr", seed=seed), [0.5, 0.6 + 0.1 * seed])


def test_curves_are_drawn_into_given_axes():
    axes = Figure().subplots()
    assert plot_curves("runs", ax=axes, colours={"fedavg": "black"}) is axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["FedAvg (n = 2)", "FedMR (n = 2)"] and len(lines) == 2
    avg, mr = axes.get_lines()
    assert avg.get_ydata() == pytest.approx([0.4, 0.5]) and mr.get_ydata() == pytest.approx([0.5, 0.65])
    assert avg.get_color() == "black" and mr.get_color() != "black"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "test accuracy")


def test_without_axes_there_is_a_new_figure(monkeypatch):
    monkeypatch.setattr(matplotlib, "use", matplotlib.use)
    matplotlib.use("agg")
    from matplotlib import pyplot

    axes = plot_curves(["runs"], column="loss", x="bytes")
    assert axes.get_xlabel().startswith("sent") and axes.get_ylabel() == "test loss (nats)"
    pyplot.close(axes.figure)
    with pytest.raises(fmr.UserError, match="x=time is none of"):
        plot_curves("runs", x="time")


def test_the_command_has_size_title_colours_and_style(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (saved.append(figure), path.touch()))
    (tmp_path / "mine.mplstyle").write_text("axes.facecolor: 123456\n")
    flags = [
        "--width=4",
        "--height=3",
        "--title=Mine",
        "--y_label=score",
        "--colours=fedavg=black,FedMR (n = 2)=#ff0000",
    ]
    assert main(["curves", "runs", *flags, f"--style={tmp_path / 'mine.mplstyle'}"]) == 0
    (figure,) = saved
    (axis,) = figure.axes
    assert figure.get_size_inches() == pytest.approx((4, 3)) and figure.get_suptitle() == "Mine"
    assert [line.get_color() for line in axis.get_lines() if line.get_marker() != "x"] == [
        "black",
        "#ff0000",
    ] and axis.get_ylabel() == "score"
    assert matplotlib.colors.to_hex(axis.get_facecolor()) == "#123456"


@pytest.mark.parametrize(
    ("flag", "words"),
    [("--width=0", "width=0.0 is out of range"), ("--colours=fedavg", "is not NAME=COLOUR"),
     ("--colours=fedavg=bleck", "bleck is no colour"), ("--style=nothing", "nothing is neither a style")],
)  # fmt: skip
def test_a_bad_design_is_one_line(capsys, flag, words):
    assert main(["curves", "runs", flag]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
