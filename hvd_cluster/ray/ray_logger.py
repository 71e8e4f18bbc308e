"""``ray_logger.log({"loss": 0.1})``: passes a worker's dict to the driver.

Each of the driver's callbacks is called with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from hvd_cluster.launch.pickling import loads
from hvd_cluster.ray.pickling import dumps_out_of_band

logger = logging.getLogger(__name__)

_send: Callable[[bytes], None] | None = None
_owner_pid = 0
_has_warned = False


def log(info: dict[str, Any]) -> None:
    """Send values to the callbacks of the run; outside a run, warn once.

    The run is one of ``run``, ``execute`` or ``ElasticRayExecutor.run``.

    Args:
        info: a dict of values that can be pickled.

    Raises:
        TypeError: it is not a dict.
    """
    global _has_warned
    if not isinstance(info, dict):
        raise TypeError(f"ray_logger.log takes a dict, such as {{'loss': 0.1}}, not {type(info).__name__}")
    if _send is not None and os.getpid() == _owner_pid:
        _send(dumps_out_of_band(info))
    elif not _has_warned:
        _has_warned = True
        logger.warning("ray_logger.log has no effect here: this process is not a worker of a RayExecutor")


def configure(queue: Any) -> None:
    """Put what is logged into ``queue``, any object with a ``put``; None stops that."""
    attach(None if queue is None else lambda blob: queue.put(loads(blob)))


def attach(send: Callable[[bytes], None] | None) -> None:
    """Pass what is logged, pickled, to ``send``; None detaches."""
    global _send, _owner_pid
    _send, _owner_pid = send, os.getpid()
