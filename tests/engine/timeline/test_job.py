"""The timeline of real ranks: a group of tracks for each, and complete whichever rank is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from hvd_cluster.engine.timeline.summary import summarize
from hvd_cluster.engine.timeline.trace import read
from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch import local

ENV = {"OMP_NUM_THREADS": "1", "HOROVOD_TIMELINE_MAX_MB": "3", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}


def train(victim: int) -> None:
    """Small reductions for ever; the victim is killed in the middle, while its engine's thread writes or sends."""
    import hvd_cluster.torch as hvd

    hvd.init()
    if hvd.rank() == victim:
        threading.Timer(2.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        handles = [hvd.allreduce_async(torch.ones(8), name=f"layer.{i}") for i in range(20)]
        for handle in handles:
            hvd.synchronize(handle)
        time.sleep(0.01)


@pytest.mark.parametrize(
    "victim", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["the rank that writes", "another rank"]
)
def test_after_kill_9_the_timeline_is_complete_and_has_every_rank(tmp_path: Path, victim: int) -> None:
    path = tmp_path / "timeline.json"
    with pytest.raises(WorkerFailedError):
        local.run(train, (victim,), num_proc=3, env={**ENV, "HOROVOD_TIMELINE": str(path)}, verbose=0)
    files = [file for file in (path, tmp_path / "timeline.older.json") if file.exists()]
    assert sum(file.stat().st_size for file in files) <= 3 << 20
    for file in files:
        assert isinstance(json.loads(file.read_text()), list)
    found = read(path)
    assert sorted(found.ranks) == [0, 1, 2]
    assert {span.rank for span in found.spans} == {0, 1, 2}
    assert "allreduce.layer.19" in {span.track for span in found.spans}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= {span.name for span in found.spans}
    assert found.num_cycles > 0


def test_the_rank_that_is_late_is_found(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        for _ in range(5):
            if hvd.rank() == 1:
                time.sleep(0.05)
            hvd.allreduce(torch.ones(8), name="x")
        hvd.shutdown()

    local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1", "HOROVOD_TIMELINE": str(path)})
    summary = summarize(read(path))
    assert summary.num_operations == 5
    assert summary.stragglers[0].rank == 1
    assert summary.stragglers[0].num_last == 5
    assert summary.stragglers[0].late_s > 0.2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_running_program_finds_what_has_ended_in_the_file(tmp_path: Path, num_ranks: int) -> None:
    path = tmp_path / "timeline.json"

    def fn() -> bool:
        import hvd_cluster.torch as hvd

        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
        hvd.init()
        hvd.start_timeline(str(path))
        hvd.barrier()
        hvd.allreduce(torch.ones(8), name="seen")
        limit_s = time.monotonic() + 20
        is_found = num_ranks > 1 and hvd.rank() > 0
        while not is_found and time.monotonic() < limit_s:
            is_found = path.exists() and "allreduce.seen" in {span.track for span in read(path).spans}
            if num_ranks == 1:
                break  # no thread writes it later
            time.sleep(0.01)
        hvd.shutdown()
        return is_found

    assert local.run(fn, num_proc=num_ranks, env={"OMP_NUM_THREADS": "1"}) == [True] * num_ranks


def test_timelines_in_succession_have_their_own_events_of_all_ranks(tmp_path: Path) -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.current import engine

        hvd.init()
        for number, epoch in enumerate(("first", "second", "third"), start=1):
            hvd.start_timeline(str(tmp_path / f"{epoch}.json"))
            while engine()._loop._timeline._number < number:  # rank 0's call reaches the others in its own time
                time.sleep(0.001)
            hvd.allreduce(torch.ones(8), name=epoch)
            hvd.stop_timeline()
        hvd.shutdown()

    local.run(fn, num_proc=3, env={"OMP_NUM_THREADS": "1", "HOROVOD_TIMELINE": "DYNAMIC"})
    for epoch in ("first", "second", "third"):
        spans = [span for span in read(tmp_path / f"{epoch}.json").spans if span.name == "ALLREDUCE"]
        assert sorted((span.rank, span.track) for span in spans) == [(rank, f"allreduce.{epoch}") for rank in range(3)]
