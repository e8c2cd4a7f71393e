"""Messages between the server and the nodes of real clients: sent again after errors, until a deadline.

The loop is `Asking`, which `Post` starts; a `Carrier` is what it sends with: Flower's Grid, or `Fake`, which loses,
doubles and spoils replies for tests (flower.py has the first).

Flower's own loop asks every 3 s; this one every 0.3 s. A node's answer to a message that it got twice has to be the
same: clients keep what they answered by round and attempt (keep.py).

Replies are not trusted. A reply that is larger than its question allows is refused before it is read, and a reply that
cannot be read, for whatever reason, is that one node's malformed answer (`Lost`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedjax_mr.deploy.wire import SMALL, Content, one_line
from fedjax_mr.errors import UserError

POLL_SECONDS = 0.3
PAUSE_SECONDS = 2.0  # before a message is sent again after an error
ENVELOPE = "fedjax_mr"  # the record that names a message; in a reply also a refusal


@dataclasses.dataclass(frozen=True)
class Message:
    """One request of the server to one node."""

    kind: str  # a Python identifier
    node: int  # Flower's number of the node
    round: int
    attempt: int
    content: Content


@dataclasses.dataclass(frozen=True)
class Lost:
    """What stands in the place of a reply."""

    reason: str  # one line
    refused: bool = False  # the client said no, or sent something malformed, and would again
    moved: bool = False  # the node is gone, and another has come that may be the same client's


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error that a carrier reports instead of a reply."""

    reason: str
    passing: bool  # whether sending again may help


class Carrier(Protocol):
    """What moves messages."""

    def nodes(self) -> Mapping[int, str]:
        """Return the nodes that are connected, and the public key that each has, in base 64."""
        ...

    def push(self, messages: Sequence[Message], lasting: float) -> Sequence[str]:
        """Send messages that are worth ``lasting`` seconds; return a distinct name for each, "" where it failed."""
        ...

    def pull(self, names: Iterable[str], most: int) -> Mapping[str, Content | Failure | Lost]:
        """Return the replies to the named messages that have come and were not pulled before.

        Args:
          names: of the messages.
          most: bytes of one reply; a larger one is not read but `Lost`.
        """
        ...

    def forget(self, names: Iterable[str]) -> None:
        """Let go of replies to the named messages, which nobody waits for any more."""
        ...

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        ...

    def now(self) -> float:
        """Return a time in seconds that never goes back."""
        ...


class Post:
    """The server's way to its nodes."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def nodes(self) -> list[int]:
        """Return the nodes that are connected now."""
        return list(self._carrier.nodes())

    def owner(self, node: int) -> str:
        """Return the public key of a connected node, in base 64; "" if it is not connected.

        A SuperNode that was given none makes a new one whenever it starts, and gets another number.
        """
        return self._carrier.nodes().get(node, "")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._carrier.wait(seconds)

    def now(self) -> float:
        """Return a time in seconds that never goes back."""
        return self._carrier.now()

    def ask(self, messages: Sequence[Message], timeout: float, most: int = SMALL) -> dict[int, Content | Lost]:
        """Return the reply of every node asked, or why there is none after ``timeout`` seconds; see `Asking`."""
        asking, answers = self.send(messages, timeout, most), {}
        while True:
            answers |= asking.look()
            if not asking.nodes:
                return answers
            self._carrier.wait(POLL_SECONDS)

    def send(self, messages: Sequence[Message], timeout: float, most: int = SMALL) -> "Asking":
        """Ask some nodes without waiting for them; the arguments are those of `Asking`."""
        return Asking(self._carrier, messages, timeout, most)


class Asking:
    """Messages on their way, each until its reply is here or its time is over.

    A message whose node or client program failed is sent again; one that the client refused (a `UserError` there), or
    where its program raised an error, is not. Nor is one whose node is gone if a new node has come since: a SuperNode
    without a key of its own has another number when it comes back.
    """

    def __init__(self, carrier: Carrier, messages: Sequence[Message], timeout: float, most: int) -> None:
        """Send nothing yet: `look` does.

        Args:
          carrier: moves the messages.
          messages: at most one per node.
          timeout: seconds after which a reply is late.
          most: bytes of one reply.
        """
        if len({message.node for message in messages}) != len(messages):
            raise ValueError("one message per node")
        now = carrier.now()
        self._carrier, self._timeout, self._most, self._deadline = carrier, timeout, most, now + timeout
        self._before = set(carrier.nodes())
        self._reasons: dict[int, str] = {}
        self._due = {message.node: (now, message) for message in messages}  # to be sent from then on
        self._sent: dict[str, Message] = {}
        self._open = set(self._due)

    @property
    def nodes(self) -> set[int]:
        """The nodes whose answers `look` has not returned yet."""
        return set(self._open)

    def look(self) -> dict[int, Content | Lost]:
        """Send what is due, and return the answers that have come since the last look, by node."""
        answers: dict[int, Content | Lost] = {}
        self._send()
        for name, reply in self._carrier.pull(list(self._sent), self._most).items():
            message = self._sent.pop(name, None)
            if message is None:  # not a reply to any of these messages
                continue
            found = self._failed(message, reply) if isinstance(reply, Failure) else _opened(reply, message)
            if found is None:
                self._due[message.node] = (self._carrier.now() + PAUSE_SECONDS, message)
            else:
                answers[message.node] = found
        if self._carrier.now() >= self._deadline:
            for node in self._open - answers.keys():
                reason = f" ({self._reasons[node]})" if node in self._reasons else ""
                answers[node] = Lost(f"no reply within {self._timeout:g} s{reason}")
            self._carrier.forget(self._sent)
        self._open -= answers.keys()
        return answers

    def _send(self) -> None:
        now = self._carrier.now()
        ready = [message for when, message in self._due.values() if when <= now]
        names = self._carrier.push(ready, max(self._deadline - now, 1.0))
        for message, name in zip(ready, names, strict=True):
            del self._due[message.node]
            if name:
                self._sent[name] = message
            else:
                self._reasons[message.node] = "the message could not be sent"
                self._due[message.node] = (now + PAUSE_SECONDS, message)

    def _failed(self, message: Message, failure: Failure) -> Lost | None:
        """Return what an error means for its message; None: send it again."""
        reason = self._reasons[message.node] = one_line(failure.reason)
        there = set(self._carrier.nodes())
        if message.node not in there and there - self._before:
            return Lost(f"its node is gone ({reason}), a new one has come", moved=True)
        return None if failure.passing else Lost(reason)


def reply(message: Message, answer: Callable[[Message], Content]) -> Content:
    """Return what a node sends back: the answer, or the line of the `UserError` that it raised, with its envelope."""
    envelope = envelope_of(message)
    try:
        return {**answer(message), ENVELOPE: envelope}
    except UserError as error:
        return {ENVELOPE: {**envelope, "refused": one_line(str(error))}}


def envelope_of(message: Message) -> dict[str, str | int]:
    """Return the record that names a message."""
    return {"kind": message.kind, "round": message.round, "attempt": message.attempt}


def _opened(reply: Content | Lost, message: Message) -> Content | Lost:
    """Return the records of a reply; `Lost` if it is a refusal or malformed."""
    if isinstance(reply, Lost):
        return reply
    try:
        envelope = dict(reply.get(ENVELOPE, {}))
        refused = envelope.pop("refused", None)
        if set(envelope) != {"kind", "round", "attempt"} or envelope != envelope_of(message):
            return Lost("its reply is to another message", refused=True)
        if refused is not None:
            return Lost(one_line(str(refused)), refused=True)
        return {name: record for name, record in reply.items() if name != ENVELOPE}
    except Exception as error:  # broad, as in `malformed`
        return malformed(error)


def malformed(error: Exception) -> Lost:
    """Return the loss of a node whose reply could not be read.

    Its callers catch every exception. A client chooses all bytes of its reply, and the parsers of NumPy, JSON, zip and
    Flower raise many kinds, among them MemoryError; none may end the server, whose other clients did nothing wrong.
    """
    what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return Lost(one_line(f"its reply cannot be read ({what})"), refused=True)


def too_large(most: int) -> UserError:
    """Return the error of a reply that has more bytes than its question allows."""
    return UserError(f"it is larger than the {most:,} bytes that such a reply may have")


# --- For tests -------------------------------------------------------------------------------------------------------

Fault = str | Callable[[Content], Content] | None


def FakePost(  # noqa: N802
    handlers: Mapping[int, Callable[[Message], Content]], faults: Callable[[Message, int], Fault] | None = None
) -> Post:
    """Return a post without processes or Flower, whose time passes at once; for tests.

    Args:
      handlers: the answering function of every node.
      faults: says for a message and how often it was sent before (0, 1, ...) what happens to it: None, "lose" (there
        is never a reply), "gone" (an error comes), "crash" (the node has worked, but an error comes), "double" (the
        node works twice), or a function that spoils the reply.
    """
    return Post(_Fake(handlers, faults or (lambda message, before: None)))


class _Fake:
    def __init__(
        self, handlers: Mapping[int, Callable[[Message], Content]], faults: Callable[[Message, int], Fault]
    ) -> None:
        self._handlers, self._faults = handlers, faults
        self._time, self._count = 0.0, 0
        self._replies: dict[str, Content | Failure] = {}
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
            if fault == "lose":
                continue
            if fault == "gone":
                self._replies[names[-1]] = Failure("node unavailable", passing=True)
                continue
            message = dataclasses.replace(message, content=_copied(message.content))
            answer = reply(message, self._handlers[message.node])
            if fault == "double":
                answer = reply(message, self._handlers[message.node])
            elif fault == "crash":
                self._replies[names[-1]] = Failure("client app crashed", passing=True)
                continue
            answer = _copied(answer)
            self._replies[names[-1]] = fault(answer) if callable(fault) else answer
        return names

    def pull(self, names: Iterable[str], most: int) -> dict[str, Content | Failure | Lost]:
        found: dict[str, Content | Failure | Lost] = {
            name: self._replies.pop(name) for name in list(names) if name in self._replies
        }
        large = [name for name, reply in found.items() if not isinstance(reply, Failure | Lost) and _size(reply) > most]
        return found | {name: malformed(too_large(most)) for name in large}

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._replies.pop(name, None)

    def wait(self, seconds: float) -> None:
        self._time += seconds

    def now(self) -> float:
        return self._time


def _size(content: Any) -> int:
    """Return the bytes of all arrays of a reply, which may be anything."""
    records = [each for each in content.values() if isinstance(each, Mapping)] if isinstance(content, Mapping) else []
    return sum(value.nbytes for record in records for value in record.values() if isinstance(value, np.ndarray))


def _copied(content: Content) -> Content:
    """Return what would come out of the other end, so that no two sides of a test share an array."""
    return {
        name: {key: np.array(value) if isinstance(value, np.ndarray) else value for key, value in record.items()}
        for name, record in content.items()
    }
