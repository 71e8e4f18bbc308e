"""The order in which buckets are begun, and when a removed process set lets go of its transports; buckets are fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_cluster.engine.queues import Queues


class Bucket:
    """Notes when it goes on. It may have to learn sizes before its work can be launched."""

    is_exclusive = False

    def __init__(self, log: list[str], name: str, *, is_on_gpu: bool = True, learns_sizes: bool = False) -> None:
        self.log, self.name = log, name
        self.is_on_gpu = is_on_gpu
        self.is_launched = self.is_done = False
        self._learns_sizes = learns_sizes
        self.sizes_are_there: Callable[[], None] = lambda: None

    def is_waiting_for(self, step: Any) -> bool:
        return not self.is_done

    def advance(self, notify: Any) -> None:
        self.log.append(self.name)
        if self._learns_sizes:
            self._learns_sizes = False
            self.sizes_are_there = lambda: notify(self, None)
        else:
            self.is_launched = self.is_done = True


def queues_of(process_sets: list[int], **options: Any) -> Queues:
    calls = {"check": lambda: None, "is_idle": lambda _: True, "on_drained": lambda _: None, **options}
    return Queues(process_sets, lambda: None, **calls)


def append(queues: Queues, process_set_id: int, bucket: Any) -> None:
    queues[process_set_id].append(bucket)


def test_work_on_gpus_is_launched_in_the_order_of_the_log_over_all_process_sets() -> None:
    log: list[str] = []
    queues = queues_of([0, 1, 2, 3])
    gather = Bucket(log, "gather", learns_sizes=True)
    append(queues, 0, gather)
    append(queues, 1, Bucket(log, "reduce"))  # on another rank the sizes may be there already: gather is first there
    append(queues, 2, Bucket(log, "on a CPU", is_on_gpu=False))
    append(queues, 3, Bucket(log, "late"))
    append(queues, 0, Bucket(log, "last"))
    assert log == ["gather", "on a CPU"]
    gather.sizes_are_there()
    queues.advance()
    assert log == ["gather", "on a CPU", "gather", "reduce", "late", "last"]
    assert not queues


def test_a_removed_set_keeps_its_transports_until_the_gpu_has_done_its_work() -> None:
    log: list[str] = []
    drained: list[int] = []
    busy = {1}
    queues = queues_of([0, 1], is_idle=lambda number: number not in busy, on_drained=drained.append)
    append(queues, 1, Bucket(log, "reduce"))
    queues.remove(1)
    assert not queues  # nothing that the end of the world has to wait for here: closing a transport waits for its GPU
    assert drained == []
    busy.clear()
    gather = Bucket(log, "gather", learns_sizes=True)
    append(queues, 0, gather)
    gather.sizes_are_there()
    queues.advance()
    assert drained == [1]
