"""How the tasks of a job learn of each other's ends: through keys in the job's key-value store."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence

from hvd_cluster.launch.worker_group import FAILURE_GRACE_S
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.topology import join_address

_FAILED = "launch/failed"
_ENDED = "launch/ended/"
#: Seconds for connecting to the store at one of its addresses.
_REACH_S = 5.0
#: Seconds of one wait for the others' ends.
_WAIT_S = 1.0


class EndTracker:
    """Announces the ends of this task's workers, and watches those of the others."""

    def __init__(self, client: KeyValueClient, size: int) -> None:
        self._client = client
        self._size = size
        self._period_s = max(0.5, size / 500)  # one thread of rank 0's task answers all tasks
        self._next_look_s = 0.0
        self._deadline_s = math.inf

    def deadline_s(self) -> float:
        """When (``time.monotonic``) this task's workers must have ended: infinity until a worker has failed."""
        now_s = time.monotonic()
        if self._deadline_s == math.inf and now_s >= self._next_look_s:
            self._next_look_s = now_s + self._period_s
            if self._another_failed():
                self._deadline_s = now_s + FAILURE_GRACE_S
        return self._deadline_s

    def announce_end(self, rank: int, ok: bool) -> None:
        """Announce to all tasks that a worker of this one has ended; if not ``ok``, the others must end too.

        Raises:
            ConnectionError: the task of rank 0, which has the store, is gone.
        """
        if not ok:
            self._client.set(_FAILED, b"")
        self._client.set(f"{_ENDED}{rank}", b"")

    def wait_for_ends(self, give_up: Callable[[], bool]) -> None:
        """Wait until the end of every worker has been announced, or ``give_up()`` is true."""
        keys = [f"{_ENDED}{rank}" for rank in range(self._size)]
        while not give_up():
            try:
                self._client.wait(keys, _WAIT_S)
                return
            except TimeoutError:
                continue

    def _another_failed(self) -> bool:
        try:
            return self._client.check([_FAILED])
        except ConnectionError:
            return True  # the task of rank 0 is gone


def reach(hosts: Sequence[str], port: int, secret: bytes) -> tuple[KeyValueClient, str]:
    """Connect to the job's key-value store. Returns a client, and the first address that answered.

    Raises:
        ConnectionError: no address answered.
    """
    errors: list[str] = []
    for one in hosts:
        try:
            # The store is already running, so a refusal is final; the client itself would keep trying.
            socket.create_connection((one, port), timeout=_REACH_S).close()
            return KeyValueClient(join_address(one, port), secret, _REACH_S), one
        except OSError as error:
            errors.append(f"{join_address(one, port)}: {error}")
    raise ConnectionError("the host of rank 0 cannot be reached: " + "; ".join(errors))
