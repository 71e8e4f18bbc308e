"""Waits for a DataLoader or ``torch.save``, made visible to the step clock."""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import Any

import torch
from torch.utils.data import dataloader

from hvd_cluster.monitor.step_clock import DATA, SAVE
from hvd_cluster.monitor.timed_calls import timed


@lru_cache(maxsize=1)
def time_calls_of_torch() -> None:
    """From now on these calls are timed; a second call has no effect."""
    untimed = dataloader._BaseDataLoaderIter.__next__
    of_training = timed(untimed, DATA)

    @wraps(untimed)
    def __next__(self: Any) -> Any:  # noqa: N807 - the name of what it replaces
        # Without gradients it is a validation, which counts as what happens between the steps.
        return of_training(self) if torch.is_grad_enabled() else untimed(self)

    dataloader._BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]
    # Both names, so that it can still be pickled.
    torch.save = torch.serialization.save = timed(torch.save, SAVE)
