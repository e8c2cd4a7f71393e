"""Signs of life: who counts is alive, who stops is lost, who says that it has left is not missed."""

import threading
import time

import jax
import pytest

from fedjax_mr.experiment import heartbeats
from fedjax_mr.experiment.heartbeats import Heartbeats


class Store:
    """The texts of JAX's coordination service."""

    def __init__(self):
        self.texts, self.gone, self.answers = {}, False, threading.Event()
        self.answers.set()

    def key_value_set(self, name, text, allow_overwrite):
        self.answers.wait(20)
        if self.gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: no service")
        self.texts[name] = text

    def key_value_try_get(self, name):
        if name not in self.texts:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: nobody said it")
        return self.texts[name]


@pytest.fixture
def three(monkeypatch):
    """Return three processes that count fast, and what each hears of silence."""
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.02)
    store, found = Store(), [[] for _ in range(3)]
    processes = [Heartbeats(store, index, 3, found[index].append) for index in range(3)]
    for each in processes:
        each.start()
    yield store, processes, found
    store.gone = True
    store.answers.set()


def wait_until(true):
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def beats(store, index):
    text = store.texts.get(f"{heartbeats.FOLDER}/{index}", "0")
    return int(text) if text.isdecimal() else None


def test_while_all_count_nobody_is_missed(three):
    store, _, found = three
    wait_until(lambda: all(beats(store, index) > 2 * heartbeats.SILENT_BEATS for index in range(3)))
    assert found == [[], [], []]


def test_who_falls_silent_is_named_by_all_others(three):
    store, processes, found = three
    wait_until(lambda: beats(store, 1) > 3)
    processes[1].stop(left=False)
    wait_until(lambda: found[0] and found[2])
    assert found == [[[1]], [], [[1]]]


def test_who_has_left_is_not_missed(three):
    store, processes, found = three
    processes[2].stop(left=True)
    now = beats(store, 0)
    wait_until(lambda: beats(store, 0) > now + 2 * heartbeats.SILENT_BEATS)
    assert beats(store, 2) is None and found == [[], [], []]


def test_without_the_store_the_thread_ends(three):
    store, processes, found = three
    store.gone = True
    wait_until(lambda: not any(each._thread.is_alive() for each in processes))
    processes[0].stop(left=True)
    assert found == [[], [], []]


def test_when_the_store_hangs_process_0_is_lost(three):
    store, _, found = three
    wait_until(lambda: beats(store, 1) > 3)
    store.answers.clear()  # as when the machine of process 0 loses its power: no answer, and no end of the connection
    wait_until(lambda: all(found))
    assert found == [[[0]]] * 3


def test_the_line_names_who_is_lost_and_the_remedy():
    line = heartbeats.lost_line([1, 3], 4, "no sign of life for 20 s")
    assert line == "lost process 1 and process 3 of 4: go on with --resume (no sign of life for 20 s)"
