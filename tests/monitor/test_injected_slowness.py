"""Slow jobs of every kind: the monitor names the cause and, where there is one, the rank and its line."""

from __future__ import annotations

import pytest

from benchmarks.slow_jobs import EXPECTED, jobs

#: `python -m benchmarks slow_jobs` runs a hundred.
NUM_JOBS = 2 * len(EXPECTED)
#: A wrong answer in more than this share of the jobs is an error.
MAX_WRONG = 0.05


@pytest.mark.slow
@pytest.mark.timeout(NUM_JOBS * 60 + 60)
def test_the_cause_of_each_slow_job_is_named_within_20_steps() -> None:
    wrong = []
    for job in jobs(NUM_JOBS):
        print(f"{job.kind}, rank {job.victim}: {job.verdict}")
        if not job.is_right:
            wrong.append(f"{job.kind}, rank {job.victim}: {job.verdict or 'nothing'}")
    assert len(wrong) <= MAX_WRONG * NUM_JOBS, "\n".join(wrong)
