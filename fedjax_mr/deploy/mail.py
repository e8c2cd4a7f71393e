"""Messages between the server and the nodes of real clients: sent again after errors, until a deadline.

The loop is `Post`; a `Carrier` is what it sends with: Flower's Grid, or `Fake`, which loses, doubles and spoils replies
for tests. This file alone knows Flower (flwr 1.41): all else sees the records of wire.py.

Flower's own loop asks every 3 s; this one every 0.3 s. A node's answer to a message that it got twice has to be the
same: clients keep what they answered by round and attempt (keep.py).
"""

import contextlib
import dataclasses
import logging
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedjax_mr.deploy.wire import Content, Record
from fedjax_mr.errors import UserError

POLL_SECONDS = 0.3
PAUSE_SECONDS = 2.0  # before a message is sent again after an error
_ENVELOPE = "fedjax_mr"  # the record that names a message; in a reply also a refusal


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

    def pull(self, names: Iterable[str]) -> Mapping[str, Content | Failure]:
        """Return the replies to the named messages that have come and were not pulled before."""
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

    def ask(self, messages: Sequence[Message], timeout: float) -> dict[int, Content | Lost]:
        """Return the reply of every node asked, or why there is none after ``timeout`` seconds.

        At most one message per node. A message whose node or client program failed is sent again; one that the client
        refused (a `UserError` there), or where its program raised an error, is not. Nor is one whose node is gone if
        a new node has come since: a SuperNode without a key of its own has another number when it comes back.
        """
        if len({message.node for message in messages}) != len(messages):
            raise ValueError("one message per node")
        deadline, before = self._carrier.now() + timeout, set(self._carrier.nodes())
        answers: dict[int, Content | Lost] = {}
        reasons: dict[int, str] = {}
        due = {message.node: (self._carrier.now(), message) for message in messages}  # to be sent from then on
        sent: dict[str, Message] = {}
        while True:
            now = self._carrier.now()
            ready = [message for when, message in due.values() if when <= now]
            for message, name in zip(ready, self._carrier.push(ready, max(deadline - now, 1.0)), strict=True):
                del due[message.node]
                if name:
                    sent[name] = message
                else:
                    reasons[message.node] = "the message could not be sent"
                    due[message.node] = (now + PAUSE_SECONDS, message)
            for name, reply in self._carrier.pull(sent).items():
                message = sent.pop(name)
                if isinstance(reply, Failure):
                    reasons[message.node] = reply.reason
                    there = set(self._carrier.nodes())
                    if message.node not in there and there - before:
                        answers[message.node] = Lost(
                            f"its node is gone ({reply.reason}), a new one has come", moved=True
                        )
                    elif reply.passing:
                        due[message.node] = (self._carrier.now() + PAUSE_SECONDS, message)
                    else:
                        answers[message.node] = Lost(reply.reason)
                else:
                    answers[message.node] = _opened(reply, message)
            if len(answers) == len(messages):
                return answers
            if self._carrier.now() >= deadline:
                late = {message.node for message in messages} - answers.keys()
                return answers | {
                    node: Lost(f"no reply within {timeout:g} s" + (f" ({reasons[node]})" if node in reasons else ""))
                    for node in late
                }
            self._carrier.wait(POLL_SECONDS)


def reply(message: Message, answer: Callable[[Message], Content]) -> Content:
    """Return what a node sends back: the answer, or the line of the `UserError` that it raised, with its envelope."""
    envelope = _envelope(message)
    try:
        return {**answer(message), _ENVELOPE: envelope}
    except UserError as error:
        return {_ENVELOPE: {**envelope, "refused": str(error)}}


def _envelope(message: Message) -> dict[str, str | int]:
    return {"kind": message.kind, "round": message.round, "attempt": message.attempt}


def _opened(reply: Content, message: Message) -> Content | Lost:
    envelope = dict(reply.get(_ENVELOPE, {}))
    refused = envelope.pop("refused", None)
    if envelope != _envelope(message):
        return Lost("its reply is to another message")
    if refused is not None:
        return Lost(str(refused), refused=True)
    return {name: record for name, record in reply.items() if name != _ENVELOPE}


# --- Flower ----------------------------------------------------------------------------------------------------------


def client_app(answer: Callable[[Message, Mapping[str, Any], Mapping[str, Any]], Content]) -> Any:
    """Return Flower's ClientApp that answers every message with ``answer(message, node_config, run_config)``.

    Raises:
      UserError: flwr is not installed.
    """
    flower = _flower()
    app = flower.ClientApp()

    @app.query()
    def answer_one(received: Any, context: Any) -> Any:
        message = _received(received)
        content = reply(message, lambda message: answer(message, context.node_config, context.run_config))
        return flower.Message(_records(content), reply_to=received)

    return app


def server_app(serve: Callable[[Post, Mapping[str, Any]], None]) -> Any:
    """Return Flower's ServerApp that runs ``serve(post, run_config)``; a `UserError` there is one line of its log.

    Raises:
      UserError: flwr is not installed.
    """
    app = _flower().ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        logging.getLogger("flwr").addFilter(_without_traceback)
        serve(FlowerPost(grid), context.run_config)

    return app


def FlowerPost(grid: Any) -> Post:  # noqa: N802 - reads as the kind of post that it makes
    """Return the post that goes through Flower's Grid."""
    return Post(_Flower(grid))


class _Flower:
    """Flower's Grid as a carrier."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._module = _flower()

    def nodes(self) -> dict[int, str]:
        lines = {node.node_id: bytes(node.public_key).decode().splitlines() for node in self._grid.get_nodes()}
        return {node: "".join(each[1:-1]) for node, each in lines.items()}  # of PEM

    def push(self, messages: Sequence[Message], lasting: float) -> list[str]:
        made = [
            self._module.Message(
                _records({**message.content, _ENVELOPE: _envelope(message)}),
                message.node,
                "query",
                ttl=lasting + 60,  # so that a reply at the last moment is not refused for its age
                group_id=str(message.round),
            )
            for message in messages
        ]
        return [name or "" for name in self._grid.push_messages(made)] if made else []

    def pull(self, names: Iterable[str]) -> dict[str, Content | Failure]:
        wanted = list(names)
        pulled = self._grid.pull_messages(wanted) if wanted else []
        return {message.metadata.reply_to_message_id: self._reply(message) for message in pulled}

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def now(self) -> float:
        return time.monotonic()

    def _reply(self, message: Any) -> Content | Failure:
        if message.has_error():
            codes = self._module.ErrorCode
            names = {code: name for name, code in vars(codes).items() if isinstance(code, int)}
            lasting = {codes.LOAD_CLIENT_APP_EXCEPTION, codes.CLIENT_APP_RAISED_EXCEPTION, codes.INVALID_FAB}
            name = names.get(message.error.code, str(message.error.code)).lower().replace("_", " ")
            last = (str(message.error.reason or "").strip().splitlines() or [""])[-1]
            return Failure(f"{name}{': ' if last else ''}{last}", passing=message.error.code not in lasting)
        return _content(message.content)


def _received(message: Any) -> Message:
    content = _content(message.content)
    envelope = content.pop(_ENVELOPE, {})
    try:
        kind, round, attempt = (envelope[name] for name in ("kind", "round", "attempt"))
    except KeyError:
        raise UserError("a message that is none of this package's") from None
    return Message(str(kind), message.metadata.dst_node_id, int(round), int(attempt), content)


def _records(content: Content) -> Any:
    flower, records = _flower(), {}
    for name, record in content.items():
        if record and all(isinstance(value, np.ndarray) for value in record.values()):
            records[name] = flower.ArrayRecord({each: flower.Array(value) for each, value in record.items()})
        else:
            records[name] = flower.ConfigRecord(dict(record))
    return flower.RecordDict(records)


def _content(records: Any) -> dict[str, Record]:
    """Return the records of a message; one that cannot be read is left out, and so missed by who needs it."""
    arrays, content = _flower().ArrayRecord, {}
    for name, record in records.items():
        with contextlib.suppress(ValueError, TypeError, EOFError):
            content[name] = (
                {each: value.numpy() for each, value in record.items()} if isinstance(record, arrays) else dict(record)
            )
    return content


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(error := record.exc_info[1], UserError):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True


def _flower() -> Any:
    """Return the names of flwr that are used here; only real clients need it."""
    try:
        import flwr.app  # pyright: ignore[reportMissingImports]
        import flwr.clientapp  # pyright: ignore[reportMissingImports]
        import flwr.common.constant  # pyright: ignore[reportMissingImports]
        import flwr.serverapp  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "real clients need flwr 1.41: pip install -c constraints-deploy.txt 'fedjax_mr[deploy]'"
        ) from None
    return types.SimpleNamespace(
        **{name: getattr(flwr.app, name) for name in ("Array", "ArrayRecord", "ConfigRecord", "Message", "RecordDict")},
        ClientApp=flwr.clientapp.ClientApp,
        ServerApp=flwr.serverapp.ServerApp,
        ErrorCode=flwr.common.constant.ErrorCode,
    )


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

    def pull(self, names: Iterable[str]) -> dict[str, Content | Failure]:
        return {name: self._replies.pop(name) for name in list(names) if name in self._replies}

    def wait(self, seconds: float) -> None:
        self._time += seconds

    def now(self) -> float:
        return self._time


def _copied(content: Content) -> Content:
    """Return what would come out of the other end, so that no two sides of a test share an array."""
    return {
        name: {key: np.array(value) if isinstance(value, np.ndarray) else value for key, value in record.items()}
        for name, record in content.items()
    }
