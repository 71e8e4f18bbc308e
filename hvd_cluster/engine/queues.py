"""The decided buckets of all process sets, those of removed ones until they are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hvd_cluster.engine.collectives.step import Step
from hvd_cluster.engine.execution import Execution, ExecutionQueue, Notify


class Queues:
    """A queue for each process set. True while anything is under way.

    Args:
        process_set_ids: the sets that there are.
        notify: called by the transports' threads when the work of a step is done.
        on_drained: called with the id of a removed set when nothing of it is under way any more.
    """

    def __init__(self, process_set_ids: Iterable[int], notify: Notify, on_drained: Callable[[int], None]) -> None:
        self._notify = notify
        self._on_drained = on_drained
        self._queues = {id: ExecutionQueue(notify) for id in process_set_ids}
        #: Those of removed sets: what was decided before the removal is still carried out.
        self._draining: dict[int, ExecutionQueue] = {}

    def __bool__(self) -> bool:
        return any(self._all())

    def __getitem__(self, process_set_id: int) -> ExecutionQueue:
        return self._queues[process_set_id]

    def is_exclusive(self, but: int | None = None) -> bool:
        """A bucket of a process set other than ``but``, that ranks of this host may stand still in, is not done yet."""
        mine = None if but is None else self._queues[but]
        return any(queue.is_exclusive for queue in self._all() if queue is not mine)

    def add(self, process_set_id: int) -> None:
        """A process set was added."""
        self._queues[process_set_id] = ExecutionQueue(self._notify)

    def remove(self, process_set_id: int) -> None:
        """A process set was removed."""
        self._draining[process_set_id] = self._queues.pop(process_set_id)
        self._let_go()

    def advance(self, finished: Sequence[tuple[Execution, Step]]) -> None:
        """Go on with the executions whose step is done."""
        for queue in self._all():
            queue.advance(finished)
        self._let_go()

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail everything; the transports were aborted."""
        for queue in self._all():
            queue.fail(error)

    def _all(self) -> list[ExecutionQueue]:
        return [*self._queues.values(), *self._draining.values()]

    def _let_go(self) -> None:
        for id in [id for id, queue in self._draining.items() if not queue]:
            del self._draining[id]
            self._on_drained(id)
