"""Progress from inside a worker: ``report(epoch=3, loss=0.1)`` reaches the driver's ``on_event(rank, fields)``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

_send: Callable[[bytes], None] | None = None
_owner_pid = 0


def report(**fields: Any) -> None:
    """Send ``fields`` to the driver now. Does nothing outside a worker, nor in a process that a worker forked.

    Raises:
        TypeError: a value cannot be written as JSON.
    """
    if _send is None or not is_attached():
        return
    try:
        event = json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise TypeError(f"progress must be plain data that JSON can hold: {error}") from None
    _send(event.encode())


def is_attached() -> bool:
    """Whether this process is a worker whose reports go anywhere."""
    return _send is not None and os.getpid() == _owner_pid


def attach(send: Callable[[bytes], None] | None) -> None:
    """From now on pass events, as JSON text, to ``send``; None detaches."""
    global _send, _owner_pid
    _send, _owner_pid = send, os.getpid()
