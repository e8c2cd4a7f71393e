"""The event machine: exact sums, no client twice, and invariance to the unit of time."""

import jax
import numpy as np
import pytest

from fedjax_mr.clock import choice, fleet, simulate
from fedjax_mr.errors import UserError

N, E = 40, 30
SETTINGS = [
    (6, 3, "update"),
    (12, 3, "update"),
    (3, 3, "update"),
    (6, 3, "arrival"),
    (5, 1, "arrival"),
    (2, 4, "arrival"),
]


def events(in_flight, buffer, refill, *, scale=1.0, versions=E, clients=N):
    durations = np.random.default_rng(0).lognormal(0, 0.7, (2000,))
    return simulate(
        versions,
        num_clients=clients,
        in_flight=in_flight,
        cohort=buffer,
        refill=refill,
        choose=choice.uniformly(lambda number: jax.random.fold_in(jax.random.key(7), number)),
        duration=lambda job, client: scale * durations[job],
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_staleness_adds_up_exactly(setting):
    """Every boundary of a version is crossed by M - K (M - 1) jobs: the sums follow from that."""
    in_flight, buffer, refill = setting
    found = events(*setting)
    running = found.jobs[found.jobs["used"] == 0]
    total = found.schedule.staleness.sum() + (E - running["version"]).sum()
    assert total == E * (in_flight - (buffer if refill == "update" else 1))
    per_version = np.bincount(found.jobs["version"], minlength=E)
    assert per_version[0] == in_flight + (buffer - 1 if refill == "arrival" else 0)
    assert np.all(per_version[1:E] == buffer)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_client_is_busy_twice_and_no_slot_is_used_twice(setting):
    found = events(*setting)
    for client in range(N):
        own = found.jobs[found.jobs["client"] == client]
        assert np.all(own["start"][1:] >= own["arrival"][:-1])
        assert len(set(own["version"])) == len(own), "a client starts at most once within a version"
    assert np.all(np.diff(found.times) >= 0)
    schedule, holder = found.schedule, {}
    place = lambda clients, slots: [(int(s), int(c)) for c, s in zip(clients, slots, strict=True) if c < N]
    for group in range(len(schedule.first_clients)):
        holder.update(place(schedule.first_clients[group], schedule.first_slots[group]))
    trained = set()
    for version in range(E):
        for slot, client in place(schedule.train_clients[version], schedule.train_slots[version]):
            assert holder[slot] == client and slot not in trained
            trained.add(slot)
        for slot, client in place(schedule.arrival_clients[version], schedule.arrival_slots[version]):
            assert holder.pop(slot) == client
            trained.remove(slot)  # every upload was trained before it arrives, exactly once
        for slot, client in place(schedule.start_clients[version], schedule.start_slots[version]):
            assert slot not in holder, "a slot is freed before it is filled"
            holder[slot] = client


def by_hand(seconds, versions, clients, **options):
    """The events if the lowest idle clients are chosen and job i takes ``seconds[i]``; and the busy clients by draw."""
    draws = []

    def choose(number, busy, count, history):
        draws.append(np.flatnonzero(busy).tolist())
        return np.flatnonzero(~busy)[:count]

    duration = lambda job, client: float(seconds[job])
    return simulate(versions, num_clients=clients, cohort=2, choose=choose, duration=duration, **options), draws


def test_of_arrivals_at_one_instant_k_come_before_the_update_and_the_others_after_the_new_starts():
    """Three jobs end at 1 s. Two of them make a version at 1 s; two new jobs start; then the third one arrives."""
    found, draws = by_hand([1, 1, 1, 1, 1, 9, 9], 2, 6, in_flight=3, refill="update")
    np.testing.assert_array_equal(found.times, [1.0, 2.0])
    np.testing.assert_array_equal(found.schedule.arrival_clients, [[0, 1], [2, 0]])
    np.testing.assert_array_equal(found.schedule.staleness, [[0, 0], [1, 0]])
    np.testing.assert_array_equal(found.jobs["start"], [0, 0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(found.jobs["version"], [0, 0, 0, 1, 1, 2, 2])
    # Client 2 has returned at 1 s but counts as busy. At 2 s so does client 1, whose job also ends then.
    assert draws == [[], [0, 1], [2], [1]]


def test_with_refill_arrival_a_client_that_returns_after_the_choice_counts_as_busy():
    """Client 2 returns at 4 s, when the second job of version 1 starts. That job's client was chosen at 2 s."""
    found, draws = by_hand([1, 2, 3, 5, 1], 1, 4, in_flight=2, refill="arrival")
    assert draws == [[], [0, 1], [2]]
    np.testing.assert_array_equal(found.times, [2.0])
    np.testing.assert_array_equal(found.jobs["client"], [0, 1, 2, 0])
    np.testing.assert_array_equal(found.jobs["start"], [0, 0, 1, 2])
    np.testing.assert_array_equal(found.schedule.start_clients, [[0, 1]])  # client 1 starts at the next arrival


def test_the_time_of_a_client_that_the_choice_knows_is_the_mean_of_its_jobs():
    """Client 0 needs 2 s and then 4 s. Client 1 has not returned."""
    seconds, known = [2.0, 50.0, 4.0, 1.0, 1.0], []

    def choose(number, busy, count, history):
        known.append(history.seconds.tolist())
        return np.flatnonzero(~busy)[:count]

    simulate(
        2, num_clients=2, in_flight=2, cohort=1, refill="update", choose=choose,
        duration=lambda job, client: seconds[job],
    )  # fmt: skip
    assert known[-2:] == [[2, 0], [3, 0]]


def test_the_unit_of_time_changes_only_the_times():
    one, other = events(6, 3, "arrival"), events(6, 3, "arrival", scale=16.0)
    jax.tree.map(np.testing.assert_array_equal, one.schedule, other.schedule)
    np.testing.assert_array_equal(16 * one.times, other.times)


def test_more_versions_keep_the_earlier_ones():
    short, long = events(6, 3, "arrival", versions=10), events(6, 3, "arrival")
    np.testing.assert_array_equal(short.times, long.times[:10])
    np.testing.assert_array_equal(short.schedule.arrival_clients, long.schedule.arrival_clients[:10])
    np.testing.assert_array_equal(short.schedule.train_clients, long.schedule.train_clients[:10])


def test_waves_hold_several_jobs():
    """With one arrival per version, a wave of exponential durations holds about sqrt(pi M / 2) jobs (birthdays)."""
    random = np.random.default_rng(0)
    durations = random.exponential(1.0, 10_000)
    found = simulate(
        2000, num_clients=400, in_flight=100, cohort=1, refill="arrival",
        choose=lambda number, busy, count, history: random.permutation(np.flatnonzero(~busy))[:count],
        duration=lambda job, client: durations[job],
    )  # fmt: skip
    widths = (found.schedule.train_clients < 400).sum(axis=1)
    mean = widths[widths > 0][1:].mean()  # the first wave holds all M
    assert abs(mean - np.sqrt(np.pi * 100 / 2)) < 1.5


@pytest.mark.parametrize(
    "setting, words",
    [
        ((2, 3, "update"), "in_flight=2 is below cohort=3"),
        ((6, 3, "never"), "refill='never'"),
        ((39, 3, "arrival"), "too few"),
    ],
)
def test_bad_settings_have_one_line(setting, words):
    with pytest.raises(UserError, match=words) as error:
        events(*setting)
    assert "\n" not in str(error.value)


def test_fleets(tmp_path):
    steps = np.full(5, 10)
    for kind in fleet.FLEETS:
        made = fleet.make(kind, 5, batch_size=10, seed=0)
        draws = fleet.draw(jax.random.key(0), np.arange(5))
        seconds = made.durations(np.arange(5), draws, steps=steps, bytes_down=1e6, bytes_up=1e6).total
        assert np.all(np.isfinite(seconds)) and np.all(np.asarray(seconds) > 0)
        if kind == "uniform":
            np.testing.assert_array_equal(seconds, 10)
        if kind == "classes":
            assert sorted(np.asarray(made.seconds)) == [100, 150, 200, 300, 500]
    np.testing.assert_array_equal(fleet.draw(jax.random.key(0), np.arange(9))[:5], draws)
    path = tmp_path / "fleet.csv"
    path.write_text("seconds_per_step,up_rate\n1,100\n2,50\n", encoding="utf-8")
    made = fleet.make(str(path), 2, batch_size=10, seed=0)
    seconds = made.durations(
        np.arange(2), np.zeros((2, 2), np.float32), steps=steps[:2], bytes_down=5.0, bytes_up=100.0
    )
    np.testing.assert_allclose(seconds.total, [11, 22])
    waiting = made._replace(latency=np.array([4.0, 6.0]), seconds=np.array([0.5, 0.0]))
    seconds = waiting.durations(
        np.array([1, 0]), np.zeros((2, 2)), steps=np.array([3, 3]), bytes_down=5.0, bytes_up=100.0
    )
    np.testing.assert_allclose(seconds, [[3, 2], [6, 3.5], [5, 3]])  # half of the latency for each direction
    for text, words in (
        ("speed\n1\n2\n", "unknown column"),
        ("seconds\n1\n", "1 clients"),
        ("seconds\n1\n-2\n", "negative"),
        ("up_rate\n1\n0\n", "up_rate must be above 0"),
        ("seconds\n1\ninf\n", "seconds must be finite"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=words):
            fleet.make(str(path), 2, batch_size=10, seed=0)
    with pytest.raises(UserError, match="fleet"):
        fleet.make("unifrom", 2, batch_size=10, seed=0)
