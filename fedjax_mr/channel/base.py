"""The channel: what happens to messages between a client's training and the server's update.

Compression, clipping and noise, attacks, robust screening and an exchange of layers among clients are *links* of a
channel. `channel` adds them to any strategy, also to those with several models, and returns a strategy.

What a link sees. Of everything that a client uploads, the *values* are the floating-point arrays that training
produced: the parameters of models, and all other float arrays (control variates, prototypes, logits). The
*reference* has the same structure: the parameters that the client received, and zeros elsewhere. Their difference is
what compression, clipping and robust rules work on. BatchNorm statistics and integers pass unchanged: a variance that
is rounded or extrapolated could become negative.

Order. A channel lists its links from the server to the network: robust rules, attacks, privacy, compression, exchange.
The clients' sides run in this order, and the servers' sides in the opposite order, like the layers of a network
protocol. So messages are compressed last and decompressed first, attackers need not clip or add noise, and robust rules
see what the server sees. An exchange of layers happens between the two sides, and before the training, too, if asked
for: the engine simulates it, and real clients send each other envelopes that the server relays and cannot read.

With neutral numbers (no attackers, no outliers, zero noise, a norm that is never reached), a link returns the values
bit for bit.

Refused messages. A client whose message was refused shall be as if it had not taken part. In SCAFFOLD and its relatives
a client's memory and the server's state change by the same upload. If only the memory did, they would drift apart until
the training diverges. So the server tells the client at its next contact, and the client first restores the memory that
it had before, of the strategy and of the links (error feedback). The strategy's memory is kept if it has a personal
model, because that is in it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData, Samples, one_client
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.strategies import interface, parts
from fedjax_mr.strategies.interface import Cohort, Combine, Info, LayerExchange, Memory, Payload, Problem, Strategy
from fedjax_mr.strategies.traffic import Traffic

ORDER = ("robust", "attack", "privacy", "compression", "exchange")
"""The kinds of links, from the server to the network. Other kinds stand before the compression, in order of names."""
NOTES = "channel"  # entry of payloads and uploads with what the links tell each other beside the values
ENCODED = "encoded"  # entry of uploads that replaces the values after compression

Values = dict[str, Any]


class Context(NamedTuple):
    """What a link knows besides the values. At the client: scalars. At the server: ``client`` has shape [K]."""

    key: jax.Array  # for this link alone, in this round
    round: jax.Array  # int32
    client: jax.Array  # client ids, int32
    note: Any = None  # at the client, what the server's side announced; at the server, what the clients sent [K, ...]


class Sent(NamedTuple):
    """What ONE client's side of a link returns."""

    values: Values  # with the structure of the values received; after compression, what travels in their place
    memory: Memory = None  # for the next round in which this client trains
    note: Any = None  # for the server's side of this link; sent beside the values
    # Scalars, reported as means over the cohort. They are not sent.
    info: Info = {}  # noqa: RUF012  # never changed in place, and JAX's trees need a dict


class ClientSide(Protocol):
    """The client's side of a link, for ONE client."""

    def __call__(self, values: Values, reference: Values, memory: Memory, context: Context) -> Sent: ...


class ServerSide(Protocol):
    """The server's side of a link, for the K clients of a round: -> (state of the link, values [K, ...], info)."""

    def __call__(self, state: Any, values: Values, reference: Values, context: Context) -> tuple[Any, Values, Info]: ...


class Link(NamedTuple):
    """One stage of a channel as pure functions. Only ``kind`` is required."""

    kind: str
    """One of `ORDER`, or another name. A channel has at most one link of each kind."""
    client: ClientSide | None = None
    """Default: the values pass unchanged."""
    server: ServerSide | None = None
    """Default: the values pass unchanged."""
    init: Callable[[jax.Array], Any] | None = None
    """key -> the state that the server keeps for the link. Default: None."""
    init_memory: Callable[[Values], Memory] | None = None
    """Shapes of a client's values -> what the client keeps for the link. Default: nothing."""
    announce: Callable[[Any, jax.Array], Any] | None = None
    """(state of the link, client id) -> what the server tells ONE client before it trains. Default: nothing."""
    data: Callable[[ClientData, Context], ClientData] | None = None
    """Change the data on which ONE client trains. Default: they stay the same."""
    down: Callable[[Payload, jax.Array], Payload] | None = None
    """Encode the payload of ONE client on the server. Default: it is sent as it is."""
    open: Callable[[Payload], Payload] | None = None
    """The inverse of ``down``, at the client."""
    exchange: LayerExchange | None = None
    """What the K clients exchange among themselves, without the server. Such a link has neither of the two sides."""
    neighbours: Combine | None = None
    """What the clients of a method without a server do in place of the server's side. Default: the same as a server."""
    check: Callable[[Strategy, Problem], None] | None = None
    """Raise a `UserError` if the link cannot work with a strategy. Default: it works with every strategy."""
    excludes: tuple[tuple[str, str], ...] = ()
    """Pairs of another kind of link that must not be in the same channel, and the reason with a remedy."""
    encodes: bool = False
    """Whether the client's side returns a message with another structure than the values."""
    refuses: bool = False
    """Whether the server may refuse whole messages. The state is then which clients' last message was refused [N] bool,
    and ``announce`` tells each client. The state is None where neither strategy nor links have a memory to restore."""


class State(NamedTuple):
    """The states of the inner strategy and of the links."""

    inner: interface.State
    links: tuple[Any, ...]


class ClientMemory(NamedTuple):
    """What one client keeps for the inner strategy and for the links."""

    inner: Memory
    links: tuple[Memory, ...]
    before: Memory = None  # ``inner`` before the last message, if that may be refused
    links_before: Memory = None  # ``links`` before it


def channel(inner: Strategy, problem: Problem, links: Sequence[Link]) -> Strategy:
    """Send the messages of a strategy through links.

    Args:
      inner: the strategy.
      problem: the problem of the inner strategy.
      links: at most one of each kind, in any order.

    Returns:
      The strategy, or ``inner`` itself if there are no links.

    Raises:
      UserError: two links of the same kind; clients with different networks; or as `Link.check`. Tracing a round
        raises it if clients upload nothing.
    """
    links = tuple(sorted(links, key=lambda link: _place(link.kind)))
    if not links:
        return inner
    kinds = [link.kind for link in links]
    if twice := [kind for kind in kinds if kinds.count(kind) > 1]:
        raise UserError(f"a channel has at most one link of each kind, but there are several for {twice[0]}")
    if len(problem.model.networks) > 1:
        raise UserError("clients with different networks have no channel: pass a single network in model=")
    for link in reversed(links):  # the exchange first, because others may refuse a strategy with one
        for kind, reason in link.excludes:
            if kind in kinds:
                raise UserError(reason)
        if link.neighbours is not None and inner.neighbours is not None:
            inner = inner._replace(server_update=inner.neighbours(link.neighbours))
        if link.check is not None:
            link.check(inner, problem)
        if link.exchange is not None:
            inner = _exchanging(inner, link.exchange)
    without_server = inner.neighbours is not None
    links = tuple(link for link in links if link.exchange is None and not (link.neighbours and without_server))
    return _Channel(inner, problem, links).strategy() if links else inner


def _place(kind: str) -> tuple[float, str]:
    return (ORDER.index(kind), "") if kind in ORDER else (ORDER.index("compression") - 0.5, kind)


def _exchanging(inner: Strategy, exchange: LayerExchange) -> Strategy:
    """The strategy whose clients exchange layers, with the traffic of the exchange beside its own."""

    def traffic(usual: Traffic, state: interface.State, uploads: Payload, cohort: Cohort, round: jax.Array) -> Traffic:
        counted = inner.traffic(usual, state, uploads, cohort, round) if inner.traffic else usual
        return counted._replace(peer=(*counted.peer, exchange.parcels(uploads["model"])))

    return inner._replace(exchange=exchange, traffic=traffic)


class _Channel:
    """The members of the strategy that `channel` returns."""

    def __init__(self, inner: Strategy, problem: Problem, links: tuple[Link, ...]) -> None:
        # The clients' memories that a refused message must not change: of the strategy, of the links, of any of them.
        may_refuse = any(link.refuses for link in links)
        self.restores_inner = may_refuse and inner.init_memory is not None and inner.personal_model is None
        self.restores_links = may_refuse and any(link.init_memory for link in links)
        self.restores = self.restores_inner or self.restores_links
        if not self.restores:
            stateless = lambda link: link._replace(init=None, announce=None) if link.refuses else link
            links = tuple(map(stateless, links))
        self.inner, self.problem, self.links = inner, problem, links

    def strategy(self) -> Strategy:
        inner, outer = self.inner, parts.lifted(self.inner)
        remembers = inner.init_memory is not None or any(link.init_memory for link in self.links)

        def personal_model(part: Any, memory: Memory, data: ClientData, key: jax.Array) -> Any:
            assert outer.personal_model is not None
            return outer.personal_model(part, memory.inner if remembers else None, data, key)

        def traffic(usual: Traffic, state: State, uploads: Payload, cohort: Cohort, round: jax.Array) -> Any:
            assert outer.traffic is not None
            return outer.traffic(usual, state, {k: v for k, v in uploads.items() if k != NOTES}, cohort, round)

        return outer._replace(
            init=self.init,
            dispatch=self.dispatch,
            client_update=self.client_update,
            receive=self.receive,
            init_memory=self.init_memory if remembers else None,
            traffic=traffic if inner.traffic else None,
            personal_model=personal_model if inner.personal_model else None,
        )

    # --- the server, before the clients train

    def init(self, key: jax.Array) -> State:
        states = (
            link.init(jax.random.fold_in(key, number)) if link.init else None for number, link in self._numbered()
        )
        return State(self.inner.init(key), tuple(states))

    def dispatch(self, state: State, cohort: Cohort, key: jax.Array) -> Payload:
        payload = self.inner.dispatch(state.inner, cohort, key)
        for number, link in self._numbered():
            if link.down is not None:
                keys = jax.random.split(jax.random.fold_in(key, number), self.problem.cohort_size)
                payload = jax.vmap(link.down)(payload, keys)
        notes = {
            link.kind: jax.vmap(link.announce, in_axes=(None, 0))(own, cohort.ids)
            for link, own in zip(self.links, state.links, strict=True)
            if link.announce
        }
        return payload | ({NOTES: notes} if notes else {})

    def _opened(self, payload: Payload) -> tuple[Payload, dict[str, Any]]:
        """The payload of the inner strategy, and the announcements of the links by kind. ONE client."""
        notes = payload.get(NOTES, {})
        payload = {name: each for name, each in payload.items() if name != NOTES}
        for link in reversed(self.links):
            if link.open is not None:
                payload = link.open(payload)
        return payload, notes

    # --- one client

    def client_update(
        self, payload: Payload, memory: Memory, data: ClientData, round: jax.Array, key: jax.Array
    ) -> tuple[Payload, Memory, local.Metrics]:
        payload, notes = self._opened(payload)
        context = lambda number, note: Context(_link_key(key, number), round, data.client_id, note)
        for number, link in self._numbered():
            if link.data is not None:
                data = link.data(data, context(number, None))
        before, links_before = (None, None) if memory is None else (memory.inner, memory.links)
        if self.restores:
            (refused,) = (notes[link.kind] for link in self.links if link.refuses)
            assert memory is not None
            if self.restores_inner:
                before = trees.where(refused, memory.before, memory.inner)
            if self.restores_links:
                links_before = trees.where(refused, memory.links_before, memory.links)
        upload, own, metrics = self.inner.client_update(payload, before, data, round, key)
        values, others = split(upload)
        if not values:
            raise UserError("the clients of this strategy upload no floating-point numbers, so a channel is useless")
        reference = received(values, others, payload)
        memories, sent_notes, info = [], {}, dict(metrics.info)
        for number, link in self._numbered():
            sent = Sent(values, None if links_before is None else links_before[number])
            if link.client is not None:
                sent = link.client(values, reference, sent.memory, context(number, notes.get(link.kind)))
            values = sent.values
            memories.append(sent.memory)
            sent_notes |= {} if sent.note is None else {link.kind: sent.note}
            info |= sent.info
        message = others | {ENCODED: values} if self._encoded else joined(values, others)
        message |= {NOTES: sent_notes} if sent_notes else {}
        kept = None
        if memory is not None:
            kept = ClientMemory(
                own,
                tuple(memories),
                before if self.restores_inner else None,
                links_before if self.restores_links else None,
            )
        return message, kept, metrics._replace(info=info)

    def init_memory(self, key: jax.Array, client_id: jax.Array) -> ClientMemory:
        own = None if self.inner.init_memory is None else self.inner.init_memory(key, client_id)
        values = self._shapes_of_values() if any(link.init_memory for link in self.links) else {}
        memories = tuple(link.init_memory(values) if link.init_memory else None for link in self.links)
        return ClientMemory(
            own, memories, own if self.restores_inner else None, memories if self.restores_links else None
        )

    def _shapes_of_values(self) -> Values:
        return split(upload_shapes(self.inner, self.problem))[0]

    # --- the server, after the clients have trained

    def receive(
        self, state: State, messages: Payload, payloads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[State, Payload, Info]:
        notes = messages.get(NOTES, {})
        uploads = {name: each for name, each in messages.items() if name != NOTES}
        opened = jax.vmap(lambda payload: self._opened(payload)[0])(payloads) if payloads else payloads
        if self._encoded:
            values, others = uploads[ENCODED], {name: each for name, each in uploads.items() if name != ENCODED}
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((self.problem.cohort_size, *leaf.shape), leaf.dtype),
                self._shapes_of_values(),
            )
            reference = received(shapes, others, opened)
        else:
            values, others = split(uploads)
            reference = received(values, others, opened)
        states, infos = list(state.links), {}
        for number, link in reversed(list(self._numbered())):
            if link.server is not None:
                context = Context(_link_key(key, number), round, cohort.ids, notes.get(link.kind))
                before = states[number]
                states[number], values, info = link.server(before, values, reference, context)
                infos |= info
                if link.refuses and self.restores:
                    # A client without samples (late, or a lost real client) has sent nothing that could be refused.
                    refused, ids = states[number], cohort.ids
                    states[number] = refused.at[ids].set(jnp.where(cohort.sizes == 0, before[ids], refused[ids]))
                    restored = {name: jax.vmap(trees.where)(states[number][cohort.ids], reference[name], values[name])
                                for name in self.inner.increments}  # fmt: skip
                    values = values | restored
        return state._replace(links=tuple(states)), joined(values, others), infos

    @property
    def _encoded(self) -> bool:
        return any(link.encodes for link in self.links)

    def _numbered(self) -> Sequence[tuple[int, Link]]:
        return tuple(enumerate(self.links))


def _link_key(key: jax.Array, number: int) -> jax.Array:
    """The key of a link. No strategy folds in such a large number."""
    return jax.random.fold_in(key, 2**31 + number)


# --- What links see of a message --------------------------------------------------------------------------------------


def split(upload: Payload) -> tuple[Values, Payload]:
    """Split an upload into its values and everything else; `joined` is the inverse.

    Values are entries with float arrays only. Of a model with all its collections, only the parameters are values.
    """
    values: Values = {}
    others: Payload = {}
    for name, each in upload.items():
        trained = each["params"] if _is_model(each) else each
        leaves = jax.tree.leaves(trained)
        if leaves and all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
            values[name] = trained
            if _is_model(each):
                others[name] = {collection: tree for collection, tree in each.items() if collection != "params"}
        else:
            others[name] = each
    return values, others


def joined(values: Values, others: Payload) -> Payload:
    """The upload that `split` split."""
    models = {name: {"params": values[name], **others[name]} for name in values if name in others}
    return others | values | models


def received(values: Values, others: Payload, payload: Payload) -> Values:
    """The reference of an upload: for its models, those that the client received under the same names; else zeros.

    Raises:
      UserError: the client uploads a model, but received none of this name and shape.
    """
    references = {}
    for name, each in values.items():
        sent = payload.get(name)
        known = sent["params"] if sent is not None and _is_model(sent) else None
        if jax.tree.map(jnp.shape, known) != jax.tree.map(jnp.shape, each):
            if name in others:
                raise UserError(
                    f"a channel needs the change of a model, but clients upload {name!r} and do not receive it"
                )
            known = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), each)
        references[name] = known
    return references


def _is_model(entry: Any) -> bool:
    return isinstance(entry, Mapping) and "params" in entry


def payload_shapes(strategy: Strategy, problem: Problem) -> Payload:
    """The shapes of what ONE client is sent. Nothing is computed."""
    return jax.eval_shape(lambda: _first_payload(strategy, problem))


def _first_payload(strategy: Strategy, problem: Problem) -> Payload:
    key = random_key(0)
    cohort = Cohort(jnp.arange(problem.cohort_size, dtype=jnp.int32), problem.sizes[: problem.cohort_size])
    return jax.tree.map(lambda leaf: leaf[0], strategy.dispatch(strategy.init(key), cohort, key))


def upload_shapes(strategy: Strategy, problem: Problem) -> Payload:
    """The shapes of ONE client's upload. Nothing is computed."""
    model, key = problem.model, random_key(0)
    x = jnp.zeros((1, *model.input_shape), model.input_dtype)
    y = jnp.zeros((1, *model.task.target_shape(model.input_shape)), model.task.dtype)
    samples = Samples(x, y, jnp.ones(1), jnp.zeros(1))

    def upload() -> Payload:
        payload = _first_payload(strategy, problem)
        memory = None if strategy.init_memory is None else strategy.init_memory(key, jnp.int32(0))
        data = one_client(samples)
        return strategy.client_update(payload, memory, data, jnp.int32(0), key)[0]

    return jax.eval_shape(upload)
