"""The loop that runs an elastic training function.

It runs the function again after the workers have changed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_cluster.elastic.notification import notifications
from hvd_cluster.elastic.state import State
from hvd_cluster.engine import basics
from hvd_cluster.engine.compiled_steps import take_kept_error
from hvd_cluster.errors import HorovodInternalError, HostsUpdatedInterrupt

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Consecutive resets of the same workers without a commit: after this many the function itself must be at fault.
_MAX_RESETS = 3
#: The packages whose errors a compiled step raises in place of the original one.
_RUNTIMES = frozenset({"tensorflow", "jax", "jaxlib"})


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Let a training function continue when workers are lost or added.

    Args:
        func: its first argument is a :class:`~hvd_cluster.elastic.state.State`; its return value is returned. After the
            loss of a worker it is called again with the state of the last commit; after other changes of the workers,
            with the current state. A collective that failed inside a graph counts as a lost worker; other errors of
            TensorFlow and JAX are raised.
    """

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> T:
        take_kept_error()  # discard an earlier error
        try:
            return func(*args, **kwargs)
        except Exception as error:  # of any class: raised again, or as the error that it stands for
            is_runtimes = type(error).__module__.partition(".")[0] in _RUNTIMES
            failure = take_kept_error() if is_runtimes and not isinstance(error, HorovodInternalError) else None
            if failure is None:
                raise
            raise failure from error

    return run_fn(translated, basics.rejoin)


def run_fn(func: Callable[..., T], reset: Callable[[], None]) -> Callable[..., T]:
    """Run ``func(state, ...)`` again whenever the workers have changed.

    Args:
        func: a training function whose first argument is a :class:`~hvd_cluster.elastic.state.State`.
        reset: leaves the world and joins the next one.

    Returns:
        A function of the same arguments. It saves and synchronizes the state, and calls ``func``. When a collective
        fails (``HorovodInternalError``), the state is restored to its last commit (if that happens repeatedly to the
        same workers, the error is raised instead); when the hosts have changed (``HostsUpdatedInterrupt``), it is kept.
        Then the workers form a new world and ``func`` is called again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        notifications.listen(state)
        if notifications.is_elastic:
            state.save()  # what was loaded into it since it was made is lost otherwise if the first world breaks
        must_reset, needs_sync = False, True
        num_resets, num_commits = 0, state.num_commits
        try:
            while True:
                try:
                    if must_reset:
                        notifications.leave_world(skips_sync=not needs_sync)
                        reset()
                        notifications.begin_world(state)
                        # Ranks may leave a world for different reasons, and all must take part in a synchronization.
                        needs_sync = needs_sync or notifications.must_sync
                        state.on_reset()
                        must_reset = False
                    if needs_sync:
                        state.sync()
                        needs_sync = False
                        notifications.report_state()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    if not notifications.is_elastic:
                        raise  # no driver would form a new world
                    has_advanced = state.num_commits > num_commits or notifications.has_changed
                    num_resets, num_commits = 0 if has_advanced else num_resets + 1, state.num_commits
                    if num_resets >= _MAX_RESETS:
                        raise
                    logger.warning("a worker was lost, or a collective failed: restoring the last commit (%s)", error)
                    state.restore()
                    needs_sync = True
                except HostsUpdatedInterrupt as interrupt:
                    logger.info("the hosts have changed: joining the next world")
                    needs_sync = needs_sync or not interrupt.skip_sync
                must_reset = True
        finally:
            notifications.forget(state)

    return wrapper
