"""The server's clients: who is there, by which node, and what comes of asking them.

A client has the number that its own operator gave it (``client-id``). Where nodes are authenticated, the number belongs
to the key that first had it. A client whose reply is late, malformed or not finite is lost, and a line says so by its
number; what then happens, the terms say. No round is ever a mean over fewer rows.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr.data import files
from fedjax_mr.deploy import mail, relay
from fedjax_mr.deploy.facts import Member, Request
from fedjax_mr.deploy.mail import Asking, Lost, Message, Post
from fedjax_mr.deploy.wire import SMALL, Content, one_line
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import REAL_CLIENTS
from fedjax_mr.strategies.hyper import LARGEST_INT32

SECONDS_BETWEEN_LOOKS = mail.POLL_SECONDS
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 480.0  # seconds before a node that did not join is asked again, doubled every time
MOST_FALSE_REPLIES = 3  # of one client in one round, before the run ends for it


@dataclasses.dataclass(frozen=True)
class Terms:
    """What is expected of clients.

    Attributes:
      lost: what follows if a client is lost: ``wait`` for it and ask again, go on with it ``untrained``, or ``stop``.
      reply_timeout: seconds for one reply.
      join_timeout: seconds for all clients to come at the start; a third of it is the time for one answer there.
      node_keys: whether a client's number belongs to the key of the node that first had it. Without node authentication
        a node has a new key at every start.
    """

    lost: str = "wait"
    reply_timeout: float = 600.0
    join_timeout: float = 300.0
    node_keys: bool = False

    @property
    def at_the_roll_call(self) -> float:
        """Seconds for one answer there: a client that dies while it sends its own leaves time to ask again."""
        return min(self.reply_timeout, self.join_timeout / 3)


class Roll:
    """The clients of a run.

    Attributes:
      request: what every message says of the run.
      members: what each client told of itself, by its number.
      terms: what is expected of them.
    """

    def __init__(self, post: Post, request: Request, *, num_clients: int, terms: Terms) -> None:
        """Know nobody yet.

        Args:
          post: the way to the nodes.
          request: what every message says of the run.
          num_clients: N.
          terms: what is expected.
        """
        self.request, self.terms = request, terms
        self.members: dict[int, Member] = {}
        self._owners: dict[int, str] = {}  # the key that each client's node proved to have
        self._post, self._record = post, request.record()
        self._num_clients = num_clients
        self._nodes: dict[int, int] = {}  # of each client
        self._begin: Content | None = None
        self._begun: set[tuple[int, int]] = set()  # clients and nodes that know the federation
        self._open: list[tuple[Asking, Callable[[int, Content | Lost], None]]] = []  # and what follows from an answer
        self._late: set[int] = set()  # clients whose node did not answer in time; another node may be theirs now
        self._claims: set[int] = set()  # nodes that say to be a client whose former node is being asked
        self._pauses: dict[
            int, tuple[float, float]
        ] = {}  # of nodes that did not join: when to ask again, and the pause
        self._told: set[str] = set()  # lines that were printed

    # --- who is there

    def everybody(self) -> list[Member]:
        """Return what all N clients told of themselves, having waited for them; at the start of a run.

        Raises:
          UserError: some did not come, or one number is claimed twice.
        """
        self._gather(range(self._num_clients), self.terms.join_timeout)
        return [self.members[client] for client in range(self._num_clients)]

    def begin(self, content: Content) -> None:
        """Tell all clients the facts of the federation, and from now on those that come anew."""
        self._begin = content
        self._gather(range(self._num_clients), self.terms.join_timeout)

    def _gather(self, clients: Collection[int], patience: float | None) -> None:
        """Wait until these clients are connected and know what they need; None: however long it takes.

        Raises:
          UserError: some did not come in ``patience`` seconds.
        """
        started = told = self._post.now()
        while missing := sorted(set(clients) - self._ready(clients)):
            now = self._post.now()
            if patience is not None and now - started > patience:
                raise UserError(
                    f"{len(clients) - len(missing)} of {len(clients)} clients are there after {patience:g} s; missing: "
                    f"{', '.join(map(str, missing))} (their nodes' client-id; --join_timeout is how long to wait)"
                )
            if patience is None and now - told >= self.terms.reply_timeout:
                told = now
                self._say(f"still waiting for client {', '.join(map(str, missing))}", again=True)
            self._post.wait(SECONDS_BETWEEN_LOOKS)

    def _ready_soon(self, clients: Collection[int]) -> set[int]:
        """Return those of some clients that are connected and know what they need, after a wait for new nodes.

        A node that failed to join before is not waited for, or a silent one would delay every round.
        """
        while set(clients) - (ready := self._ready(clients)):
            if not any(asking.nodes - self._pauses.keys() for asking, _ in self._open):
                break
            self._post.wait(SECONDS_BETWEEN_LOOKS)
        return ready & set(clients)

    def _ready(self, clients: Collection[int]) -> set[int]:
        """Return all clients that are connected and know what they need.

        While one of the given clients is not among them, or was late, nodes that are new are asked who they are and
        clients that are new are told what they need. Nobody is waited for here.
        """
        self._look()
        if set(clients) - self._prepared() or self._late.intersection(clients):
            connected = set(self._post.nodes())
            self._ask_nodes("join", connected - set(self._nodes.values()), self._joined, {})
            self._look()
            if self._begin is not None:
                new = {self._nodes[each] for each in clients if each in self._nodes} & connected
                begun = {node for _, node in self._begun}
                self._ask_nodes("begin", new - begun, self._has_begun, self._begin)
            self._look()
        return self._prepared()

    def _prepared(self) -> set[int]:
        connected = set(self._post.nodes())
        there = {client for client, node in self._nodes.items() if node in connected}
        return there if self._begin is None else {each for each in there if (each, self._nodes[each]) in self._begun}

    def _look(self) -> None:
        """Take note of the answers that have come."""
        for asking, then in list(self._open):
            for node, reply in asking.look().items():
                then(node, reply)
        self._open = [(asking, then) for asking, then in self._open if asking.nodes]

    def _ask_nodes(
        self, kind: str, nodes: Collection[int], then: Callable[[int, Content | Lost], None], content: Content
    ) -> None:
        """Ask nodes, except those that have not answered yet or failed a short while ago."""
        now, busy = self._post.now(), self._claims.union(*(asking.nodes for asking, _ in self._open))
        due = [node for node in sorted(set(nodes) - busy) if self._pauses.get(node, (now, 0.0))[0] <= now]
        messages = [Message(kind, node, 0, 0, {"run": self._record, **content}) for node in due]
        if messages:
            self._open.append((self._post.send(messages, self.terms.at_the_roll_call), then))

    def _joined(self, node: int, reply: Content | Lost) -> None:
        """Enter a node's client into the roll, or say why not."""
        try:
            if isinstance(reply, Lost):
                raise UserError(reply.reason)
            member, owner = self._member(node, reply)
        except UserError as error:
            self._pause(node, f"node {node} does not join: {one_line(str(error))}")
            return
        other = self._nodes.get(member.client)
        if other is None or other not in self._post.nodes():
            self._enter(node, member, owner)
            return

        def challenged(_: int, reply: Content | Lost) -> None:
            self._claims.discard(node)
            if isinstance(reply, Lost):
                self._enter(node, member, owner)
            else:
                claim = f"client {member.client} is already there, by node {other}: each needs a client-id of its own"
                self._pause(node, f"node {node} does not join: {claim}")

        self._claims.add(node)
        message = Message("join", other, 0, 1, {"run": self._record})
        self._open.append((self._post.send([message], self.terms.at_the_roll_call), challenged))

    def _has_begun(self, node: int, reply: Content | Lost) -> None:
        for client in [client for client, its in self._nodes.items() if its == node]:
            if isinstance(reply, Lost):
                self._pause(node, f"client {client} does not begin: {reply.reason}")
            else:
                self._pauses.pop(node, None)
                self._begun.add((client, node))

    def _pause(self, node: int, line: str) -> None:
        """Say what is wrong with a node, and leave it alone for a while that doubles every time."""
        self._say(line)
        pause = min(2 * self._pauses.get(node, (0.0, FIRST_PAUSE / 2))[1], LONGEST_PAUSE)
        self._pauses[node] = (self._post.now() + pause, pause)

    def _member(self, node: int, reply: Content) -> tuple[Member, str]:
        """Return what a node's client tells of itself, and the key that its node has.

        Raises:
          UserError: its answer is malformed, or it is not the client that it says.
        """
        try:
            member = Member.of(
                reply,
                num_clients=self._num_clients,
                num_classes=self.request.facts.num_classes,
                counted=self.request.label_counts,
            )
        except UserError:
            raise
        except Exception as error:  # broad, as in `_read`
            raise _malformed(error) from None
        client, owner = member.client, self._post.owner(node) if self.terms.node_keys else ""
        if self._owners.get(client, owner) != owner:
            raise UserError(f"client {client} has had another node key in this run")
        if self.members.get(client, member) != member:
            raise UserError(f"client {client} tells other numbers of samples than before in this run")
        others = [each.samples for each in self.members.values() if each.client != client]
        if sum(others) + member.samples > LARGEST_INT32:
            raise UserError(f"client {client} tells {member.samples:,} samples, and all together have at most 2^31 - 1")
        return member, owner

    def _enter(self, node: int, member: Member, owner: str) -> None:
        client = member.client
        self._pauses.pop(node, None)
        self.members[client], self._owners[client], self._nodes[client] = member, owner, node

    # --- asking

    def ask(
        self,
        kind: str,
        round: int,
        contents: Mapping[int, Content],
        read: Callable[[int, Content], Any],
        most: int = SMALL,
    ) -> dict[int, Any]:
        """Return what some clients answer, by their numbers; without those that are lost, which only some terms allow.

        Args:
          kind: of the message.
          round: of the run.
          contents: what each client is asked.
          read: (client, reply) -> what it means, checked; an error counts as a loss.
          most: bytes of one reply.

        Raises:
          UserError: a client is lost and the terms say to stop; or it answers falsely again and again.
        """
        answers: dict[int, Any] = {}
        false = dict.fromkeys(contents, 0)
        attempt = 0
        while True:
            wanted = [client for client in contents if client not in answers]
            ready = self._ready_soon(wanted)
            asked = [client for client in wanted if client in ready]
            messages = [self._message(kind, client, round, attempt, contents[client]) for client in asked]
            replies = self._post.ask(messages, self.terms.reply_timeout, most) if messages else {}
            moved = {node for node, reply in replies.items() if isinstance(reply, Lost) and reply.moved}
            lost = {client: "its node is not connected" for client in wanted if client not in asked}
            for client, message in zip(asked, messages, strict=True):
                reply = replies[message.node]
                if message.node in moved:
                    continue
                self._late.discard(client)
                try:
                    if isinstance(reply, Lost):
                        if not reply.refused:
                            self._late.add(client)
                        else:
                            false[client] += 1
                            self._begun.discard((client, message.node))  # its disk may have lost what it needs
                        raise UserError(reply.reason)
                    answers[client] = self._read(client, reply, read, false)
                except UserError as error:
                    lost[client] = str(error)
            if not lost and not moved:
                return answers
            attempt += 1
            if not lost:
                continue
            for client, reason in lost.items():
                self._say(f"round {round + 1}: lost client {client}: {reason}", again=True)
            if self.terms.lost == "stop":
                first = min(lost)
                raise UserError(f"round {round + 1}: client {first} is lost ({lost[first]}), and --lost=stop")
            if self.terms.lost == "untrained" and answers:
                return answers
            for client in lost:
                if false[client] >= MOST_FALSE_REPLIES:
                    remedy = "--lost=untrained goes on without it"
                    if self.terms.lost == "untrained":
                        remedy = "no other client of the round answers, so the round has nothing to go on with"
                    raise UserError(
                        f"round {round + 1}: client {client} answers falsely {false[client]} times ({lost[client]}); "
                        f"{remedy}"
                    )
            self._gather(sorted(lost), None)

    def _read(self, client: int, reply: Content, read: Callable[[int, Content], Any], false: dict[int, int]) -> Any:
        try:
            return read(client, reply)
        except UserError as error:
            false[client] += 1
            raise UserError(one_line(str(error))) from None
        except Exception as error:  # broad: a client chooses what it answers, and must not end the server with it
            false[client] += 1
            raise _malformed(error) from None

    def together(self, round: int, clients: Sequence[int], once: Callable[[Post, Mapping[int, int], int], Any]) -> Any:
        """Return what comes of something that needs all clients of a round, tried until all of them stay to its end.

        Args:
          round: of the run.
          clients: the cohort.
          once: (post, the node of each client in the order of the cohort, number of the attempt) -> the result;
            attempts have growing numbers, also after the server has started anew.

        Raises:
          UserError: a client is lost and the terms say to stop; or it answers falsely again and again.
        """
        attempt, false = 0, dict.fromkeys(clients, 0)
        while True:
            self._gather(clients, None)
            attempt = max(attempt + 1, int(time.time()))
            try:
                return once(self._post, {client: self._nodes[client] for client in clients}, attempt)
            except relay.Broken as broken:
                for client, lost in broken.lost.items():
                    self._say(f"round {round + 1}: lost client {client}: {lost.reason}", again=True)
                    false[client] += lost.refused
                    if self.terms.lost == "stop" or false[client] >= MOST_FALSE_REPLIES:
                        raise UserError(f"round {round + 1}: client {client} is lost ({lost.reason})") from None

    def _message(self, kind: str, client: int, round: int, attempt: int, content: Content) -> Message:
        return Message(kind, self._nodes[client], round, attempt, {"run": self._record, **content})

    def _say(self, line: str, *, again: bool = False) -> None:
        """Print a line, once if it is not about a single event."""
        if again or line not in self._told:
            print(f"fedjax-mr: {line}", file=sys.stderr)
        self._told.add(line)

    # --- in the run folder

    def save(self, folder: Path) -> None:
        """Write who the clients are into the run folder."""
        content = {
            "run": self.request.run,
            "clients": {
                client: self.members[client].record() | {"key": self._owners[client]} for client in self.members
            },
        }
        with files.atomic_write(folder / REAL_CLIENTS) as path:
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def remember(self, folder: Path) -> None:
        """Take over who the clients were when the run began.

        Raises:
          UserError: the file is damaged.
        """
        path = folder / REAL_CLIENTS
        try:
            for record in files.parse_json(files.read_text(path))["clients"].values():
                owner = record.pop("key")
                member = Member(**record | {"label_counts": tuple(record["label_counts"])})
                self.members[member.client], self._owners[member.client] = member, owner
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error})") from None


def _malformed(error: Exception) -> UserError:
    return UserError(one_line(f"its answer is malformed ({type(error).__name__}: {error})"))


def name_of_run(folder: Path) -> str | None:
    """Return the name of the run that a run folder holds; None if real clients had no part in it.

    Raises:
      UserError: the file that says so is damaged.
    """
    try:
        return str(files.parse_json(files.read_text(folder / REAL_CLIENTS))["run"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / REAL_CLIENTS} is damaged ({error})") from None
