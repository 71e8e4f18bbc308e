"""When an elastic job is given up: failures and times in, a sentence out."""

from __future__ import annotations

from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.spark.elastic.failures import Failures

DEATH = Outcome(0, "a", exit_code=-9)
#: What the launcher says of a worker whose task has gone.
LOSS = Outcome(0, "a", error=ErrorReport("LaunchError", "rank 0 lost its host a", "LaunchError: ...\n"))
RAISED = Outcome(1, "a", error=ErrorReport("ValueError", "bad", "ValueError: bad\n", b"pickled"))
SECONDARY = Outcome(
    1, "a", error=ErrorReport("hvd_cluster.errors.WorldEndedError", "a peer died", "...", is_secondary=True)
)


def test_what_the_function_raises_counts_however_long_it_takes() -> None:
    failures = Failures(3)
    assert [failures.record(RAISED, at_s) for at_s in (0.0, 10_000.0)] == ["", ""]
    assert "3 times workers raised an exception; spark.task.maxFailures, now 3" in failures.record(RAISED, 20_000.0)


def test_a_lost_connection_of_the_users_own_counts() -> None:
    error = ErrorReport.of(ConnectionResetError(104, "Connection reset by peer"))
    assert "1 times workers raised" in Failures(1).record(Outcome(0, "a", error=error), 0.0)


def test_deaths_count_only_when_they_follow_each_other_fast() -> None:
    failures = Failures(3)
    assert [failures.record(DEATH, 100.0 * number) for number in range(20)] == [""] * 20
    assert failures.record(LOSS, 1910.0) == ""
    assert "3 times workers died within 60 s" in failures.record(LOSS, 1920.0)


def test_the_workers_of_an_executor_that_fail_together_count_once() -> None:
    failures = Failures(3)
    for began_s in (0.0, 10.0):
        assert {failures.record(outcome, began_s + 0.5 * n) for n in range(8) for outcome in (DEATH, RAISED)} == {""}
    assert failures.record(DEATH, 20.0) != ""


def test_workers_that_die_every_few_seconds_are_not_taken_for_one_incident_forever() -> None:
    failures = Failures(4)
    assert any(failures.record(DEATH, 4.0 * number) for number in range(15))


def test_who_only_noticed_the_end_of_another_one_counts_for_nothing() -> None:
    failures = Failures(1)
    assert failures.record(SECONDARY, 0.0) == ""
    assert failures.record(DEATH, 0.0) != ""


def test_a_launch_error_of_the_users_own_is_not_a_loss() -> None:
    own = ErrorReport("hvd_cluster.errors.LaunchError", "nested", "...", b"pickled")
    assert "raised" in Failures(1).record(Outcome(0, "a", error=own), 0.0)
