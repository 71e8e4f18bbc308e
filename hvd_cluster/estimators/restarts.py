"""Whether the workers of a fit start again after a failure: for deaths, never for the user's own exceptions."""

from __future__ import annotations

from hvd_cluster.errors import LaunchError, WorkerFailedError


def is_worth_another_start(error: LaunchError, made: int, allowed: int) -> bool:
    """Decide on one failure.

    Args:
        error: what ended the workers.
        made: how often they have been started again already.
        allowed: how often they may be.
    """
    return isinstance(error, WorkerFailedError) and error.died and made < allowed


def gave_up_text(made: int) -> str:
    """What a fit that is not started again says of those that went before; a line of its own, or empty."""
    return f"\nThe workers had been started again {made} times (max_restarts)." if made else ""
