"""Curves of any number of runs end up in a picture that shows them all."""

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fedjax_mr import plots
from fedjax_mr.errors import UserError


def rows(offset=0.0, count=30):
    return [
        {"round": 5 * i, "accuracy": min(1.0, i / 40 + offset), "loss": 1 / i + offset} for i in range(1, count + 1)
    ]


def drawn(path):
    """Return the picture's RGB values in 0..1, [height, width, 3]."""
    from matplotlib.image import imread

    return imread(path)[..., :3]


def has_colour(picture, colour):
    return bool((np.abs(picture - np.array(to_rgb(colour))).max(axis=-1) < 0.02).any())


@pytest.mark.parametrize("count", [1, 3, 12])
def test_every_run_is_drawn(tmp_path, count):
    path = tmp_path / "curves.png"
    plots.curves({f"fedmr-digits-{i}": rows(i / 50) for i in range(count)}, path)
    picture = drawn(path)
    assert picture.shape[1] == 1500 and 600 <= picture.shape[0] < 900
    for index, colour in enumerate(plots.COLOURS):
        if colour != "#000000":  # text is black too
            assert has_colour(picture, colour) == (index < count)
    assert [each.name for each in tmp_path.iterdir()] == ["curves.png"]


@pytest.fixture
def figures(monkeypatch):
    """Return the figures that are drawn, in place of files with them."""
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (seen.append(figure), path.touch()))
    return seen


def named(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_every_run_is_named_and_told_apart(tmp_path, figures):
    runs = {f"run {i}": rows(i / 50) for i in range(12)} | {"_hidden": rows(), "cost $x$": rows()}
    plots.curves(runs, tmp_path / "curves.png")
    (figure,) = figures
    (legend,) = figure.legends
    assert named(legend) == list(runs)
    strokes = {(line.get_color(), line.get_linestyle()) for line in legend.get_lines()}
    assert len(strokes) == len(runs)
    accuracy, loss = figure.axes
    assert accuracy.get_ylabel() == "test accuracy" and loss.get_ylabel() == "test loss (nats)"
    for axis, column in ((accuracy, "accuracy"), (loss, "loss")):
        for line, shown, original in zip(axis.get_lines(), legend.get_lines(), runs.values(), strict=True):
            np.testing.assert_array_equal(line.get_xdata(), [row["round"] for row in original])
            np.testing.assert_array_equal(line.get_ydata(), [row[column] for row in original])
            assert (line.get_color(), line.get_linestyle()) == (shown.get_color(), shown.get_linestyle())


def test_missing_numbers_and_short_runs(tmp_path):
    diverged = [*rows(count=3), {"round": 20, "accuracy": None, "loss": None}]
    plots.curves({"diverged": diverged, "one": rows(count=1), "none": []}, tmp_path / "curves.png")
    assert has_colour(drawn(tmp_path / "curves.png"), plots.COLOURS[1])
    plots.curves({}, tmp_path / "nothing.svg")
    assert (tmp_path / "nothing.svg").read_text().startswith("<?xml")


def test_a_failure_keeps_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    path.write_text("old")

    def fail(figure, path):
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(UserError, match=r"cannot write .*curves.png \(disk full\)"):
        plots.curves({"a": rows()}, path)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_the_users_settings_stay(tmp_path):
    backend, settings = matplotlib.get_backend(), dict(matplotlib.rcParams)
    plots.curves({"a": rows()}, tmp_path / "curves.png")
    assert matplotlib.get_backend() == backend and dict(matplotlib.rcParams) == settings


@pytest.mark.parametrize("format", ["pdf", "svg"])
def test_other_formats(tmp_path, format):
    plots.curves({"a": rows(count=2)}, tmp_path / f"curves.{format}")
    text = (tmp_path / f"curves.{format}").read_bytes()
    assert text.startswith({"pdf": b"%PDF", "svg": b"<?xml"}[format]) and b"/Type3" not in text


def test_a_method_looks_the_same_everywhere_and_panels_share_their_axes(tmp_path, figures):
    series = {name: ([1, 2, 3], [0.1, 0.5, y]) for name, y in (("A", 0.9), ("B", 0.3))}
    methods = {"A": "fedmr", "B": "fedavg"}
    words = {"x_label": "round", "y_label": "accuracy"}
    plots.lines({str(panel): series for panel in range(5)}, tmp_path / "a.png", **words, methods=methods)
    plots.lines({"": {"B": ([1], [5.0])}}, tmp_path / "b.png", **words, methods=methods)
    many, one = figures
    looks = lambda line: (line.get_color(), line.get_linestyle(), line.get_marker())
    of_b = [looks(axis.get_lines()[-1]) for axis in (*many.axes[:5], one.axes[0])]
    assert set(of_b) == {tuple(plots.looks(["B"], methods)["B"])}
    assert len({axis.get_ylim() for axis in many.axes[:5]}) == 1 and not many.axes[5].axison
    assert [axis.get_ylabel() for axis in many.axes[:5]] == ["accuracy", "", "", "", "accuracy"]


def test_personal_results_have_no_empty_panel(tmp_path, figures):
    evaluations = [
        {
            "round": at,
            "accuracy": 0.5,
            "personal_accuracy": 0.5,
            "personal_std": 0.1,
            "network_0_a": 3,
            "network_1_b": 1,
        }
        for at in (5, 10)
    ]
    last, networks = {"as trained": [0.2, 0.8]}, {"network_0_a": "A", "network_1_b": "B"}
    for rows in (evaluations, evaluations[:1], [{"round": 5, "accuracy": 0.5}] * 2):
        plots.personal(rows, last, tmp_path / "a.png", networks=networks if len(rows[0]) > 2 else None)
    over_rounds, once, only_fine_tuned = figures
    assert [len(figure.axes) for figure in figures] == [3, 2, 1]
    assert [bar.get_width() for bar in once.axes[1].patches] == [3, 1]
    assert [label.get_text() for label in once.axes[1].get_yticklabels()] == ["A", "B"]
    assert named(over_rounds.axes[0].get_legend())[0] == "mean of the clients"
    assert named(only_fine_tuned.axes[0].get_legend()) == ["as trained"]


def test_what_is_drawn_of_a_division_does_not_grow_with_its_clients(tmp_path, figures):
    counts = np.arange(20_000)[:, None] // 40 * np.ones((1, 3), int)  # [N, C]: 500 sizes
    counts[7] = 100
    for some in (counts[:20], counts[:1000], counts):
        plots.partition(some, tmp_path / "a.png")
    few, all_shown, many = ([figure.axes[0], figure.axes[1].images[0].get_array()] for figure in figures)
    assert len(few[0].patches) == 20 and few[1].shape == (3, 20)
    assert len(all_shown[0].patches) == 1 and all_shown[1].shape == (3, 1000)
    mean, most = many[0].patches
    assert many[1].shape == (3, 1000) and len(mean.get_data().values) == 1000
    np.testing.assert_array_equal(many[1][0], [300 / 60, *(np.arange(1, 1000) // 2)])  # 20 clients in each column
    assert mean.get_data().values[0] == 15 and most.get_data().values[0] == 300
    assert mean.get_data().edges[-1] == 19_999.5


def test_blocks_are_explained(tmp_path, figures):
    plots.strips({"round 1": [[(0, 0, False), (1, 3, True)]]}, tmp_path / "a.png", num_colours=2)
    shapes, owners = figures[0].legends
    assert named(shapes) == ["convolutional block", "dense block"] and named(owners) == ["0", "1"]
    plots.teachers({1: {0: [(0, 0, False)]}}, 21, tmp_path / "b.png")
    assert len(figures[1].legends) == 1  # too many owners to tell apart
