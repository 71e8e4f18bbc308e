"""A queue in the job's key-value store: many processes post, one reads, in order."""

from __future__ import annotations

from hvd_cluster.rendezvous.client import KeyValueClient


def post(client: KeyValueClient, box: str, message: bytes) -> None:
    """Append ``message`` to ``box``."""
    client.push(box, message)


class KeyValueMailbox:
    """The one reader of a box.

    Args:
        client: the connection; a read keeps it busy, so a reader in its own thread needs its own connection.
        box: the name of the box.
    """

    def __init__(self, client: KeyValueClient, box: str) -> None:
        self._client = client
        self._box = box
        self._next = 0

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def next(self, timeout_s: float) -> bytes:
        """The oldest unread message; raises ``TimeoutError`` if none arrives in time."""
        key = f"{self._box}/{self._next}"
        message = self._client.get(key, timeout_s)
        self._client.delete(key)
        self._next += 1
        return message
