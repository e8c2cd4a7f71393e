"""The server's clients: their nodes, their admission to the run, and requests to them.

A client's number is set by its operator (``client-id``). With node authentication, a number belongs to the node key
that joined with it first. A client is lost if its reply is late, malformed or not finite; one line reports its number,
and `ClientPolicy` decides what follows. A round never averages over fewer rows.
"""

import collections
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import files, untrusted
from fedjax_mr.deploy import relay, transport
from fedjax_mr.deploy.protocol import Member, RunManifest
from fedjax_mr.deploy.transport import Message, Messenger, NoReply, PendingReplies
from fedjax_mr.deploy.wire import SMALL, Content, one_line
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import REAL_CLIENTS
from fedjax_mr.settings import LARGEST_INT32

SECONDS_BETWEEN_POLLS = transport.POLL_SECONDS
SECONDS_BETWEEN_LINES = 5.0  # while the server waits for the clients of a run to join
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 480.0  # seconds until a node that failed to join is asked again; doubled each time
Handler = Callable[[int, Content | NoReply], None]  # (node, reply) -> None
MAX_INVALID_REPLIES = 3  # of one client in one round, or in a row if clients are asynchronous; then the run ends


@dataclasses.dataclass(frozen=True)
class ClientPolicy:
    """Rules for the clients of a run.

    Attributes:
      lost: action if a client is lost: ``wait`` for it and ask again, continue with it ``untrained``, or ``stop``.
      reply_timeout: seconds allowed for one reply.
      join_timeout: seconds until all clients must have joined at the start; one reply there may take a third of it.
      node_keys: whether a client's number belongs to the node key that first joined with it. Requires node
        authentication; without it, a node has a new key at every start.
    """

    lost: str = "wait"
    reply_timeout: float = 600.0
    join_timeout: float = 300.0
    node_keys: bool = False

    @property
    def join_reply_timeout(self) -> float:
        """Seconds allowed for one reply to ``join`` or ``begin``, so that time is left to retry."""
        return min(self.reply_timeout, self.join_timeout / 3)


class ClientManager:
    """The clients of a run.

    Attributes:
      manifest: the facts about the run in every message.
      members: each client's facts about itself, by its number.
      policy: rules for the clients.
    """

    def __init__(self, messenger: Messenger, manifest: RunManifest, *, num_clients: int, policy: ClientPolicy) -> None:
        """Start without any client.

        Args:
          messenger: sends messages to the nodes.
          manifest: the facts about the run in every message.
          num_clients: N.
          policy: rules for the clients.
        """
        self.manifest, self.policy = manifest, policy
        self.members: dict[int, Member] = {}
        self._owners: dict[int, str] = {}  # the authenticated key of each client's node
        self._messenger, self._record = messenger, manifest.record()
        messenger.on_failure = self._say_failure
        self._num_clients = num_clients
        self._nodes: dict[int, int] = {}  # the node of each client
        self._begin: Content | None = None
        self._begun: set[tuple[int, int]] = set()  # (client, node) pairs that know the federation
        self._open: list[tuple[PendingReplies, Handler]] = []
        self._late: set[int] = set()  # clients whose node did not reply in time; they may have another node now
        self._claiming: set[int] = set()  # nodes that claim a client whose former node is being checked
        # For nodes that failed to join: when to ask again, and the length of the pause.
        self._pauses: dict[int, tuple[float, float]] = {}
        self._asked: dict[int, PendingReplies] = {}  # by client, the message that `ask_some` has sent
        self._attempts: collections.Counter = collections.Counter()
        self._invalid: collections.Counter = collections.Counter()  # replies to `ask_some` in a row, by client
        self._printed: set[str] = set()  # lines that were printed

    # --- admission

    def wait_for_all(self) -> list[Member]:
        """Wait for all N clients at the start of a run, and return their facts about themselves.

        Raises:
          UserError: clients are missing, or one number is claimed twice.
        """
        self._gather(range(self._num_clients), self.policy.join_timeout)
        return [self.members[client] for client in range(self._num_clients)]

    def begin(self, content: Content) -> None:
        """Send the facts of the federation to all clients, and from now on to every client that reconnects."""
        self._begin = content
        self._gather(range(self._num_clients), self.policy.join_timeout)

    def _gather(self, clients: Collection[int], patience: float | None) -> None:
        """Wait until these clients are ready; ``patience`` None waits without limit.

        At the start of a run, which has a limit, lines say how many clients are there.

        Raises:
          UserError: clients are missing after ``patience`` seconds.
        """
        started = reported = self._messenger.now()
        said, silent_until, done = "", started, "have joined" if self._begin is None else "are ready"
        while missing := sorted(set(clients) - self._ready(clients)):
            now = self._messenger.now()
            if patience is not None and now - started > patience:
                raise UserError(
                    f"{len(clients) - len(missing)} of {len(clients)} clients have joined after {patience:g} s; "
                    f"missing: {', '.join(map(str, missing))} (client-id of their nodes; --join_timeout sets how long "
                    f"to wait)"
                )
            line = (
                f"{len(clients) - len(missing)} of {len(clients)} clients {done}; waiting for client-id "
                f"{_listed(missing)}; connected nodes: {len(self._messenger.nodes())}"
            )
            if patience is not None and line != said and now >= silent_until:
                said, silent_until = line, now + SECONDS_BETWEEN_LINES
                self._say(line, again=True)
            if patience is None and now - reported >= self.policy.reply_timeout:
                reported = now
                self._say(f"still waiting for client {', '.join(map(str, missing))}", again=True)
            self._messenger.wait(SECONDS_BETWEEN_POLLS)
        if said:
            self._say(f"all {len(clients)} clients {done}", again=True)

    def _ready_soon(self, clients: Collection[int]) -> set[int]:
        """The clients among these that are ready, after a wait for the replies of new nodes.

        Nodes that failed to join before are not waited for, because a silent one would delay every round.
        """
        while set(clients) - (ready := self._ready(clients)):
            if not any(pending.nodes - self._pauses.keys() for pending, _ in self._open):
                break
            self._messenger.wait(SECONDS_BETWEEN_POLLS)
        return ready & set(clients)

    def _ready(self, clients: Collection[int]) -> set[int]:
        """All clients that are connected and know the federation; does not wait.

        If one of ``clients`` is not among them, or was late, new nodes are asked to join and new clients are sent the
        facts of the federation.
        """
        self._poll()
        if set(clients) - self._prepared() or self._late.intersection(clients):
            connected = set(self._messenger.nodes())
            self._ask_nodes("join", connected - set(self._nodes.values()), self._admit, {})
            self._poll()
            if self._begin is not None:
                new = {self._nodes[each] for each in clients if each in self._nodes} & connected
                begun = {node for _, node in self._begun}
                self._ask_nodes("begin", new - begun, self._mark_begun, self._begin)
            self._poll()
        return self._prepared()

    def _prepared(self) -> set[int]:
        connected = set(self._messenger.nodes())
        there = {client for client, node in self._nodes.items() if node in connected}
        return there if self._begin is None else {each for each in there if (each, self._nodes[each]) in self._begun}

    def _poll(self) -> None:
        """Handle the replies that have arrived."""
        for pending, handle in list(self._open):
            for node, reply in pending.poll().items():
                handle(node, reply)
        self._open = [(pending, handle) for pending, handle in self._open if pending.nodes]

    def _ask_nodes(self, kind: str, nodes: Collection[int], handle: Handler, content: Content) -> None:
        """Send a message to nodes, except those whose reply is awaited and those that failed recently."""
        now, busy = self._messenger.now(), self._claiming.union(*(pending.nodes for pending, _ in self._open))
        due = [node for node in sorted(set(nodes) - busy) if self._pauses.get(node, (now, 0.0))[0] <= now]
        messages = [Message(kind, node, 0, 0, {"run": self._record, **content}) for node in due]
        if messages:
            self._open.append((self._messenger.send(messages, self.policy.join_reply_timeout), handle))

    def _admit(self, node: int, reply: Content | NoReply) -> None:
        """Admit a node's client, or print why not."""
        if isinstance(reply, NoReply):
            self._pause(node, f"node {node} does not join: {reply.reason}")
            return
        try:
            member, owner = self._member(node, reply)
        except UserError as error:
            self._reject(node, str(error))
            return
        other = self._nodes.get(member.client)
        if other is None or other not in self._messenger.nodes():
            self._enter(node, member, owner)
            return

        def after_challenge(_: int, reply: Content | NoReply) -> None:
            self._claiming.discard(node)
            if isinstance(reply, NoReply):
                self._enter(node, member, owner)
            else:
                self._reject(
                    node, f"node {other} already is client {member.client}; each node needs a client-id of its own"
                )

        self._claiming.add(node)
        message = Message("join", other, 0, 1, {"run": self._record})
        self._open.append((self._messenger.send([message], self.policy.join_reply_timeout), after_challenge))

    def _mark_begun(self, node: int, reply: Content | NoReply) -> None:
        for client in [client for client, its in self._nodes.items() if its == node]:
            if isinstance(reply, NoReply):
                self._pause(node, f"client {client} does not begin: {reply.reason}")
            else:
                self._pauses.pop(node, None)
                self._begun.add((client, node))

    def _reject(self, node: int, reason: str) -> None:
        """Print why a node's client is not admitted, here and at the node."""
        reason = one_line(reason)
        message = Message("rejected", node, 0, 0, {"run": self._record, "why": {"line": reason}})
        self._open.append((self._messenger.send([message], self.policy.join_reply_timeout), lambda *_: None))
        self._pause(node, f"node {node} does not join: {reason}")

    def _pause(self, node: int, line: str) -> None:
        """Print what is wrong with a node, and do not ask it again for a pause that doubles each time."""
        self._say(line)
        pause = min(2 * self._pauses.get(node, (0.0, FIRST_PAUSE / 2))[1], LONGEST_PAUSE)
        self._pauses[node] = (self._messenger.now() + pause, pause)

    def _member(self, node: int, reply: Content) -> tuple[Member, str]:
        """A client's facts about itself, checked, and the key of its node.

        Raises:
          UserError: the reply is malformed, or the node is not the client that it claims to be.
        """
        try:
            member = Member.of(
                reply,
                num_clients=self._num_clients,
                num_classes=self.manifest.facts.num_classes,
                counted=self.manifest.label_counts,
            )
        except UserError:
            raise
        except Exception as error:  # broad, as in `_read`
            raise _malformed(error) from None
        client, owner = member.client, self._messenger.owner(node) if self.policy.node_keys else ""
        if self._owners.get(client, owner) != owner:
            raise UserError(f"client {client} joined this run with another node key before")
        if self.members.get(client, member) != member:
            raise UserError(f"client {client} reports other numbers of samples than before in this run")
        others = [each.samples for each in self.members.values() if each.client != client]
        if sum(others) + member.samples > LARGEST_INT32:
            raise UserError(
                f"client {client} reports {member.samples:,} samples; all clients together have at most 2^31 - 1"
            )
        return member, owner

    def _enter(self, node: int, member: Member, owner: str) -> None:
        client = member.client
        self._pauses.pop(node, None)
        self.members[client], self._owners[client], self._nodes[client] = member, owner, node

    # --- requests

    def ask(
        self,
        kind: str,
        round: int,
        contents: Mapping[int, Content],
        read: Callable[[int, Content], Any],
        max_bytes: int = SMALL,
    ) -> dict[int, Any]:
        """Ask clients and return their answers by number. Lost clients are missing if `ClientPolicy` allows it.

        Args:
          kind: kind of the message.
          round: round of the run.
          contents: content of the message to each client.
          read: (client, reply) -> the checked answer; after an error the client counts as lost.
          max_bytes: bytes allowed in one reply.

        Raises:
          UserError: a client is lost and `ClientPolicy` says to stop; or a client's replies are invalid several times.
        """
        answers: dict[int, Any] = {}
        invalid = dict.fromkeys(contents, 0)
        attempt = 0
        while True:
            wanted = [client for client in contents if client not in answers]
            ready = self._ready_soon(wanted)
            asked = [client for client in wanted if client in ready]
            messages = [self._message(kind, client, round, attempt, contents[client]) for client in asked]
            replies = self._messenger.ask(messages, self.policy.reply_timeout, max_bytes) if messages else {}
            moved = {node for node, reply in replies.items() if isinstance(reply, NoReply) and reply.moved}
            lost = {client: "its node is not connected" for client in wanted if client not in asked}
            for client, message in zip(asked, messages, strict=True):
                reply = replies[message.node]
                if message.node in moved:
                    continue
                self._late.discard(client)
                try:
                    if isinstance(reply, NoReply):
                        if not reply.refused:
                            self._late.add(client)
                        else:
                            invalid[client] += 1
                            self._begun.discard((client, message.node))  # its folder may be gone: send the facts again
                        raise UserError(reply.reason)
                    answers[client] = self._read(client, reply, read, invalid)
                except UserError as error:
                    lost[client] = str(error)
            if not lost and not moved:
                return answers
            attempt += 1
            if not lost:
                continue
            for client, reason in lost.items():
                self._say(f"round {round + 1}: lost client {client}: {reason}", again=True)
            if self.policy.lost == "stop":
                first = min(lost)
                raise UserError(f"round {round + 1}: client {first} is lost ({lost[first]}), and --lost=stop")
            if self.policy.lost == "untrained" and answers:
                if not moved:
                    return answers
                # Clients whose node only has another number now are asked again, lost ones are not.
                contents = {client: each for client, each in contents.items() if client not in lost}
                continue
            for client in lost:
                if invalid[client] >= MAX_INVALID_REPLIES:
                    remedy = "--lost=untrained continues without it"
                    if self.policy.lost == "untrained":
                        remedy = "no other client of the round replies, so the round cannot continue"
                    raise UserError(
                        f"round {round + 1}: client {client} sent {invalid[client]} invalid replies ({lost[client]}); "
                        f"{remedy}"
                    )
            self._gather(sorted(lost), None)

    def now(self) -> float:
        """A monotonic time in seconds."""
        return self._messenger.now()

    def ask_some(
        self,
        kind: str,
        contents: Mapping[int, tuple[int, Content]],
        read: Callable[[int, Content], Any],
        count: int,
        max_bytes: int = SMALL,
    ) -> dict[int, Any]:
        """Ask clients, and return the answers by number when at least ``count`` have arrived.

        The others keep their messages: a later call with them waits for the same answers. A client that is lost is
        asked again when it is back. At most one message per client is on its way.

        Args:
          kind: kind of the message.
          contents: round and content of the message to each client.
          read: (client, reply) -> the checked answer; after an error the client counts as lost.
          count: answers to wait for.
          max_bytes: bytes allowed in one reply.

        Raises:
          UserError: a client is lost and `ClientPolicy` says to stop; or a client's replies are invalid several times.
        """
        answers: dict[int, Any] = {}
        away: dict[int, float] = {}  # since when a client that is to be asked is not there
        while True:
            ready = self._ready(contents)
            for client in contents:
                if client in ready or client in self._asked:
                    away.pop(client, None)
                elif self.now() - away.setdefault(client, self.now()) >= self.policy.reply_timeout:
                    self._lose(client, contents[client][0], "its node is not connected")
                    del away[client]
            for client in [each for each in contents if each in ready and each not in self._asked]:
                round, content = contents[client]
                attempt = self._attempts[client, round]
                self._attempts[client, round] += 1
                message = self._message(kind, client, round, attempt, content)
                self._asked[client] = self._messenger.send([message], self.policy.reply_timeout, max_bytes)
            for client in [each for each in contents if each in self._asked]:
                for node, reply in self._asked[client].poll().items():
                    del self._asked[client]
                    answer = self._heard(client, contents[client][0], node, reply, read)
                    if answer is not None:
                        answers[client] = answer
            contents = {client: each for client, each in contents.items() if client not in answers}
            if len(answers) >= count:
                return answers
            self._messenger.wait(SECONDS_BETWEEN_POLLS)

    def _heard(
        self, client: int, round: int, node: int, reply: Content | NoReply, read: Callable[[int, Content], Any]
    ) -> Any:
        """The answer in a reply, or None if the client must be asked again."""
        if isinstance(reply, NoReply) and reply.moved:
            return None
        try:
            if not isinstance(reply, NoReply):
                self._late.discard(client)
                answer = self._read(client, reply, read, self._invalid)
                del self._invalid[client]
                return answer
            if reply.refused:
                self._invalid[client] += 1
                self._begun.discard((client, node))  # its folder may be gone: send the facts again
            else:
                self._late.add(client)
            raise UserError(reply.reason)
        except UserError as error:
            self._lose(client, round, str(error))
            return None

    def _lose(self, client: int, round: int, reason: str) -> None:
        """Print that an asynchronous client is lost.

        Raises:
          UserError: `ClientPolicy` says to stop, or the client's replies were invalid several times.
        """
        line = f"version {round}: lost client {client}: {reason}"
        if self.policy.lost == "stop" or self._invalid[client] >= MAX_INVALID_REPLIES:
            raise UserError(line) from None
        self._say(line, again=True)

    def _read(self, client: int, reply: Content, read: Callable[[int, Content], Any], invalid: dict[int, int]) -> Any:
        try:
            return read(client, reply)
        except UserError as error:
            invalid[client] += 1
            raise UserError(one_line(str(error))) from None
        except Exception as error:  # broad: a client chooses what it answers, and must not end the server with it
            invalid[client] += 1
            raise _malformed(error) from None

    def with_all(
        self, round: int, clients: Sequence[int], once: Callable[[Messenger, Mapping[int, int], int], Any]
    ) -> Any:
        """Run something that needs all clients of a round, again until no client is lost, and return its result.

        Args:
          round: round of the run.
          clients: the cohort.
          once: (messenger, the node of each client in the order of the cohort, number of the attempt) -> the result.
            Numbers of attempts grow, also after a restart of the server.

        Raises:
          UserError: a client is lost and `ClientPolicy` says to stop; or a client's replies are invalid several times.
        """
        attempt, invalid = 0, dict.fromkeys(clients, 0)
        while True:
            self._gather(clients, None)
            attempt = max(attempt + 1, int(time.time()))
            try:
                return once(self._messenger, {client: self._nodes[client] for client in clients}, attempt)
            except relay.ExchangeFailed as failed:
                for client, lost in failed.lost.items():
                    self._say(f"round {round + 1}: lost client {client}: {lost.reason}", again=True)
                    invalid[client] += lost.refused
                    if self.policy.lost == "stop" or invalid[client] >= MAX_INVALID_REPLIES:
                        raise UserError(f"round {round + 1}: client {client} is lost ({lost.reason})") from None

    def _say_failure(self, message: Message, reason: str) -> None:
        """Print that a message to a client has failed and is sent again, and the remedy."""
        for client in [client for client, node in self._nodes.items() if node == message.node]:
            self._say(
                f"client {client}: {reason}; trying again: start its SuperNode again if it has ended",
                again=True,
            )

    def _message(self, kind: str, client: int, round: int, attempt: int, content: Content) -> Message:
        return Message(kind, self._nodes[client], round, attempt, {"run": self._record, **content})

    def _say(self, line: str, *, again: bool = False) -> None:
        """Print a line; without ``again`` only if it was not printed before."""
        if again or line not in self._printed:
            print(f"fedjax-mr: {line}", file=sys.stderr)
        self._printed.add(line)

    # --- the run folder

    def save(self, folder: Path) -> None:
        """Write the clients' facts and node keys into the run folder."""
        content = {
            "run": self.manifest.run,
            "clients": {
                client: self.members[client].record() | {"key": self._owners[client]} for client in self.members
            },
        }
        with files.atomic_write(folder / REAL_CLIENTS) as path:
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore the clients' facts and node keys from the run folder.

        Raises:
          UserError: the file is damaged.
        """
        path = folder / REAL_CLIENTS
        try:
            clients = _read_record(path)["clients"]
        except FileNotFoundError:
            raise UserError(f"{folder} is not a run of real clients: it has no {REAL_CLIENTS}") from None
        facts, counted = self.manifest.facts, self.manifest.label_counts
        for client, record in clients.items():
            try:
                member = Member.of(
                    {"member": record}, num_clients=self._num_clients, num_classes=facts.num_classes, counted=counted
                )
            except UserError as error:
                raise UserError(f"{path} is damaged (client {client}: {error})") from None
            self.members[member.client], self._owners[member.client] = member, record["key"]


def _read_record(path: Path) -> dict[str, Any]:
    """The run's name, and the clients' facts and keys, as `ClientManager.save` has written them.

    Raises:
      FileNotFoundError: there is no such file.
      UserError: the file is damaged.
    """
    return untrusted.read_json(path, {"run": str, "clients": {int: {"key": str}}})


def _listed(clients: Sequence[int]) -> str:
    """The first ten clients in words, and how many more there are."""
    more = f" and {len(clients) - 10} more" if len(clients) > 10 else ""
    return ", ".join(map(str, clients[:10])) + more


def _malformed(error: Exception) -> UserError:
    return UserError(one_line(f"its answer is malformed ({type(error).__name__}: {error})"))


def name_of_run(folder: Path) -> str | None:
    """The name of the run in a run folder, or None if it is not a run of real clients.

    Raises:
      UserError: the file with the name is damaged.
    """
    try:
        return _read_record(folder / REAL_CLIENTS)["run"]
    except FileNotFoundError:
        return None
