"""What the driver concludes from what its tasks told: messages in, sentences out."""

from __future__ import annotations

import pytest

from hvd_cluster.errors import LaunchError, WorkerFailedError
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.spark.messages import Message, RanksAssigned, TaskLost, TaskStarted, WorkerEnded
from hvd_cluster.spark.progress import Progress, short_reason

STARTED = [
    TaskStarted(0, "a"),
    TaskStarted(1, "b"),
    RanksAssigned(0, (0,), "10.0.0.1"),
    RanksAssigned(1, (1,), "10.0.0.2"),
]


def _after(*messages: Message) -> Progress:
    progress = Progress(2)
    for message in messages:
        progress.handle(message)
    return progress


def test_a_job_has_started_when_all_tasks_run() -> None:
    assert not _after().started
    assert not _after(TaskStarted(0, "a")).started
    assert _after(TaskStarted(0, "a"), TaskStarted(1, "b")).started
    # One that has a rank has heard of all the others, though not all of them can reach the driver.
    assert _after(RanksAssigned(0, (0,), "a")).started


def test_the_first_lost_task_is_blamed_with_its_rank_and_host() -> None:
    error = _after(*STARTED, TaskLost(1), TaskLost(0)).failure("Python worker exited unexpectedly")
    assert isinstance(error, WorkerFailedError)
    assert error.rank == 1
    assert str(error).startswith("Rank 1 on host b was lost")
    assert "1 more tasks ended after it" in str(error)
    assert "Spark says: Python worker exited unexpectedly" in str(error)


def test_a_task_that_ended_properly_is_not_lost() -> None:
    assert _after(*STARTED, WorkerEnded(Outcome(1, "b", value=b"")), TaskLost(1)).lost == []


def test_of_several_workers_of_a_lost_task_one_that_still_ran_is_blamed() -> None:
    started = [TaskStarted(0, "a"), RanksAssigned(0, (0, 1), "10.0.0.1")]
    ended = WorkerEnded(Outcome(0, "a", value=b""))
    assert _after(*started, ended, TaskLost(0)).failure("crashed").args[0].startswith("Rank 1 on host a was lost")
    assert _after(*started, ended, WorkerEnded(Outcome(1, "a", value=b"")), TaskLost(0)).lost == []


def test_what_a_worker_raised_beats_the_loss_of_its_task() -> None:
    report = ErrorReport("ValueError", "bad", "Traceback (most recent call last):\nValueError: bad\n")
    error = _after(*STARTED, WorkerEnded(Outcome(0, "a", error=report, finished_at=2.0)), TaskLost(1)).failure(
        "stage failed"
    )
    assert str(error).startswith("Traceback (most recent call last):\nValueError: bad")
    assert isinstance(error, WorkerFailedError)
    assert error.rank == 0


def test_what_fails_after_a_loss_fails_because_of_it() -> None:
    report = ErrorReport("ConnectionError", "the host of rank 0 cannot be reached", "Traceback ...")
    error = _after(*STARTED, TaskLost(0), WorkerEnded(Outcome(1, "b", error=report, finished_at=2.0))).failure(
        "stage failed"
    )
    assert str(error).startswith("Rank 0 on host a was lost")


def test_a_failure_that_a_lost_task_caused_is_not_taken_for_the_cause() -> None:
    echo = ErrorReport("hvd_cluster.errors.WorldEndedError", "a peer died", "Traceback ...", is_secondary=True)
    error = _after(*STARTED, WorkerEnded(Outcome(0, "a", error=echo, finished_at=2.0)), TaskLost(1)).failure(
        "stage failed"
    )
    assert str(error).startswith("Rank 1 on host b was lost")


def test_a_task_that_others_miss_is_lost_once() -> None:
    echo = ErrorReport("hvd_cluster.errors.WorldEndedError", "rank 0 is gone", "Traceback ...", is_secondary=True)
    ended = WorkerEnded(Outcome(1, "b", error=echo, finished_at=2.0))
    error = _after(*STARTED, ended, TaskLost(0), ended, TaskLost(0)).failure("stage failed")
    assert str(error).startswith("Rank 0 on host a was lost")
    assert "more tasks" not in str(error)


def test_a_job_that_spark_refused_is_not_a_failed_worker() -> None:
    error = _after().failure("no such resource")
    assert type(error) is LaunchError
    assert "Spark could not run the workers. Spark says: no such resource" in str(error)


@pytest.mark.parametrize(
    ("spark_says", "comes_again"),
    [
        ("Total size of serialized results (2 GiB) is bigger than spark.driver.maxResultSize (1 GiB)", True),
        ("Lost task 1.0 in stage 0.0: ExecutorLostFailure (executor 1 exited)", False),
        ("Lost task 1.0 in stage 0.0: TaskResultLost (result lost from block manager)", False),
    ],
)
def test_results_that_spark_cannot_bring_are_not_the_death_of_a_worker(spark_says: str, comes_again: bool) -> None:
    done = [WorkerEnded(Outcome(rank, "a", value=b"")) for rank in range(2)]
    error = _after(*STARTED, *done, TaskLost(0), TaskLost(1)).failure(spark_says)
    assert str(error) == f"All workers finished, but Spark could not bring their results. Spark says: {spark_says}"
    assert (isinstance(error, WorkerFailedError) and error.died) is not comes_again  # whether a fit starts again


def test_while_a_worker_runs_spark_has_not_lost_results_but_the_worker() -> None:
    error = _after(*STARTED, WorkerEnded(Outcome(0, "a", value=b"")), TaskLost(1)).failure("ExecutorLostFailure")
    assert isinstance(error, WorkerFailedError)
    assert error.rank == 1


@pytest.mark.parametrize(
    "prefix", ["An error occurred while calling o1.collectToPython.\n: org.apache.spark.SparkException: ", ""]
)
def test_a_spark_exception_is_told_in_sentences_without_frames(prefix: str) -> None:
    text = prefix + (
        "Job aborted: Stage failed because barrier task ResultTask(0, 1) finished unsuccessfully.\n"
        "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider setting 'x'.\n"
        "\tat org.apache.spark.api.python.BasePythonRunner.compute(PythonRunner.scala:1)\n"
        "Caused by: java.io.EOFException: end\n"
        "\t... 27 more\n"
        "\n"
        "Driver stacktrace:\n"
        "\tat org.apache.spark.scheduler.DAGScheduler.abort(DAGScheduler.scala:1)\n"
    )
    assert short_reason(RuntimeError(text)) == (
        "Job aborted: Stage failed because barrier task ResultTask(0, 1) finished unsuccessfully. "
        "Python worker exited unexpectedly (crashed). end"
    )


def test_a_python_error_on_an_executor_is_told_without_its_frames() -> None:
    text = (
        "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):\n"
        '  File "worker.py", line 1, in main\n'
        "    raise PySparkRuntimeError(\n"
        "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has 3.12.\n"
    )
    assert short_reason(RuntimeError(text)) == "[PYTHON_VERSION_MISMATCH] Python in worker has 3.12."
    assert short_reason(RuntimeError("")) == "RuntimeError"
    assert len(short_reason(RuntimeError("word " * 10_000))) <= 800
