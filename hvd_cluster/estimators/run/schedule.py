"""When a run is saved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hvd_cluster.estimators.run.run_files import RunFiles

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec


def is_due_within(spec: FitSpec, done: int, steps: int) -> bool:
    """Whether to save after ``done`` of an epoch's ``steps``: not amid a group of batches, nor at the epoch's end."""
    every = spec.checkpoint_every_steps
    if every is None or done >= steps or done % math.lcm(every, spec.backward_passes_per_step):
        return False
    return RunFiles.of(spec).are_kept
