"""The search: look at a few parameters, compute which would be best, try those, keep the best that was measured."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hvd_cluster.engine.autotune.cost_model import TransportCost
from hvd_cluster.engine.autotune.log import AutotuneLog
from hvd_cluster.engine.autotune.observation import Observation, Parameters
from hvd_cluster.engine.autotune.steps import StepRecord, StepWatcher
from hvd_cluster.settings import MIB, Settings

logger = logging.getLogger(__name__)

#: Settings' names of what may be tuned.
THRESHOLD, CYCLE = "fusion_threshold_bytes", "cycle_time_ms"
#: The thresholds and cycle times that are considered, besides fractions of what a step reduces.
_THRESHOLDS = (0, *(int(MIB * 2**power) for power in range(-6, 8)))
_FRACTIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_CYCLES_MS = (0.0, 0.1, 0.25, 0.5, 1.0, 1.75, 2.5, 3.5, 5.0, 7.5, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 75.0, 100.0)
#: And these multiples of the best so far.
_NEAR = (0.7, 0.85, 1.2, 1.4)
#: Less than this is not worth another sample.
_WORTHWHILE = 0.0005


@dataclass(frozen=True)
class Sample:
    """What one choice of parameters has given."""

    parameters: Parameters
    #: Median seconds of a step.
    step_s: float
    #: Bytes reduced in a microsecond of such a step.
    score: float


class Tuner:
    """Finds the parameters while the job trains; on rank 0 only.

    Steps are recognised by names that come again, so a job whose requests all have new names is never tuned. After a
    change one step is disregarded: it began with the old parameters.

    Args:
        initial: what the job begins with.
        frozen: of :data:`THRESHOLD` and :data:`CYCLE`, what the user has set and must stay.
        warmup_samples: samples that only teach the pattern of a step.
        steps_per_sample: steps that each choice is measured for; their median counts.
        max_samples: choices that are measured at most.
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
        #: The search is over; :meth:`observe` has nothing more to say.
        self.is_done = self._frozen >= {THRESHOLD, CYCLE}

    @classmethod
    def from_settings(cls, settings: Settings, given: Collection[str]) -> Tuner:
        """The tuner that ``settings`` ask for.

        Args:
            settings: the knobs.
            given: names of the settings that the user has set, as :meth:`Settings.given` says; they stay.
        """
        log = AutotuneLog(settings.autotune_log)
        return cls(
            Parameters(settings.fusion_threshold_bytes, settings.cycle_time_ms),
            frozen=given,
            warmup_samples=settings.autotune_warmup_samples,
            steps_per_sample=settings.autotune_steps_per_sample,
            max_samples=settings.autotune_max_samples,
            on_sample=lambda sample: log.write(sample.parameters, sample.score),
            on_end=lambda sample: log.write(sample.parameters, sample.score),
        )

    @property
    def samples(self) -> list[Sample]:
        """What was measured so far."""
        return list(self._samples)

    def observe(self, seen: Observation) -> Parameters | None:
        """Take a bucket that was carried out.

        Returns:
            The parameters that all ranks are to use from now on; None: no change.
        """
        if self.is_done or not seen.requests:
            return None
        step = self._watcher.hear(seen)
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
        step_s = statistics.median(step.took_s for step in steps)
        num_bytes = statistics.median(sum(n for n, _ in step.arrivals.values()) for step in steps)
        sample = Sample(self._current, step_s, num_bytes / max(step_s, 1e-9) / 1e6)
        self._samples.append(sample)
        self._on_sample(sample)
        logger.info("autotune: %s gives steps of %.2f ms", self._current, step_s * 1e3)
        following = self._explore() or self._exploit()
        if following is None:
            return self._end()
        self._must_skip = 1
        self._current = following
        return following

    def _end(self) -> Parameters | None:
        best = min(self._samples, key=lambda sample: sample.step_s)
        self.is_done = True
        self._on_end(best)
        logger.info("autotune: the best is %s, with steps of %.2f ms", best.parameters, best.step_s * 1e3)
        return None if best.parameters == self._current else best.parameters

    def _explore(self) -> Parameters | None:
        """The parameters whose buckets differ most in size, so that the costs can be told apart."""
        arrivals = self._watcher.pattern().arrivals
        total = sum(num_bytes for _, num_bytes, _ in arrivals)
        span_ms = arrivals[-1][0] * 1000
        tried = {sample.parameters for sample in self._samples}
        for threshold, cycle_ms in ((total // 16, 0.0), (total, span_ms / 4)):
            wanted = self._thawed(Parameters(int(threshold), round(min(100.0, cycle_ms), 3)))
            if wanted not in tried and len(self._samples) < min(3, self._max_samples):
                return wanted
        return None

    def _exploit(self) -> Parameters | None:
        """What the model holds for the best of what was not tried; None when that is not worth trying."""
        if len(self._samples) >= self._max_samples:
            return None
        pattern, cost = self._watcher.pattern(), TransportCost.fit(self._buckets)
        tried = {sample.parameters: sample.step_s for sample in self._samples}
        winner = min(tried, key=lambda parameters: tried[parameters])
        total = sum(num_bytes for _, num_bytes, _ in pattern.arrivals)
        candidates = self._candidates(total, winner) - set(tried)
        if not candidates:
            return None
        predicted = {parameters: pattern.step_s(parameters, cost) for parameters in candidates}
        # Of equal ones, that which asks for least: the smallest buffers, the shortest wait.
        best = min(predicted, key=lambda p: (round(predicted[p], 7), p.cycle_time_ms, p.fusion_threshold_bytes))
        # The model may be off as a whole: compare what it says of both.
        gain = 1 - predicted[best] / max(pattern.step_s(winner, cost), 1e-9)
        return best if gain > _WORTHWHILE else None

    def _candidates(self, total_bytes: int, winner: Parameters) -> set[Parameters]:
        near = [round(winner.fusion_threshold_bytes * factor) for factor in _NEAR]
        thresholds = {*_THRESHOLDS, *(-(-total_bytes // part) for part in _FRACTIONS), *near}
        cycles = {*_CYCLES_MS, *(min(100.0, round(winner.cycle_time_ms * factor, 3)) for factor in _NEAR)}
        return {self._thawed(Parameters(threshold, cycle)) for threshold in thresholds for cycle in cycles}

    def _thawed(self, wanted: Parameters) -> Parameters:
        """``wanted``, where the user has not said otherwise."""
        return Parameters(
            self._initial.fusion_threshold_bytes if THRESHOLD in self._frozen else wanted.fusion_threshold_bytes,
            self._initial.cycle_time_ms if CYCLE in self._frozen else wanted.cycle_time_ms,
        )
