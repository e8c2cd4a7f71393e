"""Flower (flwr): its two apps, and its Grid as the transport of messages (transport.py).

No other file imports Flower, and this one uses only its public modules: ``flwr.app``, ``flwr.clientapp`` and
``flwr.serverapp``. The others see the records of wire.py.
"""

import contextlib
import io
import logging
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
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
from fedjax_mr.deploy.wire import Content, Record, one_line
from fedjax_mr.errors import LostError, UserError

MAX_RECORDS = 16  # in one message; this package sends at most five
SECONDS_WITHOUT_SUPERLINK = 45.0  # until the server ends itself


def client_app(answer: Callable[[Message, Mapping[str, Any], Mapping[str, Any]], Content]) -> Any:
    """Make Flower's ClientApp, which answers every message with ``answer(message, node_config, run_config)``.

    Raises:
      UserError: flwr is not installed.
    """
    flower = _flower()
    app = flower.clientapp.ClientApp()

    @app.query()
    def answer_one(received: Any, context: Any) -> Any:
        message = _received(received)
        if isinstance(message, UserError):  # its envelope cannot be read, so the reply has none
            content: Content = {ENVELOPE: {"refused": one_line(str(message))}}
        else:
            content = reply(message, lambda message: answer(message, context.node_config, context.run_config))
        return flower.app.Message(_records(content), reply_to=received)

    return app


def server_app(serve: Callable[[Messenger, Mapping[str, Any]], None]) -> Any:
    """Make Flower's ServerApp, which runs ``serve(messenger, run_config)``; a `UserError` there is one line of its log.

    Raises:
      UserError: flwr is not installed.
    """
    app = _flower().serverapp.ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        logging.getLogger("flwr").addFilter(_without_traceback)
        threading.Thread(target=_watch, args=(grid, SECONDS_WITHOUT_SUPERLINK), daemon=True).start()
        serve(flower_messenger(grid), context.run_config)

    return app


def flower_messenger(grid: Any) -> Messenger:
    """A `Messenger` that sends through Flower's Grid."""
    return Messenger(_FlowerTransport(grid))


def _watch(grid: Any, seconds: float) -> None:
    """End this process if the SuperLink does not answer for so many seconds; Flower would try for ever.

    The user reads about it in the terminal of ``flwr run``. Flower shows no line of this process without a SuperLink.
    """

    def end() -> None:
        line = "lost the SuperLink: start it and its nodes again; the same flwr run goes on from the last checkpoint"
        print(f"fedjax-mr: {line}", file=sys.stderr, flush=True)
        os._exit(LostError.exit_code)

    while True:
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            grid.get_node_ids()
        except Exception:  # broad: the run has ended, or the main thread meets the same error
            return
        finally:
            timer.cancel()
        time.sleep(seconds / 6)


class _FlowerTransport:
    """Flower's Grid as a transport.

    Replies are pulled one by one, so that Flower's error about a reply that cannot be read concerns one client, and the
    other replies are not lost. Flower waits up to three minutes for the rest of a reply whose node has stopped in the
    middle of sending it.
    """

    def __init__(self, grid: Any) -> None:
        self._grid, self._app = grid, _flower().app

    def nodes(self) -> dict[int, str]:
        lines = {node.node_id: bytes(node.public_key).decode().splitlines() for node in self._grid.get_nodes()}
        return {node: "".join(each[1:-1]) for node, each in lines.items()}  # of PEM

    def push(self, messages: Sequence[Message], lasting: float) -> list[str]:
        made = [
            self._app.Message(
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
        replies: dict[str, Content | DeliveryFailure | NoReply] = {}
        for name in names:
            try:
                with _limited_memory(6 * max_bytes + _BESIDE):  # Flower holds a reply up to five times at once
                    for message in self._grid.pull_messages([name]):
                        replies[name] = _reply(message, max_bytes)
            except Exception as error:  # broad: see `transport.malformed`
                self._grid.get_node_ids()  # raises if the SuperLink is out of reach, which is no client's fault
                replies[name] = malformed(error)
        return replies

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def now(self) -> float:
        return time.monotonic()


_BESIDE = 2**28  # bytes of memory for threads and connections while a reply is read


@contextlib.contextmanager
def _limited_memory(size: int) -> Iterator[None]:
    """Let this process take at most ``size`` more bytes of memory, and then raise `MemoryError`.

    Flower reads replies of any size, and joins an array from parts that may repeat, so that a few bytes become many.
    """
    pages = Path("/proc/self/statm")
    if not pages.exists():  # not Linux
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(pages.read_text().split()[5]) * resource.getpagesize() + size
    limits = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([most, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# Flower's errors that sending a message again does not help, by the code of `flwr.app.Error`.
_LASTING = {1: "the client's app cannot be loaded", 2: "the client's app failed", 7: "the client rejects the app"}
_PASSING = {3: "message unavailable", 4: "reply message unavailable", 5: "node unavailable", 8: "client app crashed"}


def _reply(message: Any, max_bytes: int) -> Content | DeliveryFailure:
    """The records of a reply, or Flower's error in its place.

    Raises:
      UserError: the reply is larger than allowed, or damaged.
    """
    if not message.has_error():
        return _content(message.content, max_bytes)
    code, reason = message.error.code, str(message.error.reason or "").strip()
    if code in _PASSING:
        return DeliveryFailure(_PASSING[code], passing=True)
    name = _LASTING.get(code, f"Flower's error {code}")
    return DeliveryFailure(f"{name}: {reason.splitlines()[-1]}" if reason else name, passing=code not in _LASTING)


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
    app, records = _flower().app, {}
    for name, record in content.items():
        if record and all(isinstance(value, np.ndarray) for value in record.values()):
            records[name] = app.ArrayRecord({each: app.Array(value) for each, value in record.items()})
        else:
            records[name] = app.ConfigRecord(dict(record))
    return app.RecordDict(records)


def _content(records: Any, max_bytes: float = math.inf) -> dict[str, Record]:
    """The records of a message.

    Args:
      records: Flower's records; nothing about them is trusted.
      max_bytes: bytes allowed in all arrays together; one array may have several names.

    Raises:
      UserError: there are more records or bytes than allowed, or an array is damaged.
    """
    arrays, content = _flower().app.ArrayRecord, {}
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
    """Flower's package. Imported late: only real clients need it."""
    try:
        import flwr.app  # pyright: ignore[reportMissingImports]
        import flwr.clientapp  # pyright: ignore[reportMissingImports]
        import flwr.serverapp  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"real clients need flwr ({error}): pip install -c constraints-deploy.txt 'fedjax_mr[deploy]'"
        ) from None
    return flwr
