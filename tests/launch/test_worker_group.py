from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from hvd_cluster.launch import worker_group
from hvd_cluster.launch.call import pack
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.launch.process import WorkerProcess
from hvd_cluster.launch.worker_group import Callbacks, WorkerGroup


def started(group: WorkerGroup[WorkerProcess], calls: Sequence[Callable[[], object]]) -> WorkerGroup[WorkerProcess]:
    topologies = [p.topology(secret=b"s" * 32) for p in place([Slot(i, "h", "h") for i in range(len(calls))])]
    starters = [
        functools.partial(WorkerProcess, topology, pack(call)) for topology, call in zip(topologies, calls, strict=True)
    ]
    group.start(starters, Callbacks())
    group.wait_ready(60)
    return group


def sleep_deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)


def test_the_first_failure_is_told_once_and_the_others_get_their_grace() -> None:
    def slow() -> str:
        time.sleep(0.5)
        return "in time"

    told: list[Outcome] = []
    group = started(WorkerGroup(on_failure=told.append), [slow, lambda: os._exit(3), slow])
    outcomes = group.ends()
    assert [outcome.rank for outcome in told] == [1]
    assert [(outcome.ok, outcome.exit_code) for outcome in outcomes] == [(True, None), (False, 3), (True, None)]


def test_without_grace_the_others_are_stopped_at_once_even_if_they_ignore_sigterm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_group.WorkerGroup.stop, "__defaults__", (0.3,))
    began = time.monotonic()
    outcomes = started(WorkerGroup(failure_grace_s=0.0), [sleep_deaf, lambda: os._exit(1)]).ends()
    assert time.monotonic() - began < 10
    assert [outcome.stopped for outcome in outcomes] == [True, False]


def test_a_worker_whose_thread_never_ends_is_stopped_and_its_result_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs_at_exit() -> str:
        threading.Thread(target=time.sleep, args=(300,)).start()
        return "result"

    monkeypatch.setattr(worker_group, "EXIT_GRACE_S", 0.3)
    (outcome,) = started(WorkerGroup(), [hangs_at_exit]).ends()
    assert outcome.ok


def test_stop_ends_workers_that_are_busy() -> None:
    group = started(WorkerGroup(), [functools.partial(time.sleep, 300)] * 2)
    group.stop()
    assert group.all_ended
    assert all(worker.outcome is not None and worker.outcome.stopped for worker in group.workers)
