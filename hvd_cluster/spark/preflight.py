"""What is found out before a Spark job starts: is there room for its workers, now or soon?"""

from __future__ import annotations

import logging
import time

from hvd_cluster.errors import StartTimeoutError
from hvd_cluster.spark import slots
from hvd_cluster.spark.session import Session

logger = logging.getLogger(__name__)

#: Horovod's words, which programs look for.
TIMEOUT_TEXT = (
    "Timed out waiting for Spark tasks to start. Please check that you have enough resources to run all Horovod "
    "processes. Each Horovod process runs in a Spark task. You may need to increase the start_timeout parameter to a "
    "larger value if your Spark resources are allocated on-demand."
)
_LOOK_S = 0.5


def infer_num_proc(session: Session) -> int:
    """One worker for each task that the session runs at once."""
    parallelism, present = session.default_parallelism(), session.slots().total
    num_proc = parallelism if present is None else max(1, min(parallelism, present))
    logger.info("Running %d processes (inferred from spark.default.parallelism)...", num_proc)
    return num_proc


def wait_for_slots(session: Session, needed: int, start_timeout_s: float) -> None:
    """Return when ``needed`` tasks can run at once, as far as the session can tell.

    Spark's own check would look only every 15 s, and say nothing for ten minutes.

    Raises:
        NotEnoughSlotsError: the session can never have that many.
        StartTimeoutError: executors that might have joined did not.
    """
    deadline_s = time.monotonic() + start_timeout_s
    told = False
    while True:
        present = session.slots()
        slots.check(needed, present)
        if present.enough(needed):
            logger.info("%s", present.describe(needed))
            return
        if not told:
            logger.warning("%s. Waiting up to %g s for more executors", present.describe(needed), start_timeout_s)
            told = True
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise StartTimeoutError(timeout_text(present.describe(needed), start_timeout_s))
        time.sleep(min(_LOOK_S, left_s))


def timeout_text(slots_text: str, start_timeout_s: float) -> str:
    """The message of a start that took too long."""
    return f"{TIMEOUT_TEXT} Waited for {start_timeout_s:g} s: {slots_text}."
