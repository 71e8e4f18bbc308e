"""Spark jobs that end when the thread that waits for them is interrupted.

On classic and Connect sessions. An interrupt comes at once in the thread that is inside ``collect``, and the job
continues without it. So a job is submitted from a thread of its own, under a name by which it can be cancelled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hvd_cluster.data.cancelling import cancel_until
from hvd_cluster.errors import LaunchError
from hvd_cluster.topology import inherited_env

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Schema and table, or catalog, schema and table.
_TABLE_NAME = re.compile(r"\w+(\.\w+){1,2}")

_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
#: Seconds that tasks may outlive their job: Spark waits two seconds before it kills a Python worker.
_TASKS_END_S = 4.0


def run(spark: Any, action: Callable[[], T], description: str) -> T:
    """The result of an action of Spark (``collect``, a write).

    Its tasks have ended if this is interrupted.
    """
    tag = f"hvd_cluster.{uuid.uuid4().hex[:12]}"
    found: list[T] = []
    errors: list[BaseException] = []
    finished = threading.Event()

    def submit() -> None:
        try:
            found.append(action())
        except BaseException as error:  # noqa: BLE001  raised again in the calling thread
            errors.append(error)
        finally:
            finished.set()

    submitting = thread(spark, submit, tag, description)
    try:
        submitting.start()
        while not finished.wait(0.2):
            pass
    except BaseException:  # raised again: the rows are no longer wanted
        if submitting.is_alive():
            if not cancel_until(finished.wait, lambda: cancel(spark, tag)):
                logger.error("the Spark job %s does not end although it was cancelled repeatedly", tag)
            _let_tasks_end(spark, tag)
        raise
    submitting.join()
    if errors:
        error = errors.pop()
        if advice := missing_module(str(error)):
            raise LaunchError(f"{description}: {advice}") from error
        raise error
    return found.pop()


def thread(spark: Any, target: Callable[[], None], tag: str, description: str) -> threading.Thread:
    """A thread, not yet started, whose jobs :func:`cancel` with ``tag`` reaches."""
    outer_tags = set(spark.getTags()) if is_connect(spark) else set()

    def run_named() -> None:
        try:
            if is_connect(spark):
                for one in (*outer_tags, tag):
                    spark.addTag(one)
            else:
                spark.sparkContext.setJobGroup(tag, description, interruptOnCancel=True)
        except Exception as error:  # noqa: BLE001  the session has gone: the target says so better
            logger.debug("the jobs of %s have no name to be cancelled by: %s", tag, error)
        target()

    if is_connect(spark):
        return threading.Thread(target=run_named, name=tag, daemon=True)
    from pyspark import InheritableThread

    inheriting: threading.Thread = InheritableThread(target=run_named, name=tag, daemon=True)
    return inheriting


def cancel(spark: Any, tag: str) -> None:
    """Cancel the jobs that run under ``tag``.

    A job that has not been submitted yet is not reached.
    """
    if is_connect(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobGroup(tag)


def running_tasks(spark: Any, tag: str) -> int | None:
    """The number of tasks of the jobs under ``tag`` that run now.

    None on Connect, whose server does not say.
    """
    if is_connect(spark):
        return None
    tracker = spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(tag)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return sum(int(stage.numActiveTasks) for stage in stages if stage is not None)


def _let_tasks_end(spark: Any, tag: str) -> None:
    """A cancelled job is over before its tasks are: wait for those."""
    until = time.monotonic() + _TASKS_END_S
    try:
        while running_tasks(spark, tag) != 0 and time.monotonic() < until:
            time.sleep(0.1)
    except Exception as error:  # noqa: BLE001  the tracker may have stopped, or py4j fails in any way
        logger.debug("cannot find out whether tasks still run: %s", error)


def use_this_python(spark: Any) -> None:
    """Let tasks on this machine run with this process's Python.

    Unless the user has chosen one. Spark takes the first python3 of the PATH. If a virtual environment is not
    activated, that is another one, which has none of the user's packages.
    """
    if is_connect(spark) or "PYSPARK_PYTHON" in inherited_env():
        return
    context = spark.sparkContext
    if context.master.startswith("local") and context.getConf().get("spark.pyspark.python") is None:
        context.pythonExec = sys.executable


def missing_module(text: str) -> str:
    """Advice, if Spark says that its tasks' Python lacks a module; else ""."""
    found = _MISSING.search(text)
    if found is None:
        return ""
    return (
        f"the Python that runs Spark's tasks has no module '{found[1]}'. Install it on every host and, before the "
        f"session starts, set PYSPARK_PYTHON to that Python; this process runs {sys.executable}"
    )


def is_connect(spark: Any) -> bool:
    """Whether a session is one of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


#: What Spark calls for each partition.
OnBatches = Callable[[Iterator[Any]], Iterator[Any]]


def quoted(name: str) -> str:
    """A column's name as ``select`` takes it: dots and backticks are part of it."""
    return "`" + name.replace("`", "``") + "`"


def cast(frame: Any, types: Mapping[str, str]) -> Any:
    """``frame`` with columns of other types, by name."""
    columns = [frame[quoted(n)].cast(types[n]).alias(n) if n in types else frame[quoted(n)] for n in frame.columns]
    return frame.select(*columns) if types else frame


def map_batches(frame: Any, fn: OnBatches, schema: Any) -> Any:
    """``frame.mapInArrow(fn, schema)`` for any names.

    ``mapInArrow`` looks columns up by name, and takes a dot for a field and a backtick for a quote. So it gets columns
    named c0, c1, ... by their places, and ``fn`` gets batches with the names of ``frame``.
    """
    use_this_python(frame.sparkSession)
    names = list(frame.columns)
    numbered = frame.toDF(*(f"c{index}" for index in range(len(names))))
    return numbered.mapInArrow(functools.partial(_with_names, fn, names), schema)


def _with_names(fn: OnBatches, names: Sequence[str], batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
    from pyarrow import RecordBatch

    # rename_columns() of a batch came with pyarrow 16, after the oldest that we take.
    return fn(RecordBatch.from_arrays(batch.columns, names=list(names)) for batch in batches)


def connect_session() -> Any:
    """The Connect session of this process, or None.

    A session is active only in the thread that started it: other threads, such as those of a pool, get the default one.
    """
    module = sys.modules.get("pyspark.sql.connect.session")
    if module is None:  # this process has not created one
        return None
    session = module.SparkSession.getActiveSession() or module.SparkSession._default_session
    return None if session is None or getattr(session, "is_stopped", False) else session


def classic_session() -> Any:
    """The classic session of this process, or None.

    As :func:`connect_session` in other threads.

    Raises:
        ImportError: pyspark is not installed, or is one that is a client of Connect servers alone.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:
        return None
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def is_table_name(name: object) -> bool:
    """Whether this may be the name of a table: no file has such a name.

    Such a name is ``"catalog.schema.table"`` or ``"schema.table"``.
    """
    return isinstance(name, str) and bool(_TABLE_NAME.fullmatch(name)) and not Path(name).exists()


def table_named(name: str) -> Any:
    """The DataFrame of a table's name in this process's Spark session, or None.

    It is None without a session or such a table.
    """
    if "pyspark" not in sys.modules:
        return None
    # A local Connect server also has a classic session in this process, but the user works with this one.
    session = connect_session()
    if session is None:
        with contextlib.suppress(ImportError):
            session = classic_session()
    if session is None:
        return None
    from pyspark.errors import AnalysisException

    try:
        return session.table(name) if session.catalog.tableExists(name) else None
    except AnalysisException:  # its first part names no catalog
        return None
