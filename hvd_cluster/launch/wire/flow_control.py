"""Limits how much output an agent sends before the launcher has acknowledged it.

A launcher may be stopped with Ctrl-Z, or print into a pager that waits for a key. The workers' output would then fill
the TCP connection, and Linux treats a host that reads nothing as dead (see
:mod:`hvd_cluster.rendezvous.sockets`). Therefore the agent never sends more than a window of unacknowledged
bytes, as in HTTP/2's flow control (RFC 9113, section 5.2), and the connection is never full.
"""

from __future__ import annotations

import threading

#: Bytes of output that may be unacknowledged.
WINDOW_BYTES = 1 << 15
#: The receiver acknowledges in steps of this size, which saves messages; a smaller remainder stays unacknowledged.
_STEP_BYTES = WINDOW_BYTES // 4
#: The receive buffer of the launcher's socket. Short lines, each in its own packet, take ten times their size there.
#: Linux doubles the requested size, by default up to 416 KiB.
RECEIVE_BUFFER_BYTES = 1 << 18


class SendWindow:
    """The sender's side: waits until bytes may be sent."""

    def __init__(self) -> None:
        self._num_in_flight = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def acquire(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may be sent; an oversized message waits until nearly all are acknowledged."""
        room = max(_STEP_BYTES, WINDOW_BYTES - num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_in_flight <= room)
            self._num_in_flight += num_bytes

    def release(self, num_bytes: int) -> None:
        """The receiver has acknowledged ``num_bytes``."""
        with self._changed:
            self._num_in_flight -= num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Stop waiting: the connection is closed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class ReceiveWindow:
    """The receiver's side: counts bytes that are not acknowledged yet."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> int:
        """Count ``num_bytes`` as received. Returns the number of bytes to acknowledge now, or 0."""
        self._num_bytes += num_bytes
        if self._num_bytes < _STEP_BYTES:
            return 0
        due, self._num_bytes = self._num_bytes, 0
        return due
