"""What one rank waits for, and how it keeps others waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hvd_cluster.engine.launched_work import LaunchedWork
from hvd_cluster.engine.messages import Wait, WaitState
from hvd_cluster.engine.signature import ranks_of
from hvd_cluster.engine.submission_queue import JOIN, SubmissionQueue


class Waits:
    """The waits of one rank. Only the progress thread uses it.

    Args:
        rank: this rank.
        process_sets: the ranks of each process set.
        submissions: the requests of this rank.
        launched_work: what this rank has launched on devices.
    """

    def __init__(
        self,
        rank: int,
        process_sets: Mapping[int, tuple[int, ...]],
        submissions: SubmissionQueue,
        launched_work: LaunchedWork,
    ) -> None:
        self._rank = rank
        self._process_sets = process_sets
        self._submissions = submissions
        self._launched_work = launched_work

    def undecided(self) -> dict[Wait, float]:
        """What not all ranks have submitted, and since when this rank waits for it."""
        position = self._submissions.num_decisions
        waits = {Wait(key, position=position): r.since_s for key, r in self._submissions.pending().items()}
        if self._submissions.joined_s is not None:
            # It waits for others only while these ask nothing of it.
            finished = [at_s for _, at_s in self._submissions.last_finished.values()]
            waits[Wait(JOIN, position=position)] = max(self._submissions.joined_s, *finished, 0.0)
        return {wait: since_s for wait, since_s in waits.items() if since_s < math.inf}

    def all(self) -> dict[Wait, float]:
        """What this rank waits for, and since when; the oldest first."""
        return dict(sorted((self._launched_work.waits() | self.undecided()).items(), key=lambda item: item[1]))

    def state(self, wait: Wait) -> WaitState | None:
        """How this rank delays the ranks that have reported this; None if it does not.

        Raises:
            RuntimeError: the device has failed.
        """
        if self._rank not in ranks_of(self._process_sets, wait.key[0]):
            return None
        if wait.bucket:
            return self._launched_work.state(wait)
        pending = self._submissions.pending()
        if wait.key in pending or self._submissions.joined_s is not None:
            return None
        if self._submissions.has_decided(wait.key, wait.position):
            return None  # while the query was under way
        if wait.key == JOIN and (pending or not self._launched_work.is_complete()):
            return None  # it waits itself
        return WaitState.NOT_SUBMITTED
