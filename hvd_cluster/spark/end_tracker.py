"""How the tasks of a job follow each other's ending_text: through keys of the job's store."""

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
#: Seconds for reaching the store at one of its addresses.
_REACH_S = 5.0
#: Seconds of one wait for the others' ends.
_WAIT_S = 1.0


class EndTracker:
    """The other tasks, seen from one of them.

    Args:
        client: a connection to the job's store.
        size: number of workers.
    """

    def __init__(self, client: KeyValueClient, size: int) -> None:
        self._client = client
        self._size = size
        self._period_s = max(0.5, size / 500)  # all tasks ask one thread of rank 0's task
        self._next_look_s = 0.0
        self._deadline_s = math.inf

    def deadline_s(self) -> float:
        """When (``time.monotonic``) this task's workers must have ended: infinity until one has failed."""
        now_s = time.monotonic()
        if self._deadline_s == math.inf and now_s >= self._next_look_s:
            self._next_look_s = now_s + self._period_s
            if self._another_failed():
                self._deadline_s = now_s + FAILURE_GRACE_S
        return self._deadline_s

    def announce_end(self, rank: int, ok: bool) -> None:
        """Tell all tasks that a worker of this one has ended; if not ``ok``, the others have to end as well.

        Raises:
            ConnectionError: the task of rank 0, which holds the store, is gone.
        """
        if not ok:
            self._client.set(_FAILED, b"")
        self._client.set(f"{_ENDED}{rank}", b"")

    def wait_for_ends(self, give_up: Callable[[], bool]) -> None:
        """Wait until the end of every worker has been announced, or until ``give_up()``."""
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
    """A client of the job's store at the first of its host's addresses that answers here, and that address.

    Raises:
        ConnectionError: none of them does.
    """
    errors: list[str] = []
    for one in hosts:
        try:
            # The store is up already, so a refusal is final; the client itself would go on trying.
            socket.create_connection((one, port), timeout=_REACH_S).close()
            return KeyValueClient(join_address(one, port), secret, _REACH_S), one
        except OSError as error:
            errors.append(f"{join_address(one, port)}: {error}")
    raise ConnectionError("the host of rank 0 cannot be reached: " + "; ".join(errors))
