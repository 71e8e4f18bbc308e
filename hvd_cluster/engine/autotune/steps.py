"""Training steps, recognised in buckets by the names that a job repeats."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_cluster.engine.autotune.cost_model import Pattern
from hvd_cluster.engine.autotune.observation import Observation

logger = logging.getLogger(__name__)

#: Steps that the pattern is the median of.
_MEMORY = 12
#: More arrivals than this are merged, so that a prediction takes very little time.
_MAX_ARRIVALS = 300
#: After this many requests without a repeated name the job does not repeat names, and the record would grow forever.
MAX_REQUESTS = 10_000


@dataclass
class StepRecord:
    """One training step."""

    began_s: float
    #: Name -> (bytes, seconds after the beginning).
    arrivals: dict[str, tuple[int, float]] = field(default_factory=dict)
    #: Seconds from submission to decision, of each request.
    waits_s: list[float] = field(default_factory=list)
    #: (bytes, requests, seconds) of each bucket.
    buckets: list[tuple[int, int, float]] = field(default_factory=list)
    #: Of the largest request that holds several tensors.
    packed_bytes: int = 0
    last_done_s: float = 0.0
    #: Known when the next step begins.
    took_s: float = 0.0
    rest_s: float = 0.0


class StepWatcher:
    """Splits buckets into steps; the next step begins when a name repeats.

    After :data:`MAX_REQUESTS` requests without a repeated name it discards their record and starts again.
    """

    def __init__(self) -> None:
        self._has_warned = False
        self._step: StepRecord | None = None
        self._recent: deque[StepRecord] = deque(maxlen=_MEMORY)
        self._free_s = 0.0

    def add(self, seen: Observation) -> StepRecord | None:
        """Add a bucket; if it begins a new step, returns the previous one."""
        finished = None
        if self._step is not None and any(name in self._step.arrivals for name, _, _ in seen.requests):
            finished = self._step
            began_s = min(submitted_s for _, _, submitted_s in seen.requests)
            finished.took_s = began_s - finished.began_s
            last_s = finished.began_s + max(offset_s for _, offset_s in finished.arrivals.values())
            finished.rest_s = max(0.0, began_s - max(finished.last_done_s, last_s))
            self._recent.append(finished)
            self._step = None
        elif self._step is not None and len(self._step.arrivals) >= MAX_REQUESTS:
            self._warn()
            self._step = None
        if self._step is None:
            self._step = StepRecord(min(submitted_s for _, _, submitted_s in seen.requests))
        step = self._step
        for name, num_bytes, submitted_s in seen.requests:
            # A bucket may hold earlier submissions than the first bucket did.
            step.arrivals[name] = (num_bytes, max(0.0, submitted_s - step.began_s))
            step.waits_s.append(seen.decided_s - submitted_s)
        step.packed_bytes = max(step.packed_bytes, seen.packed_bytes)
        # Buckets run one after the other: one that was decided early has waited for the previous ones.
        began_s = max(seen.decided_s, self._free_s)
        step.buckets.append((seen.num_bytes, len(seen.requests), max(0.0, seen.done_s - began_s)))
        self._free_s = step.last_done_s = max(self._free_s, seen.done_s)
        return finished

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "autotune cannot recognise training steps: no name is repeated in %d requests. Pass the same name= to "
                "a collective in every step, e.g. hvd.allreduce(tensor, name='loss'), or unset HOROVOD_AUTOTUNE",
                MAX_REQUESTS,
            )

    def pattern(self) -> Pattern:
        """The pattern of a step: medians over the last steps."""
        last = self._recent[-1]
        arrivals = []
        for name, (num_bytes, _) in last.arrivals.items():
            offsets = [step.arrivals[name][1] for step in self._recent if name in step.arrivals]
            arrivals.append((statistics.median(offsets), num_bytes, 1))
        # The last request before a flush has waited only for the other ranks.
        waits = [min(step.waits_s) for step in self._recent]
        rest_s = statistics.median(step.rest_s for step in self._recent)
        packed_bytes = max(step.packed_bytes for step in self._recent)
        return Pattern(_merged(sorted(arrivals)), max(0.0, statistics.median(waits)), rest_s, packed_bytes)


def _merged(arrivals: Sequence[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    size = -(-len(arrivals) // _MAX_ARRIVALS)
    groups = [arrivals[start : start + size] for start in range(0, len(arrivals), size)]
    return [(group[-1][0], sum(n for _, n, _ in group), sum(k for _, _, k in group)) for group in groups]
