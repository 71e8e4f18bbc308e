"""When a run is saved within an epoch, and where it goes on there."""

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


def steps_of_rows(spec: FitSpec, rows: int, size: int) -> int:
    """Steps of an epoch behind a run of ``size`` ranks that goes on where all ranks together had trained on ``rows``.

    As many ranks as made them go on exactly there. Another number has global batches of another size: it goes on where
    the last one of them ends, and no group of ``backward_passes_per_step`` batches is begun amid it. It may also have
    another order of rows, as data that were written for another number of workers have: then some rows of the epoch
    come a second time, and as many do not come.
    """
    done = rows // (spec.batch_size * size)
    return done - done % spec.backward_passes_per_step
