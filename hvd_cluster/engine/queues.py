"""The decided buckets of all process sets, of removed ones until they are done."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from hvd_cluster.engine.collectives.stage import Stage
from hvd_cluster.engine.execution import Execution, ExecutionQueue, LaunchOrder
from hvd_cluster.engine.signature import SetId

#: How often a wait for transports checks whether the other ranks are alive.
_CHECK_PERIOD_S = 0.05


class Queues:
    """A queue for each process set. True while any bucket is being executed.

    Args:
        process_set_ids: the existing sets.
        wake: called by the transports' threads when :meth:`advance` has something to do.
        check: called while :meth:`finish_exclusive` waits; raises if another rank has died.
        is_idle: returns whether GPUs have also finished the work of a process set's transports.
        on_drained: called with the id of a removed set when all its work is done, or later.
    """

    def __init__(
        self,
        process_set_ids: Iterable[int],
        wake: Callable[[], None],
        check: Callable[[], None],
        is_idle: Callable[[SetId], bool],
        on_drained: Callable[[SetId], None],
    ) -> None:
        self._wake = wake
        self._check = check
        self._is_idle = is_idle
        self._on_drained = on_drained
        self._gpu_order = LaunchOrder()
        #: Stages whose work is done, from the transports' threads.
        self._finished: queue.SimpleQueue[tuple[Execution, Stage]] = queue.SimpleQueue()
        self._queues: dict[SetId, ExecutionQueue] = {id: self._new() for id in process_set_ids}
        #: Queues of removed sets: what was decided before the removal is still executed.
        self._draining: dict[SetId, ExecutionQueue] = {}
        self._has_failed = False

    def __bool__(self) -> bool:
        return any(self._all())

    def __getitem__(self, process_set_id: SetId) -> ExecutionQueue:
        if isinstance(process_set_id, tuple) and process_set_id not in self._queues:
            self._queues[process_set_id] = self._new()
        return self._queues[process_set_id]

    @property
    def has_finished(self) -> bool:
        """The work of a stage is done: :meth:`advance` has something to do."""
        return not self._finished.empty()

    def add(self, process_set_id: int) -> None:
        """A process set was added."""
        self._queues[process_set_id] = self._new()

    def remove(self, process_set_id: int) -> None:
        """A process set was removed."""
        self._draining[process_set_id] = self._queues.pop(process_set_id)
        self._drop_drained()

    def advance(self) -> None:
        """Continue the executions whose stage is done."""
        finished = []
        while not self._finished.empty():
            finished.append(self._finished.get())
        self._continue(finished)

    def finish_exclusive(self, but: SetId | None = None) -> None:
        """Finish buckets that other ranks may wait in, before work that waits for them.

        The ranks of a host wait in the middle of a bucket for their leader. If the leader continued with the next entry
        of the log and waited for them there, as it could in another process set, both would wait forever. So each rank
        waits only for its oldest unfinished bucket, which can always continue. Buckets of the process set ``but`` are
        not affected: its own queue keeps them in order.
        """
        mine = None if but is None else self[but]
        while any(other.is_exclusive for other in self._all() if other is not mine):
            with suppress(queue.Empty):
                self._continue([self._finished.get(timeout=_CHECK_PERIOD_S)])
            self._check()

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail everything; the transports were aborted."""
        self._has_failed = True
        for executions in self._all():
            executions.fail(error)
        self._gpu_order.clear()
        # These are not needed any more, and they hold the transport with its threads and connections.
        self._finished = queue.SimpleQueue()

    def _note(self, execution: Execution, stage: Stage) -> None:
        """Called by the transports' threads."""
        if self._has_failed:
            return
        self._finished.put((execution, stage))
        self._wake()

    def _continue(self, finished: Sequence[tuple[Execution, Stage]]) -> None:
        for execution, stage in finished:
            if execution.is_waiting_for(stage):
                execution.advance(self._note)
        # A launch in one process set may be what the queue of another one waits for.
        while any(executions.launch() for executions in self._all()):
            continue
        self._drop_drained()

    def _new(self) -> ExecutionQueue:
        return ExecutionQueue(self._note, self._gpu_order)

    def _all(self) -> list[ExecutionQueue]:
        return [*self._queues.values(), *self._draining.values()]

    def _drop_drained(self) -> None:
        # A GPU does not wake this thread: check again at the next occasion, at the latest when the world ends.
        for id in [id for id, executions in self._draining.items() if not executions and self._is_idle(id)]:
            del self._draining[id]
            self._on_drained(id)
