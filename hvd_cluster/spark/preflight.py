"""Checks before a Spark job starts that it will get slots, now or soon."""

from __future__ import annotations

import logging
import time
from typing import Any

from hvd_cluster.errors import StartTimeoutError
from hvd_cluster.spark import slots
from hvd_cluster.spark.session import Session

logger = logging.getLogger(__name__)

#: Horovod's text, which programs match.
TIMEOUT_TEXT = (
    "Timed out waiting for Spark tasks to start. Please check that you have enough resources to run all Horovod "
    "processes. Each Horovod process runs in a Spark task. You may need to increase the start_timeout parameter to a "
    "larger value if your Spark resources are allocated on-demand."
)
_POLL_S = 0.5
#: A new session's executors take a moment to start; only a longer wait is logged.
_QUIET_S = 3.0


def infer_num_tasks(session: Session, workers_per_task: int = 1) -> int:
    """The number of tasks that the session runs at once.

    Correct also while its executors are still starting.
    """
    present = session.slots()
    if present.max_total is not None and session.conf("spark.default.parallelism") is None:
        num_tasks = present.max_total
    else:
        parallelism = session.default_parallelism()
        num_tasks = min(parallelism, present.max_total or present.total or parallelism)
    num_proc = num_tasks * workers_per_task
    logger.info("Running %d processes (inferred from spark.default.parallelism)...", num_proc)
    return num_tasks


def wait_for_slots(session: Session, needed: int, start_timeout_s: float, profile: Any = None) -> None:
    """Return when ``needed`` tasks can run at once, as far as the session knows.

    Spark's own check runs only every 15 s, and reports nothing for ten minutes.

    Raises:
        NotEnoughSlotsError: the session can never have that many slots.
        StartTimeoutError: expected executors did not start.
    """
    began_s = time.monotonic()
    has_warned = False
    while True:
        present = session.slots(profile)
        slots.check(needed, present)
        if present.enough(needed):
            logger.info("%s", present.describe(needed))
            return
        waited_s = time.monotonic() - began_s
        if waited_s >= start_timeout_s:
            raise StartTimeoutError(timeout_text(present.describe(needed), start_timeout_s))
        if not has_warned and waited_s >= _QUIET_S:
            logger.warning("%s. Waiting up to %g s for more executors", present.describe(needed), start_timeout_s)
            has_warned = True
        time.sleep(min(_POLL_S, start_timeout_s - waited_s))


def timeout_text(slots_text: str, start_timeout_s: float) -> str:
    """The message of a start that took too long."""
    return f"{TIMEOUT_TEXT} Waited for {start_timeout_s:g} s: {slots_text}."
