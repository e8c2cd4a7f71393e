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

from fedjax_mr import files
from fedjax_mr.deploy import mail, relay
from fedjax_mr.deploy.facts import Member, Request
from fedjax_mr.deploy.mail import Message, Post
from fedjax_mr.deploy.wire import Content
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import REAL_CLIENTS

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BEFORE_JOINING_AGAIN = 30.0
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
        self._not_before: dict[int, float] = {}  # when a node that did not join is asked again
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
        while missing := sorted(set(clients) - self._ready()):
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

    def _ready(self) -> set[int]:
        """Return the clients that are connected and know what they need; nodes that are new are asked and told."""
        connected = self._post.nodes()
        now, entered = self._post.now(), set(self._nodes.values())
        new = [node for node in connected if node not in entered and self._not_before.get(node, now) <= now]
        messages = [Message("join", node, 0, 0, {"run": self._record}) for node in new]
        for node, reply in self._post.ask(messages, self.terms.at_the_roll_call).items() if messages else ():
            try:
                if isinstance(reply, mail.Lost):
                    raise UserError(reply.reason)
                self._enter(node, reply)
            except UserError as error:
                self._say(f"node {node} does not join: {error}")
                self._not_before[node] = self._post.now() + SECONDS_BEFORE_JOINING_AGAIN
        there = {client for client, node in self._nodes.items() if node in connected}
        if self._begin is None:
            return there
        messages = [
            self._message("begin", client, 0, 0, self._begin)
            for client in sorted(there)
            if (client, self._nodes[client]) not in self._begun
        ]
        replies = self._post.ask(messages, self.terms.at_the_roll_call) if messages else {}
        for client in there:
            match replies.get(self._nodes[client]):
                case mail.Lost(reason=reason):
                    self._say(f"client {client} does not begin: {reason}")
                case None:
                    pass
                case _:
                    self._begun.add((client, self._nodes[client]))
        return {client for client in there if (client, self._nodes[client]) in self._begun}

    def _enter(self, node: int, reply: Content) -> None:
        """Enter a node's client into the roll.

        Raises:
          UserError: its answer is malformed, or it is not the client that it says.
        """
        member = Member.of(
            reply,
            num_clients=self._num_clients,
            num_classes=self.request.facts.num_classes,
            counted=self.request.label_counts,
        )
        client, owner = member.client, self._post.owner(node) if self.terms.node_keys else ""
        if self._owners.get(client, owner) != owner:
            raise UserError(f"client {client} has had another node key in this run")
        if self.members.get(client, member) != member:
            raise UserError(f"client {client} tells other numbers of samples than before in this run")
        other = self._nodes.get(client)
        if other is not None and other != node and self._answers(other):
            raise UserError(f"client {client} is already there, by node {other}: each needs a client-id of its own")
        self.members[client], self._owners[client], self._nodes[client] = member, owner, node

    def _answers(self, node: int) -> bool:
        """Return whether a node that was entered before is still at work."""
        if node not in self._post.nodes():
            return False
        message = Message("join", node, 0, 1, {"run": self._record})
        return not isinstance(self._post.ask([message], self.terms.at_the_roll_call)[node], mail.Lost)

    # --- asking

    def ask(
        self, kind: str, round: int, contents: Mapping[int, Content], read: Callable[[int, Content], Any]
    ) -> dict[int, Any]:
        """Return what some clients answer, by their numbers; without those that are lost, which only some terms allow.

        Args:
          kind: of the message.
          round: of the run.
          contents: what each client is asked.
          read: (client, reply) -> what it means, checked; a `UserError` counts as a loss.

        Raises:
          UserError: a client is lost and the terms say to stop; or it answers falsely again and again.
        """
        answers: dict[int, Any] = {}
        false = dict.fromkeys(contents, 0)
        attempt = 0
        while True:
            wanted = [client for client in contents if client not in answers]
            ready = self._ready()
            asked = [client for client in wanted if client in ready]
            messages = [self._message(kind, client, round, attempt, contents[client]) for client in asked]
            replies = self._post.ask(messages, self.terms.reply_timeout) if messages else {}
            moved = {node for node, reply in replies.items() if isinstance(reply, mail.Lost) and reply.moved}
            lost = {client: "its node is not connected" for client in wanted if client not in asked}
            for client, message in zip(asked, messages, strict=True):
                reply = replies[message.node]
                if message.node in moved:
                    continue
                try:
                    if isinstance(reply, mail.Lost):
                        if reply.refused:
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
                    raise UserError(
                        f"round {round + 1}: client {client} answers falsely {false[client]} times ({lost[client]}); "
                        "--lost=untrained goes on without it"
                    )
            self._gather(sorted(lost), None)

    def _read(self, client: int, reply: Content, read: Callable[[int, Content], Any], false: dict[int, int]) -> Any:
        try:
            return read(client, reply)
        except UserError:
            false[client] += 1
            raise

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
        with files.whole(folder / REAL_CLIENTS) as path:
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
