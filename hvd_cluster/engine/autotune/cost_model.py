"""The fitted cost of a bucket, and the step times it predicts for parameters."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvd_cluster.engine.autotune.observation import Parameters


@dataclass(frozen=True)
class TransportCost:
    """A bucket's seconds: ``(latency + bytes/bandwidth + requests*handling) * bend``.

    The bend corrects the straight line where caches overflow or a protocol changes with the size.
    """

    latency_s: float
    seconds_per_byte: float
    seconds_per_request: float
    #: (log2 of the bytes, measured / straight line), by size; interpolated linearly, constant outside.
    bend: Sequence[tuple[float, float]] = ()

    def seconds(self, num_bytes: float, num_requests: int) -> float:
        """Of a bucket."""
        line_s = self.latency_s + num_bytes * self.seconds_per_byte + num_requests * self.seconds_per_request
        return line_s * self._bend(math.log2(max(1.0, num_bytes)))

    def _bend(self, size: float) -> float:
        if not self.bend:
            return 1.0
        after = bisect.bisect(self.bend, (size, 0.0))
        if after in (0, len(self.bend)):
            return self.bend[min(after, len(self.bend) - 1)][1]
        (left, low), (right, high) = self.bend[after - 1 : after + 1]
        return low + (high - low) * (size - left) / (right - left)

    @classmethod
    def fit(cls, buckets: Iterable[tuple[int, int, float]]) -> TransportCost:
        """The costs that explain ``buckets`` best, none of them negative.

        Args:
            buckets: (bytes, requests, seconds) of each; buckets of equal form count once, with their median.
        """
        times: dict[tuple[int, int], list[float]] = defaultdict(list)
        for num_bytes, num_requests, took_s in buckets:
            times[num_bytes, num_requests].append(took_s)
        seen = {form: statistics.median(values) for form, values in times.items()}
        line = cls(*_line(seen))
        # Sizes within a factor of 1.4 bend alike.
        ratios: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for (num_bytes, num_requests), took_s in seen.items():
            size, expected_s = math.log2(max(1, num_bytes)), line.seconds(num_bytes, num_requests)
            if expected_s > 0:
                ratios[round(2 * size)].append((size, took_s / expected_s))
        bend = sorted(
            (statistics.median(size for size, _ in group), statistics.median(ratio for _, ratio in group))
            for group in ratios.values()
        )
        return replace(line, bend=bend)


def _line(seen: Mapping[tuple[int, int], float]) -> tuple[float, float, float]:
    """Latency, seconds per byte and per request: relative least squares, none < 0."""
    if not seen:
        return (0.0, 0.0, 0.0)
    rows = np.array([[1.0, num_bytes, num_requests] for num_bytes, num_requests in seen])
    times = np.array(list(seen.values()))
    # Relative errors: a large bucket must not hide what a small one costs.
    weights = 1.0 / np.maximum(times, 1e-9)
    best, least = np.zeros(3), float("inf")
    # Three unknowns: every set of them that may be positive, instead of an active-set method.
    for size in (3, 2, 1):
        for columns in itertools.combinations(range(3), size):
            chosen = rows[:, columns]
            scale = np.maximum(np.abs(chosen).max(axis=0), 1e-300)
            found = np.linalg.lstsq(chosen / scale * weights[:, None], times * weights, rcond=None)[0] / scale
            error = float(np.square((chosen @ found - times) * weights).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(3), error
                best[list(columns)] = found
    return (float(best[0]), float(best[1]), float(best[2]))


@dataclass(frozen=True)
class Pattern:
    """The requests of one training step, independent of the parameters."""

    #: (seconds after the step's first submission, bytes, number of requests), in the order of submission.
    arrivals: Sequence[tuple[float, int, int]]
    #: From a flush until all ranks have agreed.
    negotiation_s: float
    #: From the last result, or the last submission if that is later, to the next step's first submission.
    rest_s: float
    #: Bytes of the largest request that holds several tensors; 0: there is none.
    packed_bytes: int = 0

    def step_s(self, parameters: Parameters, cost: TransportCost) -> float:
        """Seconds that a step would take with ``parameters``."""
        last_s = self.arrivals[-1][0]
        cycle_s, threshold = parameters.cycle_time_ms / 1000, parameters.fusion_threshold_bytes
        free_s, index = 0.0, 0
        while index < len(self.arrivals):
            # The first request is held back for others, but not after the last submission, when the user waits.
            flush_s = max(self.arrivals[index][0], min(self.arrivals[index][0] + cycle_s, last_s))
            free_s = max(free_s, flush_s + self.negotiation_s)
            filled, count = 0, 0
            while index < len(self.arrivals) and self.arrivals[index][0] <= flush_s:
                _, num_bytes, num_requests = self.arrivals[index]
                if count and filled + num_bytes > threshold:
                    free_s += cost.seconds(filled, count)
                    filled, count = 0, 0
                filled += num_bytes
                count += num_requests
                index += 1
            free_s += cost.seconds(filled, count)
        return max(free_s, last_s) + self.rest_s
