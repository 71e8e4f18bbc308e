"""Nameless memory that a host's ranks share, so that no job leaves any behind.

The leader makes a memfd and passes its descriptor over an abstract Unix socket. That also proves that the host is
shared: an abstract socket cannot be reached from another network namespace or machine, whatever the host names are. A
memfd counts against the job's memory, not against the size of /dev/shm.

The same connections pass every rank's wakeup descriptor, an eventfd, to all others, which write to it to wake the rank.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.client import KeyValueClient

logger = logging.getLogger(__name__)

#: How long one connection may take to authenticate; others wait meanwhile.
_HANDSHAKE_S = 1.0
#: How long ranks with equal host keys wait for each other to prove that they share memory.
_SHARING_TIMEOUT_S = 10.0
#: How often the leader checks meanwhile whether they are alive.
_CHECK_PERIOD_S = 0.25
#: One message carries at most about this many descriptors (Linux's SCM_MAX_FD).
MAX_RANKS = 250


class SharingError(Exception):
    """The ranks cannot share memory; the text has the reason."""


@dataclass
class Segment:
    """The shared memory, seen from one rank."""

    memory: mmap.mmap
    #: This rank's index among the ranks that share it.
    index: int
    #: An eventfd for each of them, by index, including this rank's own.
    wakeups: list[int]
    #: The file behind the mapping.
    descriptor: int

    def close(self) -> None:
        """Close the other ranks' eventfds and the file, and release the mapping.

        The mapping ends with its last reference.
        """
        os.close(self.descriptor)
        for index, wakeup in enumerate(self.wakeups):
            if index != self.index:
                os.close(wakeup)
        self.wakeups = []
        del self.memory


@dataclass(frozen=True)
class SharingGroup:
    """Ranks that should share memory, and how they meet."""

    #: The job's store; its waits end if a rank dies.
    client: KeyValueClient
    #: Keys of this segment start with this.
    prefix: str
    #: The job's secret; only processes that know it get the descriptors.
    secret: bytes
    #: The global ranks; the first one leads.
    ranks: Sequence[int]
    #: This one.
    rank: int
    timeout_s: float

    @property
    def index(self) -> int:
        """This rank's index in the group."""
        return self.ranks.index(self.rank)


class Closable(Protocol):
    """An object in a segment."""

    def close(self) -> None:
        """Release the segment."""


T = TypeVar("T", bound=Closable)


def share(
    group: SharingGroup, num_bytes: int, wakeup: int, build: Callable[[Segment], T], *, sparse_bytes: int = 0
) -> T | None:
    """What ``build`` makes of ``group``'s segment, or None on all ranks; collective.

    If it is None, the leader logs the reason.

    Args:
        group: the ranks that share it.
        num_bytes: its size; all of it is allocated and zero.
        wakeup: this rank's eventfd.
        build: called on each rank; when any rank returns, it has succeeded on all of them.
        sparse_bytes: this much more is mapped after it, and allocated when needed.

    Raises:
        ConnectionError: not all of them came in time.
    """
    built, failure = None, ""
    with ExitStack() as undo:
        try:
            built = build(_share(group, num_bytes, sparse_bytes, wakeup))
            undo.callback(built.close)
        except SharingError as error:
            failure = f"rank {group.rank}: {error}"
        group.client.set(f"{group.prefix}failure/{group.rank}", failure.encode())
        keys = [f"{group.prefix}failure/{member}" for member in group.ranks]
        try:
            failures = [text.decode() for text in group.client.get_many(keys, 2 * group.timeout_s) if text]
        except TimeoutError as error:
            raise ConnectionError(f"not all of the ranks {list(group.ranks)} came to share memory: {error}") from error
        if not failures:
            undo.pop_all()
            return built
    if group.index == 0:
        logger.warning("ranks %s cannot share memory and use Gloo: %s", list(group.ranks), "; ".join(failures))
    return None


def _share(group: SharingGroup, num_bytes: int, sparse_bytes: int, wakeup: int) -> Segment:
    timeout_s = min(_SHARING_TIMEOUT_S, group.timeout_s)
    if len(group.ranks) > MAX_RANKS:
        raise SharingError(f"{len(group.ranks)} ranks are on this host; at most {MAX_RANKS} can share memory")
    try:
        if group.index == 0:
            memory, wakeups = _lead(group, num_bytes, sparse_bytes, wakeup, timeout_s)
        else:
            memory, wakeups = _follow(group, wakeup, timeout_s)
    except (OSError, TimeoutError, EOFError) as error:
        raise SharingError(str(error)) from error
    try:
        return Segment(mmap.mmap(memory, num_bytes + sparse_bytes), group.index, wakeups, memory)
    except (OSError, ValueError) as error:
        for descriptor in (memory, *(theirs for theirs in wakeups if theirs != wakeup)):
            os.close(descriptor)
        raise SharingError(f"the segment cannot be mapped: {error}") from error


def _lead(
    group: SharingGroup, num_bytes: int, sparse_bytes: int, wakeup: int, timeout_s: float
) -> tuple[int, list[int]]:
    key = f"{group.prefix}socket"
    with ExitStack() as on_failure:
        memory = os.memfd_create("hvd_cluster", os.MFD_CLOEXEC)
        on_failure.callback(os.close, memory)
        try:
            os.ftruncate(memory, num_bytes + sparse_bytes)
            # Without this a full machine is noticed at the first touch, by SIGBUS.
            os.posix_fallocate(memory, 0, num_bytes)
        except OSError:
            group.client.set(key, b"")  # so that no rank waits
            raise
        name = f"hvd_cluster-{secrets.token_hex(16)}"
        wakeups = [wakeup] + [-1] * (len(group.ranks) - 1)
        with _listening(name, len(group.ranks)) as listener, ExitStack() as connections:
            group.client.set(key, name.encode())
            deadline_s = time.monotonic() + timeout_s
            followers = []
            while -1 in wakeups:
                listener.settimeout(max(0.01, min(_CHECK_PERIOD_S, deadline_s - time.monotonic())))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    if time.monotonic() >= deadline_s:
                        raise
                    if group.client.watch is not None:
                        group.client.watch()
                    continue
                connections.enter_context(connection)
                try:
                    index, theirs = _welcome(connection, group.secret)
                except (OSError, EOFError):
                    continue  # another process; the expected rank can still connect
                on_failure.callback(os.close, theirs)
                wakeups[index] = theirs
                followers.append(connection)
            for connection in followers:
                socket.send_fds(connection, [b"m"], [memory, *wakeups])
        on_failure.pop_all()
    return memory, wakeups


def _welcome(connection: socket.socket, secret: bytes) -> tuple[int, int]:
    """Authenticate a follower; returns its index and its wakeup descriptor."""
    channel = Channel.accept(connection, secret, _HANDSHAKE_S)
    channel.settimeout(_HANDSHAKE_S)
    index = int(json.loads(channel.recv()))
    # Descriptors that arrive with the last bytes of a signed message would be lost: they follow this answer.
    channel.send(b"continue")
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise EOFError("the connection ended before a descriptor arrived")
    os.set_inheritable(descriptors[0], False)
    return index, descriptors[0]


def _follow(group: SharingGroup, wakeup: int, timeout_s: float) -> tuple[int, list[int]]:
    name = group.client.get(f"{group.prefix}socket", timeout_s)
    if not name:
        raise SharingError("the leader has no memory to share")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(b"\0" + name)
        channel = Channel.connect(connection, group.secret, timeout_s)
        channel.send(json.dumps(group.index).encode())
        channel.settimeout(timeout_s)
        channel.recv()
        socket.send_fds(connection, [b"b"], [wakeup])
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1 + len(group.ranks))
    if len(descriptors) != 1 + len(group.ranks):
        for descriptor in descriptors:
            os.close(descriptor)
        raise EOFError("the leader closed the connection before it handed over the segment")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    memory, *wakeups = descriptors
    os.close(wakeups[group.index])  # a duplicate of the own one
    wakeups[group.index] = wakeup
    return memory, wakeups


@contextmanager
def _listening(name: str, backlog: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0" + name.encode())
        listener.listen(backlog)
        yield listener
