"""The layout of clients over devices and lanes."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
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


@functools.cache
def slots_and_positions(devices, lanes):
    """Return the compiled layout of clients of given work."""

    def both(work):
        slots = assign(Layout(devices, lanes), work)
        return slots, positions(slots, len(work))

    return jax.jit(both)


def slots_of(devices, lanes, work):
    return np.asarray(slots_and_positions(devices, lanes)(np.array(work, np.int32))[0])


# Without empty slots, and with some in a lane, on a device, on several devices.
@pytest.mark.parametrize(
    ("devices", "lanes", "count"),
    [(1, 1, 1), (1, 1, 5), (1, 3, 7), (2, 1, 12), (2, 3, 1), (3, 2, 12), (3, 2, 8), (4, 1, 2), (4, 3, 11)],
)
def test_every_client_has_one_slot(devices, lanes, count):
    compiled = slots_and_positions(devices, lanes)

    @hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
    @hypothesis.given(st.lists(st.integers(0, 99), min_size=count, max_size=count))
    def check(work):
        slots, places = map(np.asarray, compiled(np.array(work, np.int32)))
        assert len(slots) == Layout(devices, lanes).padded(count)
        assert sorted(slots[slots < count]) == list(range(count))
        assert (slots[places] == np.arange(count)).all()

    check()


def test_longest_first_and_balanced():
    work = np.array([3, 9, 1, 7, 5, 2])
    loads = work[slots_of(2, 1, work).reshape(2, 3)]
    assert (np.diff(loads) <= 0).all()
    assert abs(loads.sum(1)[0] - loads.sum(1)[1]) <= 1  # 27 = 14 + 13


def test_lanes_hold_clients_of_similar_work():
    slots = slots_of(1, 2, [1, 50, 2, 49]).reshape(2, 2)
    assert [set(pair) for pair in slots] == [{1, 3}, {0, 2}]


def test_more_devices_than_there_are():
    with pytest.raises(UserError, match="devices=99 is more than the 2 cpu device"):
        client_axis(devices=99, lanes=None, cohort_size=100)


def test_defaults_on_cpu():
    axis = client_axis(devices=None, lanes=None, cohort_size=5)
    assert (axis.num_devices, axis.lanes, axis.fused) == (2, 1, False)
    assert client_axis(devices=None, lanes=None, cohort_size=1).num_devices == 1
