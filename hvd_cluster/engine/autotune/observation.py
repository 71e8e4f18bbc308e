"""The input and the output of the tuner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_cluster.engine.request import Request


@dataclass(frozen=True)
class Parameters:
    """The parameters that autotune changes; equal on all ranks."""

    #: The largest size of a bucket; 0 turns fusion off.
    fusion_threshold_bytes: int
    #: How long requests wait to be fused with others.
    cycle_time_ms: float


@dataclass(frozen=True)
class Observation:
    """One bucket that was executed on this rank; all times are ``time.monotonic()``."""

    #: (name, bytes, time of submission) of each request of the bucket.
    requests: Sequence[tuple[str, int, float]]
    #: When all ranks had agreed on it.
    decided_s: float
    #: When its results were complete.
    done_s: float
    #: Bytes of the largest request that holds several tensors; 0: there is none.
    packed_bytes: int = 0

    @classmethod
    def of(cls, requests: Sequence[Request], decided_s: float, done_s: float) -> Observation:
        """The observation of a bucket of the engine."""
        signatures = [request.signature for request in requests]
        return cls(
            [(request.name, request.signature.num_bytes, request.submitted_s) for request in requests],
            decided_s,
            done_s,
            max((signature.num_bytes for signature in signatures if len(signature.tensors) > 1), default=0),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole bucket."""
        return sum(num_bytes for _, num_bytes, _ in self.requests)
