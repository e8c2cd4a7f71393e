"""Simulated time: devices of different speed, and asynchronous clients."""

from fedjax_mr.clock.asynchronous import asynchronous, constant, hinge, polynomial
from fedjax_mr.clock.deadline import synchronous, with_late_clients
from fedjax_mr.clock.fleet import Fleet
from fedjax_mr.clock.online import online
from fedjax_mr.clock.schedule import Cohorts, Events, Schedule, simulate

__all__ = [
    "Cohorts",
    "Events",
    "Fleet",
    "Schedule",
    "asynchronous",
    "constant",
    "hinge",
    "online",
    "polynomial",
    "simulate",
    "synchronous",
    "with_late_clients",
]
