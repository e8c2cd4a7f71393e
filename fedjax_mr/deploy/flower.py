"""Flower (flwr 1.41): its two apps, and its Grid as the transport of messages (transport.py).

No other file imports Flower. The others see the records of wire.py.
"""

import dataclasses
import io
import json
import logging
import math
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_mr.data import npz
from fedjax_mr.deploy.transport import (
    ENVELOPE,
    DeliveryFailure,
    Message,
    Messenger,
    NoReply,
    envelope_of,
    malformed,
    reply,
    too_large,
)
from fedjax_mr.deploy.wire import SMALL, Content, Record, one_line
from fedjax_mr.errors import UserError

MAX_RECORDS = 16  # in one message; this package sends at most five


def client_app(answer: Callable[[Message, Mapping[str, Any], Mapping[str, Any]], Content]) -> Any:
    """Make Flower's ClientApp, which answers every message with ``answer(message, node_config, run_config)``.

    Raises:
      UserError: flwr is not installed.
    """
    flower = _flower()
    app = flower.ClientApp()

    @app.query()
    def answer_one(received: Any, context: Any) -> Any:
        message = _received(received)
        if isinstance(message, UserError):  # its envelope cannot be read, so the reply has none
            content: Content = {ENVELOPE: {"refused": one_line(str(message))}}
        else:
            content = reply(message, lambda message: answer(message, context.node_config, context.run_config))
        return flower.Message(_records(content), reply_to=received)

    return app


def server_app(serve: Callable[[Messenger, Mapping[str, Any]], None]) -> Any:
    """Make Flower's ServerApp, which runs ``serve(messenger, run_config)``; a `UserError` there is one line of its log.

    Raises:
      UserError: flwr is not installed.
    """
    app = _flower().ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        logging.getLogger("flwr").addFilter(_without_traceback)
        serve(flower_messenger(grid), context.run_config)

    return app


def flower_messenger(grid: Any) -> Messenger:
    """A `Messenger` that sends through Flower's Grid."""
    return Messenger(_FlowerTransport(grid))


class _FlowerTransport:
    """Flower's Grid as a transport.

    Replies are pulled object by object instead of by ``grid.pull_messages``, which reads replies of any size, waits up
    to three minutes for a node that stops in the middle of its reply, and loses all replies if one is damaged.
    """

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._module = _flower()
        self._runtime = grid._runtime_client
        self._runtime._client.event_hooks["response"].append(self._refuse_large)
        self._coming: dict[str, _Coming] = {}  # replies that are not complete yet, by message
        self._room: int | None = None  # bytes allowed in the next object

    def nodes(self) -> dict[int, str]:
        lines = {node.node_id: bytes(node.public_key).decode().splitlines() for node in self._grid.get_nodes()}
        return {node: "".join(each[1:-1]) for node, each in lines.items()}  # of PEM

    def push(self, messages: Sequence[Message], lasting: float) -> list[str]:
        made = [
            self._module.Message(
                _records({**message.content, ENVELOPE: envelope_of(message)}),
                message.node,
                "query",
                ttl=lasting + 60,  # so that a reply at the last moment is not refused for its age
                group_id=str(message.round),
            )
            for message in messages
        ]
        return [name or "" for name in self._grid.push_messages(made)] if made else []

    def pull(self, names: Iterable[str], max_bytes: int) -> dict[str, Content | DeliveryFailure | NoReply]:
        wanted = set(names)
        if unknown := sorted(wanted - self._coming.keys()):
            found = self._runtime.PullMessages(self._module.PullAppMessagesRequest(message_ids=unknown))
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                if (name := message.metadata.reply_to_message_id) in wanted:
                    self._coming[name] = _Coming(message.metadata.message_id, tree, {})
        replies: dict[str, Content | DeliveryFailure | NoReply] = {}
        for name in wanted & self._coming.keys():
            coming = self._coming[name]
            try:
                found = self._reply(coming, max_bytes)
            except self._module.TransportError:  # the SuperLink is unreachable, which is no client's fault
                raise
            except Exception as error:  # broad: see `transport.malformed`
                found = malformed(error)
            if found is not None:
                replies[name] = found
                del self._coming[name]
                self._confirm(coming)
        return replies

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            if coming := self._coming.pop(name, None):
                self._confirm(coming)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def now(self) -> float:
        return time.monotonic()

    def _reply(self, coming: "_Coming", max_bytes: int) -> Content | DeliveryFailure | None:
        """A reply, or None if some of its objects have not arrived yet.

        Raises:
          UserError: the reply is larger than allowed.
          Exception: of any kind: the reply is malformed.
        """
        flower, objects = self._module, coming.objects
        wanted = list(dict.fromkeys(each.object_id for each in flower.iterate_object_tree(coming.tree)))
        if len(wanted) * _LEAST_OBJECT > max_bytes:
            raise too_large(max_bytes)
        for name in wanted:
            if name in objects:
                continue
            request = flower.PullObjectRequest(node=self._grid.node, run_id=self._grid.run.run_id, object_id=name)
            self._room = max_bytes - sum(map(len, objects.values()))
            try:
                found = self._runtime.PullObject(request)
            except _TooLarge:
                raise too_large(max_bytes) from None
            finally:
                self._room = None
            if not found.object_found:
                return DeliveryFailure("the node has not sent all of its reply", passing=True)
            if not found.object_available:
                return None
            objects[name] = found.object_content
        if _inflated(flower, objects) > max_bytes:
            raise too_large(max_bytes)
        message = flower.inflate_object_from_contents(coming.message, objects)
        if not message.has_error():
            return _content(message.content, max_bytes)
        codes = flower.ErrorCode
        names = {code: name for name, code in vars(codes).items() if isinstance(code, int)}
        lasting = {codes.LOAD_CLIENT_APP_EXCEPTION, codes.CLIENT_APP_RAISED_EXCEPTION, codes.INVALID_FAB}
        name = names.get(message.error.code, str(message.error.code)).lower().replace("_", " ")
        last = (str(message.error.reason or "").strip().splitlines() or [""])[-1]
        return DeliveryFailure(f"{name}{': ' if last else ''}{last}", passing=message.error.code not in lasting)

    def _refuse_large(self, response: Any) -> None:
        """Reject a response of the SuperLink by its announced length, before its content is read."""
        if self._room is not None and int(response.headers.get("content-length", math.inf)) > self._room + SMALL:
            raise _TooLarge

    def _confirm(self, coming: "_Coming") -> None:
        """Let the SuperLink delete a reply."""
        self._runtime.ConfirmMessageReceived(
            self._module.ConfirmMessageReceivedRequest(
                node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=coming.message
            )
        )


_LEAST_OBJECT = 2**12  # bytes; smaller objects of a reply count as many, because each costs a request


class _TooLarge(Exception):
    """A reply is larger than allowed."""


@dataclasses.dataclass(frozen=True)
class _Coming:
    """A reply that the SuperLink has announced."""

    message: str  # identifier of its outermost object
    tree: Any  # the identifiers of its objects
    objects: dict[str, bytes]  # the objects pulled so far


def _inflated(flower: Any, objects: Mapping[str, bytes]) -> int:
    """The bytes of all arrays in a reply; an array may contain the same chunk any number of times."""
    total = 0
    for content in objects.values():
        kind, chunks, _ = flower.get_object_head_values_from_object_content(content)
        if kind == "Array":
            body = json.loads(flower.get_object_body(content, flower.Array))
            total += sum(len(objects[chunks[place]]) for place in body["arraychunk_ids"])
    return total


def _received(message: Any) -> Message | UserError:
    """The server's message, or a `UserError` that says what is wrong with it."""
    try:
        content = _content(message.content)
        envelope = dict(content.pop(ENVELOPE, {}))
        kind, round, attempt = (envelope[name] for name in ("kind", "round", "attempt"))
        if (type(kind), type(round), type(attempt)) != (str, int, int):
            raise KeyError
    except KeyError:
        return UserError("the message is not one of this package")
    except Exception as error:  # broad: the server chooses all bytes, as in `transport.malformed`
        return UserError(f"the message cannot be read ({type(error).__name__}: {one_line(str(error))})")
    return Message(kind, message.metadata.dst_node_id, round, attempt, content)


def _records(content: Content) -> Any:
    flower, records = _flower(), {}
    for name, record in content.items():
        if record and all(isinstance(value, np.ndarray) for value in record.values()):
            records[name] = flower.ArrayRecord({each: flower.Array(value) for each, value in record.items()})
        else:
            records[name] = flower.ConfigRecord(dict(record))
    return flower.RecordDict(records)


def _content(records: Any, max_bytes: float = math.inf) -> dict[str, Record]:
    """The records of a message.

    Args:
      records: Flower's records; nothing about them is trusted.
      max_bytes: bytes allowed in all arrays together; one array may have several names.

    Raises:
      UserError: there are more records or bytes than allowed, or an array is damaged.
    """
    arrays, content = _flower().ArrayRecord, {}
    if len(records) > MAX_RECORDS:
        raise UserError(f"it has {len(records)} records")
    size = sum(len(each.data) for record in records.values() if isinstance(record, arrays) for each in record.values())
    if size > max_bytes:
        raise too_large(int(max_bytes))
    for name, record in records.items():
        if isinstance(record, arrays):
            content[name] = {each: _array(each, value.data) for each, value in record.items()}
        else:
            content[name] = dict(record)
    return content


def _array(name: str, data: bytes) -> np.ndarray:
    """Read the array in .npy data.

    Raises:
      UserError: the header does not match the length of the data, or they hold something other than numbers.
    """
    try:
        array = npz.read_array(io.BytesIO(data), name="it", size=len(data))
    except Exception as error:  # broad, as in `transport.malformed`: the sender chooses all bytes
        raise UserError(f"the array {name[:80]!r} is damaged: {error}") from None
    if array.dtype.kind not in "biufc":
        raise UserError(f"the array {name[:80]!r} holds {array.dtype} instead of numbers")
    return array


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(error := record.exc_info[1], UserError):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True


def _flower() -> Any:
    """The names of flwr that this file uses. Imported late: only real clients need flwr."""
    try:
        import flwr.app  # pyright: ignore[reportMissingImports]
        import flwr.clientapp  # pyright: ignore[reportMissingImports]
        import flwr.common.constant  # pyright: ignore[reportMissingImports]
        import flwr.proto.message_pb2  # pyright: ignore[reportMissingImports]
        import flwr.proto.runtime_pb2  # pyright: ignore[reportMissingImports]
        import flwr.serverapp  # pyright: ignore[reportMissingImports]
        import flwr.supercore.inflatable.inflatable_object as objects  # pyright: ignore[reportMissingImports]
        import flwr.supercore.inflatable.inflatable_utils as inflating  # pyright: ignore[reportMissingImports]
        import httpx  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "real clients need flwr 1.41: pip install -c constraints-deploy.txt 'fedjax_mr[deploy]'"
        ) from None
    return types.SimpleNamespace(
        **{name: getattr(flwr.app, name) for name in ("Array", "ArrayRecord", "ConfigRecord", "Message", "RecordDict")},
        ClientApp=flwr.clientapp.ClientApp,
        ServerApp=flwr.serverapp.ServerApp,
        ErrorCode=flwr.common.constant.ErrorCode,
        PullAppMessagesRequest=flwr.proto.runtime_pb2.PullAppMessagesRequest,
        PullObjectRequest=flwr.proto.message_pb2.PullObjectRequest,
        ConfirmMessageReceivedRequest=flwr.proto.message_pb2.ConfirmMessageReceivedRequest,
        iterate_object_tree=objects.iterate_object_tree,
        get_object_body=objects.get_object_body,
        get_object_head_values_from_object_content=objects.get_object_head_values_from_object_content,
        inflate_object_from_contents=inflating.inflate_object_from_contents,
        TransportError=httpx.TransportError,
    )
