"""The layout of clients over devices and lanes."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.engine.clients import ClientAxis, assign, client_axis, positions
from fedjax_mr.errors import UserError


class Layout(ClientAxis):
    """A layout over any number of devices; `assign` needs no real ones."""

    def __init__(self, devices, lanes):
        object.__setattr__(self, "count", devices)
        object.__setattr__(self, "lanes", lanes)

    @property
    def num_devices(self):
        return self.count


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 99), min_size=1, max_size=12))
def test_every_client_has_one_slot(devices, lanes, work):
    layout = Layout(devices, lanes)
    slots = np.asarray(assign(layout, jnp.asarray(work, jnp.int32)))
    assert len(slots) == layout.padded(len(work))
    assert sorted(slots[slots < len(work)]) == list(range(len(work)))
    assert (slots[np.asarray(positions(jnp.asarray(slots), len(work)))] == np.arange(len(work))).all()


def test_longest_first_and_balanced():
    work = jnp.asarray([3, 9, 1, 7, 5, 2], jnp.int32)
    slots = np.asarray(assign(Layout(2, 1), work)).reshape(2, 3)
    loads = np.asarray(work)[slots]
    assert (np.diff(loads) <= 0).all()
    assert abs(loads.sum(1)[0] - loads.sum(1)[1]) <= 1  # 27 = 14 + 13


def test_lanes_hold_clients_of_similar_work():
    work = jnp.asarray([1, 50, 2, 49], jnp.int32)
    slots = np.asarray(assign(Layout(1, 2), work)).reshape(2, 2)
    assert [set(pair) for pair in slots] == [{1, 3}, {0, 2}]


def test_more_devices_than_there_are():
    with pytest.raises(UserError, match="--devices=99 is more than the 2 cpu device"):
        client_axis(devices=99, lanes=None, cohort_size=100)


def test_defaults_on_cpu():
    axis = client_axis(devices=None, lanes=None, cohort_size=5)
    assert (axis.num_devices, axis.lanes, axis.fused) == (2, 1, False)
    assert client_axis(devices=None, lanes=None, cohort_size=1).num_devices == 1
