"""Messages of real clients without processes, for tests: they can be lost, late, repeated and corrupted."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_mr.deploy.transport import DeliveryFailure, Message, Messenger, NoReply, malformed, reply, too_large
from fedjax_mr.deploy.wire import Content

Fault = str | float | Callable[[Content], Content] | None


def fake_messenger(
    handlers: Mapping[int, Callable[[Message], Content]], faults: Callable[[Message, int], Fault] | None = None
) -> Messenger:
    """A messenger whose time passes instantly.

    Args:
      handlers: the function of each node that answers messages.
      faults: (message, how often it was sent before: 0, 1, ...) -> what happens to it: None, "lose" (no reply ever),
        "unsent" (it cannot be sent), "gone" (an error instead of a reply), "crash" (the node did its work, then an
        error), "double" (the node does its work twice), a number (the reply comes so many seconds later), or a function
        that corrupts the reply.
    """
    return Messenger(_FakeTransport(handlers, faults or (lambda message, before: None)))


class _FakeTransport:
    def __init__(
        self, handlers: Mapping[int, Callable[[Message], Content]], faults: Callable[[Message, int], Fault]
    ) -> None:
        self._handlers, self._faults = handlers, faults
        self._time, self._count = 0.0, 0
        self._times: dict[str, float] = {}  # when replies arrive
        self._replies: dict[str, Content | DeliveryFailure] = {}
        self._sent: dict[tuple[str, int, int, int], int] = {}

    def nodes(self) -> dict[int, str]:
        return dict.fromkeys(self._handlers, "")

    def push(self, messages: Sequence[Message], lasting: float) -> list[str]:
        names = []
        for message in messages:
            self._count += 1
            names.append(str(self._count))
            which = (message.kind, message.node, message.round, message.attempt)
            before = self._sent[which] = self._sent.get(which, -1) + 1
            fault = self._faults(message, before)
            if fault == "unsent":
                names[-1] = ""
                continue
            if fault == "lose":
                continue
            if fault == "gone":
                self._replies[names[-1]] = DeliveryFailure("node unavailable", passing=True)
                continue
            message = dataclasses.replace(message, content=_copied(message.content))
            answer = reply(message, self._handlers[message.node])
            if fault == "double":
                answer = reply(message, self._handlers[message.node])
            elif fault == "crash":
                self._replies[names[-1]] = DeliveryFailure("client app crashed", passing=True)
                continue
            answer = _copied(answer)
            self._replies[names[-1]] = fault(answer) if callable(fault) else answer
            self._times[names[-1]] = self._time + (fault if isinstance(fault, float) else 0.0)
        return names

    def pull(self, names: Iterable[str], max_bytes: int) -> dict[str, Content | DeliveryFailure | NoReply]:
        found: dict[str, Content | DeliveryFailure | NoReply] = {
            name: self._replies.pop(name)
            for name in list(names)
            if name in self._replies and self._times.get(name, 0.0) <= self._time
        }
        large = [
            name
            for name, reply in found.items()
            if not isinstance(reply, DeliveryFailure | NoReply) and _size(reply) > max_bytes
        ]
        return found | {name: malformed(too_large(max_bytes)) for name in large}

    def wait(self, seconds: float) -> None:
        self._time += seconds

    def now(self) -> float:
        return self._time


def _size(content: Any) -> int:
    """The bytes of all arrays in a reply, which may be any object."""
    records = [each for each in content.values() if isinstance(each, Mapping)] if isinstance(content, Mapping) else []
    return sum(value.nbytes for record in records for value in record.values() if isinstance(value, np.ndarray))


def _copied(content: Content) -> Content:
    """A copy of a content, so that the two sides of a test share no array."""
    return {
        name: {key: np.array(value) if isinstance(value, np.ndarray) else value for key, value in record.items()}
        for name, record in content.items()
    }
