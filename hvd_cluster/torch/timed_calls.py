"""Lets the step clock see what torch programs wait for outside of this package: a DataLoader, ``torch.save``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch.utils.data import dataloader

from hvd_cluster.monitor.step_clock import DATA, SAVE, step_clock

F = TypeVar("F", bound=Callable[..., Any])


@lru_cache(maxsize=1)
def time_calls_of_torch() -> None:
    """From now on these calls are timed; a second call has no effect."""
    dataloader._BaseDataLoaderIter.__next__ = _timed(dataloader._BaseDataLoaderIter.__next__, DATA)  # type: ignore[method-assign]
    # Both names, so that it can still be pickled.
    torch.save = torch.serialization.save = _timed(torch.save, SAVE)


def _timed(function: F, activity: int) -> F:
    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        before = step_clock.enter(activity)
        try:
            return function(*args, **kwargs)
        finally:
            step_clock.leave(before)

    return timed  # type: ignore[return-value]
