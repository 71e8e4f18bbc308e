"""One stage of a collective: the launched work, and whether more follows."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from hvd_cluster.engine.transports.transport import Work


@dataclass(frozen=True)
class Stage:
    """Resume the collective when all ``works`` are done."""

    works: list[Work]
    #: Its name in the timeline, e.g. "GLOO_ALLREDUCE".
    activity: str
    #: ``time.monotonic()`` before the first of the works was launched; some transports finish the work at launch.
    since_s: float
    #: No work follows, so the next collective of the process set may launch. All ranks must launch work in one order.
    is_last: bool = True


#: Yields stages, returns the results of each request, in order: one list of tensors for each.
Stages = Generator[Stage, None, list[list[torch.Tensor]]]
