"""Messages from a training function to the process that started it.

For example ``log_to_driver("epoch 3: loss 0.12")``.
"""

from __future__ import annotations

import sys
from typing import Any

from hvd_cluster.launch import progress

#: A message is cut to this many characters.
MAX_CHARS = 4000
_FIELD = "log_to_driver"


def log_to_driver(message: object) -> None:
    """Show a message in the notebook's cell, or on the driver's stdout.

    It is meant for a few words now and then, such as the loss at the end of an epoch. Outside a worker the message is
    shown here. If the workers do not reach the driver (a remote Spark Connect server), it is dropped.

    Args:
        message: converted to text, of which the first 4000 characters are shown.
    """
    text = str(message)[:MAX_CHARS]
    if progress.is_attached():
        progress.report(**{_FIELD: text})
    else:
        show(0, {_FIELD: text})


def show(rank: int, fields: dict[str, Any]) -> None:
    """Write a worker's message; the driver's ``on_event``.

    Events of other kinds are ignored.
    """
    del rank
    if _FIELD in fields:
        sys.stdout.write(f"{fields[_FIELD]}\n")
        sys.stdout.flush()
