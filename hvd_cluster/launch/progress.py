"""Progress from inside a worker, for the driver's ``on_event(rank, fields)``.

For example ``report(epoch=3, loss=0.1)``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

_send: Callable[[dict[str, Any]], None] | None = None
_owner_pid = 0


def report(**fields: Any) -> None:
    """Send ``fields`` to the driver now.

    Does nothing outside a worker, or in a process that a worker has forked.

    Raises:
        TypeError: a value cannot be written as JSON.
    """
    if _send is None or not is_attached():
        return
    try:
        event = json.loads(json.dumps(fields))
    except (TypeError, ValueError) as error:
        raise TypeError(f"progress must be plain data that JSON can hold: {error}") from None
    _send(event)


def is_attached() -> bool:
    """Whether this process is a worker whose reports reach a driver."""
    return _send is not None and os.getpid() == _owner_pid


def attach(send: Callable[[dict[str, Any]], None] | None) -> None:
    """Pass all further events to ``send``; None detaches."""
    global _send, _owner_pid
    _send, _owner_pid = send, os.getpid()
