"""The loop around an elastic training function: run it, and after a change of the workers run it again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_cluster.elastic.notification import notifications
from hvd_cluster.elastic.state import State
from hvd_cluster.engine import basics
from hvd_cluster.errors import HorovodInternalError, HostsUpdatedInterrupt

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How often in a row the same workers may meet anew with no commit between: then the fault is the function's.
_MOST_VAIN_RESETS = 3


def run_fn(func: Callable[..., T], reset: Callable[[], None]) -> Callable[..., T]:
    """Make ``func(state, ...)`` survive changes of the workers.

    Args:
        func: a training function whose first argument is a :class:`~hvd_cluster.elastic.state.State`.
        reset: leaves the world and joins the next.

    Returns:
        A function of the same arguments. It makes the state equal on all ranks and calls ``func``. When a collective
        fails (``HorovodInternalError``), the state goes back to its last commit (unless that happens again and again to
        the same workers: then the error is raised); when the hosts have changed
        (``HostsUpdatedInterrupt``), it stays as it is. Then the workers meet anew and ``func`` is called again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        notifications.listen(state)
        must_reset = skip_sync = False
        num_vain, num_commits = 0, state.num_commits
        try:
            while True:
                try:
                    if must_reset:
                        reset()
                        notifications.begin_world(state)
                        state.on_reset()
                        must_reset = False
                        # A worker that is new makes its state equal at first, and all must take part in that.
                        skip_sync = skip_sync and not notifications.num_newcomers
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    if not notifications.is_elastic:
                        raise  # nobody would bring the workers together again
                    is_vain = state.num_commits == num_commits and not notifications.has_changed
                    num_vain, num_commits = num_vain + 1 if is_vain else 0, state.num_commits
                    if num_vain >= _MOST_VAIN_RESETS:
                        raise
                    logger.warning("a worker was lost, or a collective failed: back to the last commit (%s)", error)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    logger.info("the hosts have changed: meeting anew")
                    skip_sync = interrupt.skip_sync
                must_reset = True
        finally:
            notifications.forget(state)

    return wrapper


def rejoin() -> None:
    """Leave the world of this process and join the next."""
    basics.shutdown()
    basics.init()
