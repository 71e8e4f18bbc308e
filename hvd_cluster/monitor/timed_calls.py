"""Functions and iterators whose calls count as an activity of the step clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, TypeVar

from hvd_cluster.monitor.step_clock import DATA, step_clock

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def timed(function: F, activity: int) -> F:
    """The same function; a call of it is ``activity``."""

    @wraps(function)
    def timed_call(*args: Any, **kwargs: Any) -> Any:
        with step_clock.span(activity):
            return function(*args, **kwargs)

    return timed_call  # type: ignore[return-value]


def timed_items(items: Iterable[T]) -> Iterator[T]:
    """The same items; the time to get each of them is DATA."""
    iterator = iter(items)
    while True:
        # Not span(), whose context manager takes a quarter of the time that a small batch costs this thread.
        before = step_clock.enter(DATA)
        is_over = False
        try:
            item = next(iterator)
        except StopIteration:
            is_over = True
            return
        finally:
            step_clock.leave(before, is_end_of_data=is_over)
        yield item
