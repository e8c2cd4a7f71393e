"""Simulated time: devices of different speed, and asynchronous clients."""

from fedjax_mr.clock.asynchronous import asynchronous, constant, hinge, polynomial
from fedjax_mr.clock.fleet import Fleet
from fedjax_mr.clock.schedule import Events, Schedule, simulate

__all__ = ["Events", "Fleet", "Schedule", "asynchronous", "constant", "hinge", "polynomial", "simulate"]
