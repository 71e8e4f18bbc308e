"""A connection of this process to a Ray cluster, and access to Ray while it lasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_cluster.ray.session import load_ray

#: Why there are no workers any more, as part of a sentence.
ENDED = "this program's connection to Ray has ended (ray.shutdown())"
#: How a worker ended, as the end of a sentence about its rank.
ENDING_TEXT = "ended with this program's connection to Ray (ray.shutdown())"


class ConnectionEndedError(ConnectionError):
    """The program has called ``ray.shutdown()``, and perhaps ``ray.init()`` after it."""


@dataclass(frozen=True)
class Connection:
    """It ends with ``ray.shutdown()``; a later ``ray.init()`` makes another one with new actors and objects.

    Ray does not check this: without a connection its functions start a new cluster, and the program's next
    ``ray.init()`` fails; a handle or a reference of an earlier connection may even end the process.
    """

    #: The node of this process, whose id Ray never uses twice; empty without a connection.
    node_id: str = ""
    job_id: str = ""

    @classmethod
    def current(cls) -> Connection:
        """The present connection."""
        ray = load_ray()
        if not ray.is_initialized():
            return cls()
        # Not ray.get_runtime_context, which would connect if another thread ended the connection at this moment.
        context = ray.runtime_context.get_runtime_context()
        try:
            return cls(context.get_node_id(), context.get_job_id())
        except Exception:  # whatever Ray raises during a shutdown
            if ray.is_initialized():
                raise
            return cls()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or there was none."""
        return not self.node_id or self != self.current()

    def ray(self) -> Any:
        """The package ``ray``, for use with objects of this connection.

        Raises:
            ConnectionEndedError: it has ended.
        """
        if self.has_ended:
            raise ConnectionEndedError(ENDED)
        return load_ray()
