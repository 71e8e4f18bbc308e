"""Messages from inside a training function to whoever started it: ``log_to_driver("epoch 3: loss 0.12")``."""

from __future__ import annotations

import sys
from typing import Any

from hvd_cluster.launch import progress

#: A message is cut to so many characters.
MAX_CHARS = 4000
_FIELD = "log_to_driver"


def log_to_driver(message: object) -> None:
    """Show ``message`` where the job was started: in the notebook's cell, or on the driver's stdout.

    It is for a few words now and then, such as a loss at the end of an epoch. Outside a worker they are shown here;
    where the workers do not reach the driver (a remote Spark Connect server) nobody sees them.

    Args:
        message: of its text at most the first 4000 characters are shown.
    """
    text = str(message)[:MAX_CHARS]
    if progress.is_attached():
        progress.report(**{_FIELD: text})
    else:
        show(0, {_FIELD: text})


def show(rank: int, fields: dict[str, Any]) -> None:
    """The driver's side, as ``on_event``: write the message; events of other kinds are none of ours."""
    del rank
    if _FIELD in fields:
        sys.stdout.write(f"{fields[_FIELD]}\n")
        sys.stdout.flush()
