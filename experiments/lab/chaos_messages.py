"""Row ``messages`` of chaos.py: secure exchanges in which one message is spoiled."""

import dataclasses
import io
import os
import random
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chaos_runs import World, Wrong
from fedjax_mr.errors import UserError
from fedjax_mr.secure import messages as secure

UNTOUCHED = "the exchange had fewer messages than the one to spoil"
SIZES, CLIENTS = {"conv": 12, "dense": 5}, (0, 1, 2)
ODD = (
    None, True, 1.5, 1j, -1, 2**63, 10**5000, "x", "\ud800", "y" * 10**5, b"", b"x", bytearray(5), (), [], {}, object,
    (None,), ((),), (0,) * 10**5, memoryview(b"x"), io.BytesIO(), np.int64(3), float("nan"),
)  # fmt: skip


@dataclasses.dataclass
class _Chosen:
    """The choices of a party, from a seed."""

    chance: random.Random

    def receivers(self, names: Sequence[str], others: Sequence[int]) -> dict[str, int]:
        return {name: self.chance.choice(others) for name in names if self.chance.random() < 0.7}

    def order(self, name: str, count: int) -> list[int]:
        return self.chance.sample(range(count), count)


def messages(world: World, number: int, folder: Path) -> tuple[int, str]:
    """Exchange layers among three clients and spoil one message."""
    chance = random.Random(f"{world.seed}/messages/{number}")
    target, met, past = chance.randrange(3, 26) if chance.random() < 0.9 else chance.randrange(3), -1, []
    accepted, tried = False, UNTOUCHED

    def deliver(entry: Callable[[Any], Any], message: Any) -> Any:
        """Hand over a message, before it, once, a spoiled one, or after it the same again."""
        nonlocal met, accepted, tried
        met += 1
        again = chance.random() < 0.15 and not isinstance(message, secure.Announcement)
        if met == target:
            old = [earlier for earlier in past if type(earlier) is type(message)]
            spoiled, how = (message, "sent twice") if again else _spoiled(chance, message, old)
            tried = f"message {met}, a {type(message).__name__}, {how}"
            result = entry(message) if again else None
            try:
                other = entry(spoiled)
            except (secure.SecureError, UserError) as error:
                if isinstance(error, UserError) and not isinstance(message, secure.Announcement):
                    raise
                _require_brief(str(error))
            else:
                if again:
                    raise Wrong("a message that came twice was taken twice")
                accepted = True
                return other
            if again:
                return result
        past.append(message)
        return entry(message)

    layers = {client: {name: os.urandom(size) for name, size in SIZES.items()} for client in CLIENTS}
    honest = {name: sorted(layers[client][name] for client in CLIENTS) for name in SIZES}
    try:
        server = secure.SecureServer(SIZES, CLIENTS)
        parties = _before(server, layers, chance)
        past += [party.upload() for party in parties.values()] + [
            message for party in parties.values() for message in party.send()
        ]
        announcement = server.announce(round=number % 2**31 + 1)
        join = lambda client: lambda each: secure.Party(client, layers[client], each, _Chosen(chance))
        parties = {client: deliver(join(client), announcement) for client in CLIENTS}
        for _ in range(2):
            for message in [message for party in parties.values() for message in party.send()]:
                deliver(parties[message.receiver].receive, message)
            for message in [message for party in parties.values() for message in party.give_back()]:
                deliver(parties[message.receiver].take_back, message)
        for party in parties.values():
            deliver(server.receive, party.upload())
        models = server.open()
        if {name: sorted(model[name] for model in models.values()) for name in SIZES} != honest:
            raise Wrong("the server opened other layers than the clients'")
    except secure.SecureError as error:
        _require_brief(str(error))
        if not accepted:
            raise Wrong(f"{tried}: was refused, but the honest exchange after it too:\n{error!r}") from None
    except Exception as error:  # broad: any error other than a SecureError is a failure of the trial
        raise Wrong(f"{tried}: {error if isinstance(error, Wrong) else traceback.format_exc()}") from None
    return int(tried != UNTOUCHED), tried


def _before(server: secure.SecureServer, layers: dict[int, dict[str, bytes]], chance: random.Random) -> dict:
    """The parties of the previous round."""
    announcement = server.announce(round=0)
    return {client: secure.Party(client, layers[client], announcement, _Chosen(chance)) for client in CLIENTS}


def _require_brief(text: str) -> None:
    if "\n" in text or not 0 < len(text) < 300:
        raise Wrong(f"a message of {len(text)} characters:\n{text}")


def _spoiled(chance: random.Random, message: Any, old: list[Any]) -> tuple[Any, str]:
    """A message that differs from this one, and a description of the difference."""
    kind = chance.random()
    if kind < 0.08:
        return chance.choice(ODD), "another object"
    if kind < 0.2 and old:
        return chance.choice(old), "one of before"
    field = chance.choice(dataclasses.fields(message)).name
    value = getattr(message, field)
    if dataclasses.is_dataclass(value) and chance.random() < 0.8:
        inner, how = _spoiled(chance, value, [])
        return dataclasses.replace(message, **{field: inner}), how
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]) and chance.random() < 0.7:
        place = chance.randrange(len(value))
        inner, how = _spoiled(chance, value[place], [])
        return dataclasses.replace(message, **{field: (*value[:place], inner, *value[place + 1 :])}), how
    other, how = chance.choice(_others(chance, value))
    return dataclasses.replace(message, **{field: other}), f"{field} {how}"


def _others(chance: random.Random, value: Any) -> list[tuple[Any, str]]:
    """Other values of the same type and of other types, each with a description."""
    others: list[tuple[Any, str]] = [(chance.choice(ODD), "of another type")]
    if isinstance(value, bytes):
        flipped = bytearray(value)
        flipped[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
        others += [(bytes(flipped), "with a bit flipped")] * 3
        others += [(value[:-1], "cut"), (value + b"x", "with a surplus byte"), (bytearray(value), "a bytearray")]
    elif isinstance(value, tuple):
        others += [
            (value[:-1], "shorter"),
            (value * 2, "twice"),
            (value[::-1], "turned round"),
            (list(value), "a list"),
        ]
    elif isinstance(value, int):
        others += [(value + 1, "one more"), (value - 1, "one less"), (-value - 1, "negative"), (2**64, "huge")]
    elif isinstance(value, str):
        others += [(chance.choice([name for name in SIZES if name != value]), "of another"), (f"{value} ", "longer")]
    return others
