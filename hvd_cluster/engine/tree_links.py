"""The connections to the parent and the children in the tree: what goes out to them, and what came in."""

from __future__ import annotations

import pickle
import select
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from hvd_cluster.engine.world import World
from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.link import Link

#: (what it is, its content). "log", "timeline" and questions travel down, "up", "events" and answers up, "abort" both
#: ways.
Message = tuple[str, Any]


class PeerLost(Exception):
    """The world is broken: a neighbour has died, or says so of somebody else.

    Args:
        reason: what happened.
        source: the neighbour that it was learned from, who need not be told again.
    """

    def __init__(self, reason: str, source: int) -> None:
        super().__init__(reason, source)
        self.reason = reason
        self.source = source


class TreeLinks:
    """The open connections of one rank. Used only by whoever drives the engine.

    Args:
        world: the connected world.
        poll: waits for the connections.
    """

    def __init__(self, world: World, poll: select.epoll) -> None:
        #: True when a log outside these connections says that the world ends; the engine sets it.
        self.is_closed: Callable[[], bool] = lambda: False
        self._world = world
        self._parent = world.tree_position.parent
        self._children = list(world.tree_position.children)
        self._links = dict(world.links)
        self._poll = poll
        self._ranks = {link.fileno(): rank for rank, link in self._links.items()}
        self._events: dict[int, int] = {}
        #: Something was sent or received since :meth:`rearm`.
        self.has_sent = False
        self._inbox: deque[tuple[int, Message]] = deque()
        self._said_bye: set[int] = set()
        #: What to say of those whose connection has ended.
        self._lost: dict[int, str] = {}
        for rank, link in self._links.items():
            self._events[rank] = _poll_events(link)
            poll.register(link.fileno(), self._events[rank])
            # What came together with the last words of the start-up.
            self._inbox += ((rank, _unpacked(message)) for message in link.kept)
            link.kept.clear()

    @property
    def has_children(self) -> bool:
        """A rank below is still connected."""
        return any(child in self._links for child in self._children)

    @property
    def has_message(self) -> bool:
        """Something has arrived that was not taken yet."""
        return bool(self._inbox)

    def rank_of(self, descriptor: int) -> int | None:
        """The neighbour behind a descriptor that the poll reports."""
        return self._ranks.get(descriptor)

    def send_up(self, message: Message) -> None:
        """Send to the parent, if there is one and it is still connected."""
        if self._parent is not None:
            self._send(self._parent, pickle.dumps(message, protocol=5))

    def send_down(self, message: Message, to: Sequence[int] | None = None) -> None:
        """Send to every child that is still connected, or to some of them."""
        children = self._children if to is None else to
        packed = pickle.dumps(message, protocol=5) if children else b""
        for child in children:
            self._send(child, packed)

    def send_all(self, message: Message, but: int | None = None) -> None:
        """Send to the parent and the children, but not to ``but``."""
        packed = pickle.dumps(message, protocol=5)
        for rank in list(self._links):
            if rank != but:
                self._send(rank, packed)

    def receive(self, rank: int) -> None:
        """Read what has arrived from ``rank``.

        Raises:
            PeerLost: its connection has ended; it is forgotten.
        """
        link = self._links[rank]
        self.has_sent = True
        try:
            self._inbox += ((rank, _unpacked(message)) for message in link.receive())
        except (EOFError, AuthenticationError) as error:
            self._poll.unregister(link.fileno())
            del self._ranks[link.fileno()], self._links[rank]
            self._lost[rank] = self._gone(rank, error)
            raise PeerLost(self._lost[rank], rank) from None

    def take(self) -> Iterator[tuple[int, Message]]:
        """Hand out what has arrived, oldest first; more may arrive meanwhile."""
        while self._inbox:
            yield self._inbox.popleft()

    def check(self) -> None:
        """While a transport waits for other ranks: notice the end of the world, and keep everything else for later.

        Messages have to be taken in order, and not in the middle of a collective.

        Raises:
            PeerLost: a neighbour has died, or says that the world is broken. Raised each time, until the end.
        """
        ended: dict[int, str] = {}
        for rank, link in self._links.items():
            try:
                self._inbox += ((rank, _unpacked(message)) for message in link.receive())
            except (EOFError, AuthenticationError) as error:
                ended[rank] = self._gone(rank, error)
        # Who sends an abort ends its connections too: the reason is in what it has said.
        for rank, (kind, content) in self._inbox:
            if kind == "abort":
                raise PeerLost(content, rank)
        for rank, reason in (self._lost | ended).items():
            if not self._expects_end(rank):
                raise PeerLost(reason, rank)

    def await_failure(self, timeout_s: float) -> PeerLost | None:
        """A transport has failed: wait a moment for the reason, if another rank has one."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            try:
                self.check()
            except PeerLost as gone:
                return gone
            time.sleep(0.01)
        return None

    def note_bye(self, rank: int) -> None:
        """``rank`` has finished everything and will close its connection."""
        self._said_bye.add(rank)

    def has_said_bye(self, rank: int) -> bool:
        """The end of the connection to ``rank`` was announced."""
        return rank in self._said_bye

    def flush(self, rank: int) -> None:
        """Write what the connection to ``rank`` takes now."""
        self.has_sent = True
        with suppress(OSError):  # its end shows at the next read
            self._links[rank].flush()

    def rearm(self) -> None:
        """Wait for room to write where something is left to be written."""
        self.has_sent = False
        for rank, link in self._links.items():
            events = _poll_events(link)
            if events != self._events[rank]:
                self._events[rank] = events
                self._poll.modify(link.fileno(), events)

    def _send(self, rank: int, packed: bytes) -> None:
        if rank in self._links:
            self.has_sent = True
            with suppress(OSError):  # its end shows at the next read
                self._links[rank].send(packed)

    def _expects_end(self, rank: int) -> bool:
        """The end of the world, in good order, was decided and waits to be taken; or ``rank`` has said farewell."""
        if self.is_closed() or rank in self._said_bye:
            return True
        return any(kind == "close" or (kind == "bye" and source == rank) for source, (kind, _) in self._inbox)

    def _gone(self, rank: int, error: Exception) -> str:
        return f"rank {rank} on {self._world.hosts[rank]} is gone, it died or was killed ({error})"


def _poll_events(link: Link) -> int:
    writes = link.events & selectors.EVENT_WRITE
    return select.EPOLLIN | (select.EPOLLOUT if writes else 0)


def _unpacked(message: bytes) -> Message:
    # Signed with the job's secret: the link has checked it.
    kind, content = pickle.loads(message)
    return kind, content
