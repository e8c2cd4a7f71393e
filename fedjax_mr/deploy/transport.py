"""Messages from the server to the nodes of real clients, sent again after errors until a deadline.

`PendingReplies` is the loop, and `Messenger` starts it. A `Transport` moves the messages: Flower's Grid (flower.py), or
one for tests that loses, repeats and corrupts replies (`fedjax_mr.testing.messages`).

Flower's own loop polls every 3 s; this one every 0.3 s. A node that receives a message twice must give the same answer
twice: clients store their answers by round and attempt (storage.py).

Replies are not trusted. A reply that is larger than allowed, or cannot be read for whatever reason, counts as a
malformed answer of that node (`NoReply`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from fedjax_mr.deploy.wire import SMALL, Content, one_line
from fedjax_mr.errors import UserError

POLL_SECONDS = 0.3
PAUSE_SECONDS = 2.0  # between an error and the next attempt to send a message
ENVELOPE = "fedjax_mr"  # the record that identifies a message; in a reply it also holds a refusal


@dataclasses.dataclass(frozen=True)
class Message:
    """One request of the server to one node."""

    kind: str  # a Python identifier
    node: int  # Flower's number of the node
    round: int
    attempt: int
    content: Content


@dataclasses.dataclass(frozen=True)
class NoReply:
    """The reason why there is no usable reply."""

    reason: str  # one line
    refused: bool = False  # the client refused, or its reply is malformed; asking again would not help
    moved: bool = False  # the node has disconnected, and a new one, perhaps of the same client, has connected


@dataclasses.dataclass(frozen=True)
class DeliveryFailure:
    """An error that the transport reports instead of a reply."""

    reason: str
    passing: bool  # whether sending the message again may help


class Transport(Protocol):
    """Moves messages to nodes and replies back."""

    def nodes(self) -> Mapping[int, str]:
        """The connected nodes and their public keys in base 64."""
        ...

    def push(self, messages: Sequence[Message], lasting: float) -> Sequence[str]:
        """Send messages that expire after ``lasting`` seconds; return an identifier for each, "" where it failed."""
        ...

    def pull(self, names: Iterable[str], max_bytes: int) -> Mapping[str, Content | DeliveryFailure | NoReply]:
        """The replies to some messages that have arrived and were not pulled before.

        Args:
          names: identifiers of the messages.
          max_bytes: bytes allowed in one reply; a larger one is `NoReply`.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        ...

    def now(self) -> float:
        """A monotonic time in seconds."""
        ...


class Messenger:
    """Sends the server's messages to nodes and collects their replies.

    Attributes:
      on_failure: called with a message and the reason when it first fails, before it is sent again.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.on_failure: Callable[[Message, str], None] = lambda message, reason: None

    def nodes(self) -> list[int]:
        """The nodes that are connected now."""
        return list(self._transport.nodes())

    def owner(self, node: int) -> str:
        """The public key of a node in base 64, or "" if it is not connected.

        A SuperNode that is started without a key creates a new one, and gets a new number.
        """
        return self._transport.nodes().get(node, "")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._transport.wait(seconds)

    def now(self) -> float:
        """A monotonic time in seconds."""
        return self._transport.now()

    def ask(self, messages: Sequence[Message], timeout: float, max_bytes: int = SMALL) -> dict[int, Content | NoReply]:
        """The reply of each node, or the reason why there is none after ``timeout`` seconds; see `PendingReplies`."""
        asking, answers = self.send(messages, timeout, max_bytes), {}
        while True:
            answers |= asking.poll()
            if not asking.nodes:
                return answers
            self._transport.wait(POLL_SECONDS)

    def send(self, messages: Sequence[Message], timeout: float, max_bytes: int = SMALL) -> "PendingReplies":
        """Send messages without waiting for the replies; the arguments are those of `PendingReplies`."""
        return PendingReplies(self._transport, messages, timeout, max_bytes, self.on_failure)


class PendingReplies:
    """Messages whose replies are awaited until a deadline.

    A message is sent again if it could not be sent, if its node was unavailable or the client's process crashed. It is
    not sent again if the client refused it (a `UserError` there) or its program raised another error, nor if the node
    has disconnected and a new node has connected since: a SuperNode without a key of its own gets a new number when it
    restarts. A SuperNode that ends by Ctrl-C is removed from the SuperLink, so messages to it cannot be sent at all.
    """

    def __init__(
        self,
        transport: Transport,
        messages: Sequence[Message],
        timeout: float,
        max_bytes: int,
        on_failure: Callable[[Message, str], None],
    ) -> None:
        """Prepare the messages; `poll` sends them.

        Args:
          transport: moves the messages.
          messages: at most one per node.
          timeout: seconds allowed for a reply.
          max_bytes: bytes allowed in one reply.
          on_failure: as in `Messenger`.
        """
        if len({message.node for message in messages}) != len(messages):
            raise ValueError("one message per node")
        now = transport.now()
        self._transport, self._timeout, self._most, self._deadline = transport, timeout, max_bytes, now + timeout
        self._before = set(transport.nodes())
        self._reasons: dict[int, str] = {}
        self._due = {message.node: (now, message) for message in messages}  # when to send each message
        self._sent: dict[str, Message] = {}
        self._open = set(self._due)
        self._on_failure = on_failure

    @property
    def nodes(self) -> set[int]:
        """The nodes whose replies `poll` has not returned yet."""
        return set(self._open)

    def poll(self) -> dict[int, Content | NoReply]:
        """Send the messages that are due, and return the replies that have arrived since the last call, by node."""
        answers: dict[int, Content | NoReply] = {**self._send()}
        for name, reply in self._transport.pull(list(self._sent), self._most).items():
            message = self._sent.pop(name, None)
            if message is None:  # a reply to another message
                continue
            found = self._failed(message, reply) if isinstance(reply, DeliveryFailure) else _opened(reply, message)
            if found is None:
                self._due[message.node] = (self._transport.now() + PAUSE_SECONDS, message)
            else:
                answers[message.node] = found
        if self._transport.now() >= self._deadline:
            for node in self._open - answers.keys():
                reason = f" ({self._reasons[node]})" if node in self._reasons else ""
                answers[node] = NoReply(f"no reply within {self._timeout:g} s{reason}")
        self._open -= answers.keys()
        return answers

    def _send(self) -> dict[int, NoReply]:
        """Send the messages that are due, and return the nodes that are not tried again, with the reason."""
        now, given_up = self._transport.now(), {}
        ready = [message for when, message in self._due.values() if when <= now]
        names = self._transport.push(ready, max(self._deadline - now, 1.0))
        for message, name in zip(ready, names, strict=True):
            del self._due[message.node]
            if name:
                self._sent[name] = message
            elif found := self._failed(message, DeliveryFailure("the message could not be sent", passing=True)):
                given_up[message.node] = found
            else:
                self._due[message.node] = (now + PAUSE_SECONDS, message)
        return given_up

    def _failed(self, message: Message, failure: DeliveryFailure) -> NoReply | None:
        """The consequence of an error for its message: None to send it again."""
        reason, first = one_line(failure.reason), message.node not in self._reasons
        self._reasons[message.node] = reason
        there = set(self._transport.nodes())
        if message.node not in there and there - self._before:
            return NoReply(f"its node has disconnected ({reason}), and a new one has connected", moved=True)
        if not failure.passing:
            return NoReply(reason)
        if first:
            self._on_failure(message, reason)
        return None


def reply(message: Message, answer: Callable[[Message], Content]) -> Content:
    """The reply of a node: the answer, or the message of the `UserError` that ``answer`` raised, with its envelope."""
    envelope = envelope_of(message)
    try:
        return {**answer(message), ENVELOPE: envelope}
    except UserError as error:
        return {ENVELOPE: {**envelope, "refused": one_line(str(error))}}


def envelope_of(message: Message) -> dict[str, str | int]:
    """The record that identifies a message."""
    return {"kind": message.kind, "round": message.round, "attempt": message.attempt}


def _opened(reply: Content | NoReply, message: Message) -> Content | NoReply:
    """The records of a reply, or `NoReply` if it is a refusal or malformed."""
    if isinstance(reply, NoReply):
        return reply
    try:
        envelope = dict(reply.get(ENVELOPE, {}))
        refused = envelope.pop("refused", None)
        if set(envelope) != {"kind", "round", "attempt"} or envelope != envelope_of(message):
            return NoReply("its reply answers another message", refused=True)
        if refused is not None:
            return NoReply(one_line(str(refused)), refused=True)
        return {name: record for name, record in reply.items() if name != ENVELOPE}
    except Exception as error:  # broad, as in `malformed`
        return malformed(error)


def malformed(error: Exception) -> NoReply:
    """The `NoReply` of a node whose reply cannot be read.

    Callers catch every exception. A client chooses all bytes of its reply, and the parsers of NumPy, JSON, zip and
    Flower raise many kinds of errors, among them MemoryError. None of them may stop the server for the other clients.
    """
    what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return NoReply(one_line(f"its reply cannot be read ({what})"), refused=True)


def too_large(max_bytes: int) -> UserError:
    """The error about a reply that has more bytes than allowed."""
    return UserError(f"it is larger than the {max_bytes:,} bytes allowed for this reply")
