"""The connections to the parent and the children in the tree."""

from __future__ import annotations

import pickle
import select
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from hvd_cluster.engine.messages import Abort, Goodbye, LogMessage, Message, StallMessage
from hvd_cluster.engine.world import World
from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.link import Link


class PeerLost(Exception):
    """The world is broken: a linked rank has died, or reports another rank's death.

    Args:
        reason: what happened.
        source: the rank that reported it, or that has died.
    """

    def __init__(self, reason: str, source: int) -> None:
        super().__init__(reason, source)
        self.reason = reason
        self.source = source


class TreeLinks:
    """The open connections of one rank. Only the progress thread uses them.

    Args:
        world: the connected world.
        poll: waits for the connections.
    """

    def __init__(self, world: World, poll: select.epoll) -> None:
        #: True if a log outside these connections contains the end of the world; the engine sets it.
        self.is_closed: Callable[[], bool] = lambda: False
        self._world = world
        self._parent = world.tree_position.parent
        self._children = list(world.tree_position.children)
        self._links = dict(world.links)
        self._poll = poll
        self._ranks = {link.fileno(): rank for rank, link in self._links.items()}
        self._events: dict[int, int] = {}
        #: True if something was sent or received since :meth:`rearm`.
        self.has_sent = False
        self._inbox: deque[tuple[int, Message]] = deque()
        self._said_goodbye: set[int] = set()
        #: For each rank whose connection has ended, the reason.
        self._lost: dict[int, str] = {}
        for rank, link in self._links.items():
            self._events[rank] = _poll_events(link)
            poll.register(link.fileno(), self._events[rank])
            # Messages that arrived together with the last one of the start-up.
            self._inbox += ((rank, _unpacked(message)) for message in link.kept)
            link.kept.clear()

    @property
    def has_children(self) -> bool:
        """A child is still connected."""
        return any(child in self._links for child in self._children)

    @property
    def has_message(self) -> bool:
        """A message has arrived that was not taken yet."""
        return bool(self._inbox)

    def rank_of(self, descriptor: int) -> int | None:
        """The rank behind a descriptor that the poll reports."""
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
        """Yield the messages that have arrived, oldest first; more may arrive meanwhile."""
        while self._inbox:
            yield self._inbox.popleft()

    def check(self) -> None:
        """Notice the world's end while a transport waits; keep all messages for later.

        Messages must be handled in order, and not in the middle of a collective; :meth:`take_stalls` has the exception.

        Raises:
            PeerLost: a linked rank has died, or reports that the world is broken; raised at each call from then on.
        """
        ended: dict[int, str] = {}
        for rank, link in self._links.items():
            try:
                self._inbox += ((rank, _unpacked(message)) for message in link.receive())
            except (EOFError, AuthenticationError) as error:
                ended[rank] = self._gone(rank, error)
        # A rank that sends an abort also ends its connections: the reason is in the message.
        for rank, message in self._inbox:
            if isinstance(message, Abort):
                raise PeerLost(message.reason, rank)
        for rank, reason in (self._lost | ended).items():
            if not self._expects_end(rank):
                raise PeerLost(reason, rank)

    def take_stalls(self) -> list[StallMessage]:
        """Messages of stall inspectors so far, to handle at any time and in any order."""
        found = [message for _, message in self._inbox if isinstance(message, StallMessage)]
        if found:
            self._inbox = deque(each for each in self._inbox if not isinstance(each[1], StallMessage))
        return found

    def await_failure(self, timeout_s: float) -> PeerLost | None:
        """Wait for a rank to report why a transport failed; None if none does in time."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            try:
                self.check()
            except PeerLost as gone:
                return gone
            time.sleep(0.01)
        return None

    def note_goodbye(self, rank: int) -> None:
        """``rank`` has finished everything and will close its connection."""
        self._said_goodbye.add(rank)

    def has_said_goodbye(self, rank: int) -> bool:
        """The end of the connection to ``rank`` was announced."""
        return rank in self._said_goodbye

    def flush(self, rank: int) -> None:
        """Write as much as the connection to ``rank`` accepts now."""
        self.has_sent = True
        with suppress(OSError):  # its end shows at the next read
            self._links[rank].flush()

    def rearm(self) -> None:
        """Have the poll report room to write if something remains to be written."""
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
        """The orderly end of the world is in the inbox, or ``rank`` has said goodbye."""
        if self.is_closed() or rank in self._said_goodbye:
            return True
        return any(
            (isinstance(message, LogMessage) and message.is_end) or (isinstance(message, Goodbye) and source == rank)
            for source, message in self._inbox
        )

    def _gone(self, rank: int, error: Exception) -> str:
        return f"rank {rank} on {self._world.hosts[rank]} is gone, it died or was killed ({error})"


def _poll_events(link: Link) -> int:
    writes = link.events & selectors.EVENT_WRITE
    return select.EPOLLIN | (select.EPOLLOUT if writes else 0)


def _unpacked(message: bytes) -> Message:
    # Signed with the job's secret: the link has checked it.
    unpacked: Message = pickle.loads(message)
    return unpacked
