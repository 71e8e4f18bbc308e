"""The tuner on a fake clock: within 50 steps it finds parameters at least as good as the best of a grid."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hvd_cluster.engine.autotune import Observation, Parameters, Tuner
from hvd_cluster.engine.autotune.steps import MAX_REQUESTS
from hvd_cluster.engine.autotune.tuner import CYCLE, THRESHOLD
from hvd_cluster.settings import MIB, Settings

GRID = [
    Parameters(threshold, cycle)
    for threshold in (0, 64 << 10, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)
    for cycle in (0.0, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
]
INITIAL = Parameters(128 * MIB, 1.0)


@dataclass
class FakeJob:
    """A job whose clock is a number: backward submits gradients, an engine gathers, a transport reduces."""

    #: (seconds after the beginning of backward, bytes) of each gradient.
    gradients: list[tuple[float, int]]
    #: Seconds of a bucket of so many bytes and requests.
    transport: Callable[[int, int], float]
    rest_s: float = 0.05
    negotiation_s: float = 0.0005
    noise: random.Random | None = None
    #: Bytes of the largest of the gradients that holds several tensors.
    packed_bytes: int = 0
    now_s: float = 100.0
    num_steps: int = 0

    def step(self, parameters: Parameters) -> list[Observation]:
        """The buckets of one step; the clock goes on to the beginning of the next one's backward."""
        self.num_steps += 1
        began_s = self.now_s
        waiting = [
            (f"allreduce.g{i}", size, began_s + self._shaken(at_s)) for i, (at_s, size) in enumerate(self.gradients)
        ]
        waiting.sort(key=lambda request: request[2])
        over_s = waiting[-1][2]
        seen, free_s = [], began_s
        while waiting:
            # Synchronize comes right after the last gradient, and asks for everything at once.
            flush_s = min(waiting[0][2] + parameters.cycle_time_ms / 1000, over_s)
            flush_s = max(flush_s, waiting[0][2])
            flushed = [request for request in waiting if request[2] <= flush_s]
            waiting = waiting[len(flushed) :]
            decided_s = flush_s + self.negotiation_s
            while flushed:
                bucket = [flushed.pop(0)]
                while flushed and sum(r[1] for r in bucket) + flushed[0][1] <= parameters.fusion_threshold_bytes:
                    bucket.append(flushed.pop(0))
                took_s = self._shaken(self.transport(sum(r[1] for r in bucket), len(bucket)))
                free_s = max(free_s, decided_s) + took_s
                seen.append(Observation(bucket, decided_s, free_s, self.packed_bytes))
        self.now_s = max(free_s, over_s) + self._shaken(self.rest_s)
        return seen

    def _shaken(self, value_s: float) -> float:
        return value_s if self.noise is None else value_s * self.noise.uniform(0.98, 1.02)

    def true_step_s(self, parameters: Parameters) -> float:
        """Without noise."""
        still = FakeJob(self.gradients, self.transport, self.rest_s, self.negotiation_s)
        still.step(parameters)
        return still.now_s - 100.0


@dataclass
class Run:
    """A tuner at work on a job until it is done."""

    job: FakeJob
    tuner: Tuner
    current: Parameters = INITIAL
    changes: list[Parameters] = field(default_factory=list)

    def go(self, max_steps: int = 60) -> Run:
        while not self.tuner.is_done and self.job.num_steps < max_steps:
            for seen in self.job.step(self.current):
                changed = self.tuner.observe(seen)
                if changed is not None:
                    self.changes.append(changed)
                    self.current = changed
        return self


def gradients(seed: int, count: int, total_bytes: int, backward_s: float) -> list[tuple[float, int]]:
    choose = random.Random(seed)
    weights = [choose.expovariate(1.0) for _ in range(count)]
    times = sorted(choose.uniform(0, backward_s) for _ in range(count))
    return [(at_s, 4 + int(total_bytes * weight / sum(weights))) for at_s, weight in zip(times, weights, strict=True)]


TRANSPORTS: dict[str, Callable[[int, int], float]] = {
    "a slow start": lambda size, count: 3e-3 + size / 2e9 + count * 5e-6,
    "a thin wire": lambda size, count: 100e-6 + size / 4e8 + count * 5e-6,
    "dear requests": lambda size, count: 50e-6 + size / 5e9 + count * 400e-6,
    "a cache that overflows": lambda size, count: 500e-6 + min(size, 4 * MIB) / 8e9 + max(0, size - 4 * MIB) / 8e8,
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("noisy", [False, True], ids=["still", "noisy"])
@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize(("count", "total"), [(160, 100 * MIB), (40, 20 * MIB), (300, 500 * MIB)])
def test_within_50_steps_it_is_at_least_as_good_as_the_best_of_a_grid(
    name: str, count: int, total: int, noisy: bool
) -> None:
    job = FakeJob(gradients(count, count, total, 0.12), TRANSPORTS[name], noise=random.Random(1) if noisy else None)
    run = Run(job, Tuner(INITIAL)).go()
    assert run.tuner.is_done
    assert job.num_steps <= 50
    best_of_grid = min(job.true_step_s(parameters) for parameters in GRID)
    tolerance = 1.02 if noisy else 1.002
    assert job.true_step_s(run.current) <= best_of_grid * tolerance


@pytest.mark.long
def test_the_tuned_parameters_are_better_than_the_first_where_these_are_bad() -> None:
    job = FakeJob(gradients(5, 160, 100 * MIB, 0.12), TRANSPORTS["a slow start"])
    run = Run(job, Tuner(Parameters(0, 0.0)), current=Parameters(0, 0.0)).go()
    assert job.true_step_s(run.current) < 0.5 * job.true_step_s(Parameters(0, 0.0))


@pytest.mark.parametrize("frozen", [{THRESHOLD}, {CYCLE}])
def test_what_the_user_has_set_stays(frozen: set[str]) -> None:
    job = FakeJob(gradients(5, 60, 50 * MIB, 0.1), TRANSPORTS["a slow start"])
    run = Run(job, Tuner(INITIAL, frozen=frozen)).go()
    assert run.tuner.is_done
    assert run.changes
    for name in frozen:
        assert {getattr(parameters, name) for parameters in run.changes} == {getattr(INITIAL, name)}


@pytest.mark.long
@pytest.mark.parametrize(("packed", "least"), [(4 * MIB, 4 * MIB), (500 * MIB, INITIAL.fusion_threshold_bytes)])
def test_what_was_packed_before_the_engine_had_it_is_never_given_a_threshold_that_would_have_packed_it_otherwise(
    packed: int, least: int
) -> None:
    # Small fractions of the step would be best here, were they what they seem to be.
    job = FakeJob(gradients(5, 60, 50 * MIB, 0.1), TRANSPORTS["a thin wire"], packed_bytes=packed)
    run = Run(job, Tuner(INITIAL)).go()
    assert run.changes
    assert min(parameters.fusion_threshold_bytes for parameters in run.changes) >= least
    freely = Run(FakeJob(job.gradients, job.transport), Tuner(INITIAL)).go()
    assert min(parameters.fusion_threshold_bytes for parameters in freely.changes) < least


def test_with_both_set_there_is_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    tuner = Tuner.from_settings(Settings(autotune=True), {THRESHOLD, CYCLE, "cache_capacity"}, 1.0)
    assert tuner.is_done
    assert "autotune changes nothing: HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are both set" in caplog.text
    assert tuner.observe(Observation([("a", 4, 0.0)], 1.0, 2.0)) is None


def test_the_number_of_samples_and_their_steps_is_what_the_knobs_say() -> None:
    job = FakeJob(gradients(5, 60, 50 * MIB, 0.1), TRANSPORTS["a cache that overflows"], noise=random.Random(2))
    tuner = Tuner(INITIAL, warmup_samples=2, steps_per_sample=5, max_samples=4)
    Run(job, tuner).go(200)
    assert 2 <= len(tuner.samples) <= 4
    assert job.num_steps <= (2 + 4) * (5 + 1) + 1


def test_requests_with_names_that_never_repeat_are_not_tuned_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    tuner = Tuner(INITIAL)

    def observe(numbers: range) -> int:
        began_bytes = tracemalloc.get_traced_memory()[0]
        for i in numbers:
            assert tuner.observe(Observation([(f"allreduce.noname.{i}", 4, i)], i + 0.1, i + 0.2)) is None
        return tracemalloc.get_traced_memory()[0] - began_bytes

    tracemalloc.start()
    try:
        grown_bytes = observe(range(MAX_REQUESTS)), observe(range(MAX_REQUESTS, 5 * MAX_REQUESTS))
    finally:
        tracemalloc.stop()
    assert grown_bytes[1] < grown_bytes[0]
    assert tuner.samples == []
    (record,) = caplog.records
    assert "no name is repeated in 10000 requests" in record.getMessage()
    assert Run(FakeJob(gradients(5, 60, 50 * MIB, 0.1), TRANSPORTS["a slow start"]), tuner).go().tuner.is_done


def test_one_tensor_after_the_other_is_a_step_each() -> None:
    job = FakeJob([(0.0, 1000)], lambda size, count: 1e-3)
    run = Run(job, Tuner(INITIAL)).go()
    assert run.tuner.is_done
    assert run.tuner.samples[0].step_s == pytest.approx(0.001 + 0.0005 + 0.05)


def test_the_log_has_horovods_columns_and_the_best_in_its_last_line(tmp_path: Path) -> None:
    environ = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(tmp_path / "log.csv"), "HOROVOD_CYCLE_TIME": "2.5"}
    settings = Settings.from_env(environ)
    assert settings.autotune
    tuner = Tuner.from_settings(settings, Settings.given(environ), 2.5)
    job = FakeJob(gradients(5, 60, 50 * MIB, 0.1), TRANSPORTS["a slow start"])
    current = Parameters(settings.fusion_threshold_bytes, settings.cycle_time_ms)
    run = Run(job, tuner, current).go()
    head, *lines = (tmp_path / "log.csv").read_text().splitlines()
    assert head == (
        "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,"
        "cycle_time_ms,tensor_fusion_threshold,score"
    )
    rows = [line.split(",") for line in lines]
    assert len(rows) == len(tuner.samples) + 1
    assert {row[4] for row in rows} == {"2.5"}
    assert rows[-1][5] == str(run.current.fusion_threshold_bytes)
    assert float(rows[-1][6]) == max(float(row[6]) for row in rows)


def test_a_log_that_cannot_be_written_does_not_stop_the_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuner = Tuner.from_settings(Settings(autotune=True, autotune_log=str(tmp_path / "no" / "log.csv")), (), 1.0)
    assert "autotune cannot write its log" in caplog.text
    job = FakeJob(gradients(5, 20, 50 * MIB, 0.1), TRANSPORTS["a slow start"])
    assert Run(job, tuner).go().tuner.is_done


def hiccups(job: FakeJob, seed: int, often: float) -> Callable[[Parameters], list[Observation]]:
    """The job's steps on a machine that others use: each is longer than it ought to be, and some are much longer."""
    choose, step = random.Random(seed), job.step

    def disturbed(parameters: Parameters) -> list[Observation]:
        began_s = job.now_s
        seen = step(parameters)
        job.now_s += (job.now_s - began_s) * (abs(choose.gauss(0, 0.1)) + (choose.random() < often) * 0.5)
        return seen

    return disturbed


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_on_a_machine_that_others_use_it_is_not_worse_than_what_it_began_with(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 5 % is the most that any choice near the best differs here, so a tuner that believed its luck would lose as much.
    def gloo(size: int, count: int) -> float:
        return 1e-3 + size / 1.2e9 + count * 5e-6

    job = FakeJob(gradients(7, 78, 19 * MIB, 0.06), gloo, rest_s=0.025)
    monkeypatch.setattr(job, "step", hiccups(job, seed, 0.1))
    initial = Parameters(64 * MIB, 5.0)
    run = Run(job, Tuner(initial), initial).go()
    assert run.tuner.is_done
    assert job.true_step_s(run.current) <= job.true_step_s(initial) * 1.02


@pytest.mark.long
def test_what_it_began_with_is_among_the_last_three_and_stays_where_nothing_is_better() -> None:
    job = FakeJob(gradients(5, 160, 100 * MIB, 0.12), TRANSPORTS["dear requests"])
    best = Run(job, Tuner(INITIAL)).go().current
    tuner = Tuner(best)
    again = Run(FakeJob(job.gradients, job.transport), tuner, best).go()
    assert best in [sample.parameters for sample in tuner.samples[-3:]]
    assert again.job.true_step_s(again.current) <= job.true_step_s(best)


@pytest.mark.long
def test_what_is_tried_is_new_until_the_first_and_the_best_two_others_are_measured_again() -> None:
    job = FakeJob(gradients(7, 100, 80 * MIB, 0.1), TRANSPORTS["a cache that overflows"], noise=random.Random(3))
    tuner = Tuner(INITIAL)
    Run(job, tuner).go()
    tried = [sample.parameters for sample in tuner.samples]
    first, again = tried[:-3], tried[-3:]
    assert len(set(first)) == len(first) >= 3
    assert len(set(again)) == 3
    others = [sample for sample in tuner.samples[:-3] if sample.parameters != INITIAL]
    assert set(again) == {INITIAL, *(sample.parameters for sample in sorted(others, key=lambda s: s.step_s)[:2])}
