"""Plots of federations of some of the clients."""

import contextlib
import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from fedjax_mr.plots import COLOURS, coalitions


@pytest.fixture
def figure(monkeypatch):
    """The figure that is drawn, in place of a file."""
    drawn = Figure()
    monkeypatch.setattr(coalitions, "picture", lambda *_: contextlib.nullcontext(drawn))
    return drawn


@pytest.mark.parametrize(("lower", "expected"), [(False, 4), (True, 8)])
def test_a_line_is_orange_where_a_client_makes_the_value_worse(figure, lower, expected):
    """Client 2 takes 1 from each of four sets, and clients 0 and 1 bring 1 to each of four."""
    sets = (frozenset(each) for size in range(4) for each in itertools.combinations(range(3), size))
    values = {each: float(len(each & {0, 1}) - len(each & {2})) for each in sets}
    coalitions.lattice(values, "unused", names=["0", "1", "x"], label="value", lower=lower)
    assert figure.axes[0].get_xlabel() == "0: 0, 1: 1, 2: x"
    lines = figure.axes[0].lines
    assert len(lines) == 12
    assert sum(to_hex(line.get_color()).upper() == COLOURS[1] for line in lines) == expected
    assert [text.get_text() for text in figure.axes[0].texts] == ["-", "0", "1", "2", "01", "02", "12", "012"]


def test_each_rule_has_a_panel_with_its_rank_correlation(figure):
    found = {
        "one": np.ones((2, 3)),
        "round_two": np.zeros((2, 3)),
        "c": np.eye(2, 3),
        "d": np.eye(2, 3),
        "e": np.eye(2, 3),
    }
    coalitions.approximations(np.arange(6.0).reshape(2, 3), found, "unused", names="abc", ranks=[1, 0.5, 0, 0, -0.25])
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title() for axis in shown][:2] == ["one (rank 1.00)", "round two (rank 0.50)"] and len(shown) == 5
    points = shown[0].lines[0]
    np.testing.assert_array_equal(points.get_xdata(), [1.5, 2.5, 3.5])
    np.testing.assert_array_equal(points.get_ydata(), [1, 1, 1])
