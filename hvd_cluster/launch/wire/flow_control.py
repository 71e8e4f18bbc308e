"""How much output may be on its way to a launcher that perhaps takes none.

A launcher is stopped with Ctrl-Z, or prints into a pager that waits for a key. TCP would let the workers' output fill
the connection, and then Linux treats a host that reads nothing as dead (see
:mod:`hvd_cluster.rendezvous.tcp_keepalive`). So the agent sends no more than the launcher has acknowledged, as in
HTTP/2's flow control (RFC 9113, section 5.2), and the connection itself is never full.
"""

from __future__ import annotations

import threading

#: Bytes of output that may be on their way.
WINDOW_BYTES = 1 << 15
#: The receiver tells of what it took in steps of this size, to spare messages: less may stay untold for ever.
_STEP_BYTES = WINDOW_BYTES // 4
#: What the launcher's kernel is to have room for, whatever the launcher does: in short lines, each of them a packet of
#: its own, a window takes ten times its size there. Linux gives twice what is asked for, by default up to 416 KiB.
RECEIVE_BUFFER_BYTES = 1 << 18


class SendWindow:
    """The sender's side: bytes that may still be sent."""

    def __init__(self) -> None:
        self._under_way = 0
        self._is_over = False
        self._changed = threading.Condition()

    def spend(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may be sent; a large message, until all is taken but for what may stay untold."""
        room = max(_STEP_BYTES, WINDOW_BYTES - num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._under_way <= room)
            self._under_way += num_bytes

    def restore(self, num_bytes: int) -> None:
        """The receiver has taken so many."""
        with self._changed:
            self._under_way -= num_bytes
            self._changed.notify_all()

    def end(self) -> None:
        """Let everybody send: the conversation ends, and nothing is worth waiting for."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class ReceiveWindow:
    """The receiver's side: bytes that were taken, and of which the sender does not know yet."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> int:
        """So many were taken. Returns what to tell the sender now; 0 while it can wait, to spare messages."""
        self._num_bytes += num_bytes
        if self._num_bytes < _STEP_BYTES:
            return 0
        told, self._num_bytes = self._num_bytes, 0
        return told
