"""The search: measure a few parameters, then the predicted best, and compare."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hvd_cluster.engine.autotune.cost_model import Pattern, TransportCost
from hvd_cluster.engine.autotune.log import AutotuneLog
from hvd_cluster.engine.autotune.observation import Observation, Parameters
from hvd_cluster.engine.autotune.steps import StepRecord, StepWatcher
from hvd_cluster.settings import MIB, Settings

logger = logging.getLogger(__name__)

#: Settings' names of what may be tuned.
THRESHOLD, CYCLE = "fusion_threshold_bytes", "cycle_time_ms"
#: The thresholds and cycle times that are considered, in addition to fractions of what a step reduces.
_THRESHOLDS = (0, *(int(MIB * 2**power) for power in range(-6, 8)))
_FRACTIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_CYCLES_MS = (0.0, 0.1, 0.25, 0.5, 1.0, 1.75, 2.5, 3.5, 5.0, 7.5, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 75.0, 100.0)
#: In addition, these multiples of the best so far.
_NEAR = (0.7, 0.85, 1.2, 1.4)
#: How many are measured again at the end: the best of noisy measurements may be due to chance.
_FINALISTS = 3
#: Of normal errors: the standard deviation in median absolute deviations (which a few slow steps do not move), and the
#: standard error of a median in those of a mean.
_SIGMA_OF_MAD, _ERROR_OF_MEDIAN = 1.4826, 1.2533
#: How many standard errors must lie between the initial parameters and those that replace them.
_CERTAIN = 2.0
#: A smaller relative gain is not worth another sample.
_WORTHWHILE = 0.0005


@dataclass(frozen=True)
class Sample:
    """The measurement of one choice of parameters."""

    parameters: Parameters
    #: Median seconds of a step.
    step_s: float
    #: Bytes reduced in a microsecond of such a step.
    score: float


class Tuner:
    """Finds the parameters while the job trains; on rank 0 only.

    Steps are recognised by names that repeat, so a job whose requests all have new names is never tuned. After a change
    one step is ignored: it began with the old parameters.

    Requests of several tensors, such as the buckets of an optimizer's gradients, were packed under the initial fusion
    threshold and do not change. A threshold below the largest of them is not tried: it would have no effect here, but a
    job that starts with it would pack differently from what was measured.

    Args:
        initial: the parameters at the start of the job.
        frozen: those of :data:`THRESHOLD` and :data:`CYCLE` that the user has set and that must not change.
        warmup_samples: samples that are only used to learn the pattern of a step.
        steps_per_sample: steps for each choice; their median is used.
        max_samples: the largest number of measurements, including those of the finalists.
        on_sample: called with each sample.
        on_end: called with the best one.
    """

    def __init__(
        self,
        initial: Parameters,
        *,
        frozen: Collection[str] = (),
        warmup_samples: int = 1,
        steps_per_sample: int = 3,
        max_samples: int = 11,
        on_sample: Callable[[Sample], None] = lambda _: None,
        on_end: Callable[[Sample], None] = lambda _: None,
    ) -> None:
        self._frozen = frozenset(frozen)
        self._warmup_samples = warmup_samples
        self._steps_per_sample = steps_per_sample
        self._max_samples = max_samples
        self._on_sample = on_sample
        self._on_end = on_end
        self._watcher = StepWatcher()
        self._initial = self._current = initial
        self._steps: list[StepRecord] = []
        self._must_skip = 1
        self._buckets: list[tuple[int, int, float]] = []
        self._samples: list[Sample] = []
        #: Seconds of every step that was measured with these parameters.
        self._times: dict[Parameters, list[float]] = {}
        self._finalists: list[Parameters] | None = None
        #: The search is over; :meth:`observe` always returns None.
        self.is_done = self._frozen >= {THRESHOLD, CYCLE}

    @classmethod
    def from_settings(cls, settings: Settings, given: Collection[str], cycle_time_ms: float) -> Tuner:
        """The tuner that ``settings`` ask for.

        Args:
            settings: the knobs.
            given: names of the settings that the user has set, as :meth:`Settings.given` says; they stay.
            cycle_time_ms: the initial cycle time, which depends on the hosts if the user has set none.
        """
        log = AutotuneLog(settings.autotune_log)
        if {THRESHOLD, CYCLE}.issubset(given):
            logger.warning(
                "autotune changes nothing: HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are both set, and it keeps "
                "what is set"
            )
        return cls(
            Parameters(settings.fusion_threshold_bytes, cycle_time_ms),
            frozen=given,
            warmup_samples=settings.autotune_warmup_samples,
            steps_per_sample=settings.autotune_steps_per_sample,
            max_samples=settings.autotune_max_samples,
            on_sample=lambda sample: log.write(sample.parameters, sample.score),
            on_end=lambda sample: log.write(sample.parameters, sample.score),
        )

    @property
    def samples(self) -> list[Sample]:
        """The measurements so far."""
        return list(self._samples)

    def observe(self, seen: Observation) -> Parameters | None:
        """Add a bucket that was executed.

        Returns:
            The parameters that all ranks should use from now on; None for no change.
        """
        if self.is_done or not seen.requests:
            return None
        step = self._watcher.add(seen)
        if step is None:
            return None
        self._buckets += step.buckets
        if self._must_skip:
            self._must_skip -= 1
            return None
        self._steps.append(step)
        if len(self._steps) < self._steps_per_sample:
            return None
        return self._end_sample()

    def _end_sample(self) -> Parameters | None:
        steps, self._steps = self._steps, []
        if self._warmup_samples > 0:
            self._warmup_samples -= 1
            return None
        took = self._times.setdefault(self._current, [])
        took += [step.took_s for step in steps]
        step_s = statistics.median(took[-len(steps) :])
        num_bytes = statistics.median(sum(n for n, _ in step.arrivals.values()) for step in steps)
        sample = Sample(self._current, step_s, num_bytes / max(step_s, 1e-9) / 1e6)
        self._samples.append(sample)
        self._on_sample(sample)
        logger.info("autotune: %s gives steps of %.2f ms", self._current, step_s * 1e3)
        following = self._next()
        if following is None:
            return self._end(num_bytes)
        if following == self._current:
            return None
        self._must_skip = 1
        self._current = following
        return following

    def _next(self) -> Parameters | None:
        """The parameters to measure next; None when the search is over."""
        if self._finalists is None:
            following = self._explore() or self._exploit()
            if following is not None:
                return following
            count = min(_FINALISTS, len(self._times), self._max_samples - len(self._samples))
            # The initial parameters come first: the tuned ones are compared with them.
            ranked = sorted(self._times, key=lambda tried: (tried != self._initial, self._median_s(tried)))
            self._finalists = ranked[:count] if count > 1 else []
        return self._finalists.pop(0) if self._finalists else None

    def _end(self, num_bytes: float) -> Parameters | None:
        winner = min(self._times, key=self._median_s)
        if self._median_s(self._initial) - self._median_s(winner) <= _CERTAIN * self._doubt_s(self._initial, winner):
            winner = self._initial
        step_s = self._median_s(winner)
        self.is_done = True
        self._on_end(Sample(winner, step_s, num_bytes / max(step_s, 1e-9) / 1e6))
        logger.info("autotune: the best is %s, with steps of %.2f ms", winner, step_s * 1e3)
        return None if winner == self._current else winner

    def _median_s(self, parameters: Parameters) -> float:
        return statistics.median(self._times[parameters])

    def _doubt_s(self, *tried: Parameters) -> float:
        """The standard error of the difference of two choices' medians, in seconds."""
        variances = []
        for times in (self._times[parameters] for parameters in tried):
            middle_s = statistics.median(times)
            spread_s = _SIGMA_OF_MAD * statistics.median(abs(took_s - middle_s) for took_s in times)
            variances.append((_ERROR_OF_MEDIAN * spread_s) ** 2 / len(times))
        return math.sqrt(sum(variances))

    def _explore(self) -> Parameters | None:
        """The parameters whose buckets differ most in size, to separate the costs."""
        pattern = self._watcher.pattern()
        total = sum(num_bytes for _, num_bytes, _ in pattern.arrivals)
        span_ms = pattern.arrivals[-1][0] * 1000
        for threshold, cycle_ms in ((total // 16, 0.0), (total, span_ms / 4)):
            wanted = self._allowed(Parameters(int(threshold), round(min(100.0, cycle_ms), 3)), pattern.packed_bytes)
            if wanted not in self._times and len(self._samples) < min(3, self._max_samples):
                return wanted
        return None

    def _exploit(self) -> Parameters | None:
        """The model's best untried parameters; None if they are not worth trying."""
        reserved = _FINALISTS if self._max_samples > 2 * _FINALISTS else 0
        if len(self._samples) >= self._max_samples - reserved:
            return None
        pattern, cost = self._watcher.pattern(), TransportCost.fit(self._buckets)
        winner = min(self._times, key=self._median_s)
        candidates = self._candidates(pattern, winner) - set(self._times)
        if not candidates:
            return None
        error = _Error([(tried, self._median_s(tried) / pattern.step_s(tried, cost)) for tried in self._times])
        predicted = {p: pattern.step_s(p, cost) * error.factor(p) for p in candidates}
        # Of equal ones, those with the shortest wait and the smallest buffers.
        best = min(predicted, key=lambda p: (round(predicted[p], 7), p.cycle_time_ms, p.fusion_threshold_bytes))
        gain = 1 - predicted[best] / max(pattern.step_s(winner, cost) * error.factor(winner), 1e-9)
        return best if gain > _WORTHWHILE else None

    def _candidates(self, pattern: Pattern, winner: Parameters) -> set[Parameters]:
        total_bytes = sum(num_bytes for _, num_bytes, _ in pattern.arrivals)
        near = [round(winner.fusion_threshold_bytes * factor) for factor in _NEAR]
        thresholds = {*_THRESHOLDS, *(-(-total_bytes // part) for part in _FRACTIONS), *near}
        cycles = {*_CYCLES_MS, *(min(100.0, round(winner.cycle_time_ms * factor, 3)) for factor in _NEAR)}
        pairs = (Parameters(threshold, cycle) for threshold in thresholds for cycle in cycles)
        return {self._allowed(parameters, pattern.packed_bytes) for parameters in pairs}

    def _allowed(self, wanted: Parameters, packed_bytes: int) -> Parameters:
        """``wanted``, restricted by what the user has set and by what was packed already."""
        first_bytes = self._initial.fusion_threshold_bytes
        # A request larger than the initial threshold is a group of the user's.
        threshold = max(wanted.fusion_threshold_bytes, min(packed_bytes, first_bytes))
        return Parameters(
            first_bytes if THRESHOLD in self._frozen else threshold,
            self._initial.cycle_time_ms if CYCLE in self._frozen else wanted.cycle_time_ms,
        )


class _Error:
    """The model's error, e.g. as buckets slow backward down: measured / predicted.

    A smooth surface through the samples: the sample's ratio close to it, their median far from all of them.
    """

    #: Distance at which a sample has a weight of 0.6, in factors of two of the threshold and the cycle time.
    _REACH = 1.5
    #: Weight of the median.
    _PRIOR = 0.2

    def __init__(self, ratios: Sequence[tuple[Parameters, float]]) -> None:
        self._known = [(*_position(parameters), math.log(ratio)) for parameters, ratio in ratios]
        self._median = statistics.median(ratio for *_, ratio in self._known)

    def factor(self, parameters: Parameters) -> float:
        """By which to multiply the model's prediction."""
        x, y = _position(parameters)
        total, weights = self._PRIOR * self._median, self._PRIOR
        for there_x, there_y, ratio in self._known:
            weight = math.exp(-((x - there_x) ** 2 + (y - there_y) ** 2) / (2 * self._REACH**2))
            total += weight * ratio
            weights += weight
        return math.exp(total / weights)


def _position(parameters: Parameters) -> tuple[float, float]:
    return math.log2(parameters.fusion_threshold_bytes + MIB / 64), math.log2(parameters.cycle_time_ms + 0.25)
