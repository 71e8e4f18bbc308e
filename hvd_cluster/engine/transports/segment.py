"""Memory that the ranks of one host share: unnamed, so nothing is left behind however the job ends.

The leader makes a memfd and hands its descriptor over an abstract Unix socket. That also proves that the host is
shared: an abstract socket cannot be reached from another network namespace or machine, whatever the hosts call
themselves. A memfd counts against the job's memory, not against the size of /dev/shm.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.client import KeyValueClient

#: How long one connection may take to prove itself; others wait behind it.
_HANDSHAKE_S = 1.0


class Sharing(Exception):
    """The ranks cannot share memory; the text says why."""


def share(
    client: KeyValueClient, prefix: str, secret: bytes, *, index: int, num_ranks: int, num_bytes: int, timeout_s: float
) -> mmap.mmap:
    """A mapping of ``num_bytes`` zero bytes that all ranks share; collective over them.

    Args:
        client: the job's store.
        prefix: keys of this segment start with this.
        secret: the job's secret; nobody else gets the descriptor.
        index: this rank among those that share; 0 leads.
        num_ranks: how many share.
        num_bytes: how much.
        timeout_s: how long to wait for the others.

    Raises:
        Sharing: this rank and the leader do not share a host, or there is not enough memory. The others are not told.
    """
    try:
        descriptor = (
            _lead(client, prefix, secret, num_ranks, num_bytes, timeout_s)
            if index == 0
            else _follow(client, prefix, secret, timeout_s)
        )
    except (OSError, TimeoutError, EOFError) as error:
        raise Sharing(str(error)) from error
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError) as error:
        raise Sharing(f"the segment cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _lead(client: KeyValueClient, prefix: str, secret: bytes, num_ranks: int, num_bytes: int, timeout_s: float) -> int:
    descriptor = os.memfd_create("hvd_cluster", os.MFD_CLOEXEC)
    try:
        try:
            # Without this a full machine is noticed at the first touch, by SIGBUS.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            client.set(f"{prefix}socket", b"")  # nobody need wait
            raise
        name = f"hvd_cluster-{secrets.token_hex(16)}"
        with _listening(name, num_ranks) as listener:
            client.set(f"{prefix}socket", name.encode())
            deadline_s = time.monotonic() + timeout_s
            given = 0
            while given < num_ranks - 1:
                listener.settimeout(max(0.01, deadline_s - time.monotonic()))
                connection, _ = listener.accept()
                with connection:
                    try:
                        channel = Channel.accept(connection, secret, _HANDSHAKE_S)
                        # A descriptor that arrives with the last bytes of the handshake would be lost.
                        channel.settimeout(_HANDSHAKE_S)
                        channel.recv()
                    except (OSError, EOFError):
                        continue  # a stranger; whoever was meant to come still can
                    socket.send_fds(connection, [b"m"], [descriptor])
                    given += 1
        return descriptor
    except BaseException:  # raised again: the descriptor would leak
        os.close(descriptor)
        raise


def _follow(client: KeyValueClient, prefix: str, secret: bytes, timeout_s: float) -> int:
    name = client.get(f"{prefix}socket", timeout_s)
    if not name:
        raise Sharing("the leader has no memory to share")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(b"\0" + name)
        channel = Channel.connect(connection, secret, timeout_s)
        channel.send(b"ready")
        channel.settimeout(timeout_s)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise EOFError("the leader closed the connection before it handed over the segment")
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]


@contextmanager
def _listening(name: str, backlog: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0" + name.encode())
        listener.listen(backlog)
        yield listener
