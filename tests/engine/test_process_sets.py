"""Process sets: groups of ranks with collectives of their own."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from hvd_cluster.engine.process_sets import ProcessSet, register, unregister
from hvd_cluster.launch import local


def test_ranks_are_sorted_and_checked() -> None:
    assert ProcessSet([2, 0]).ranks == [0, 2]
    assert str(ProcessSet([1])) == "ProcessSet(process_set_id=None, ranks=[1], mpi_comm=None)"
    assert ProcessSet([1]).size() is None
    assert ProcessSet([1]).rank() is None
    for wrong in (["0"], [0.0], [True], [1, 1]):
        with pytest.raises(ValueError, match="ProcessSet"):
            ProcessSet(wrong)  # type: ignore[arg-type]


def test_ids_are_given_in_order_and_a_set_that_repeats_another_is_refused() -> None:
    one, two = ProcessSet([0, 1]), ProcessSet([1, 2])
    assert register([one, two], world_size=3) == {0: (0, 1, 2), 1: (0, 1), 2: (1, 2)}
    assert (one.process_set_id, two.process_set_id) == (1, 2)
    unregister([one, two])
    assert one.process_set_id is None
    for wrong in ([0, 3], [], [0, 1, 2]):
        with pytest.raises(ValueError, match="ProcessSet|process_set"):
            register([ProcessSet(wrong)], world_size=3)
    with pytest.raises(ValueError, match="twice"):
        register([ProcessSet([0, 1]), ProcessSet([1, 0])], world_size=3)


def test_overlapping_sets_reduce_among_themselves_and_do_not_wait_for_each_other() -> None:
    def fn() -> dict[str, Any]:
        import hvd_cluster.torch as hvd

        sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2]), hvd.ProcessSet([2])]
        hvd.init(process_sets=sets)
        rank = hvd.rank()
        told: dict[str, Any] = {"included": [s.included() for s in sets], "sizes": [s.size() for s in sets]}
        mine = [s for s in sets if s.included()]
        # Every rank submits to its sets in another order, and nobody waits before all are submitted.
        handles = {
            s.process_set_id: hvd.allreduce_async(torch.tensor([1.0 + rank]), op=hvd.Sum, name="x", process_set=s)
            for s in (mine if rank % 2 else mine[::-1])
        }
        told["sums"] = {id: hvd.synchronize(handle).item() for id, handle in sorted(handles.items())}
        told["gathered"] = [hvd.allgather(torch.tensor([rank]), process_set=s).tolist() for s in mine]
        told["ranks"] = [s.rank() for s in mine]
        for s in mine:
            root = s.ranks[-1]
            assert hvd.broadcast(torch.tensor(float(rank)), root, process_set=s).item() == root
        outside = [s for s in sets if not s.included()]
        for s in outside:
            with pytest.raises(ValueError, match=f"Allreduce: Rank {rank} is not a member of the provided process set"):
                hvd.allreduce(torch.ones(1), process_set=s)
            with pytest.raises(ValueError, match=r"Process is not part of provided process set\."):
                s.rank()
        hvd.barrier()
        hvd.shutdown()
        assert sets[0].process_set_id is None
        hvd.init()
        with pytest.raises(ValueError, match="has not been registered"):
            hvd.allreduce(torch.ones(1), process_set=sets[0])
        return told

    first, second, third = local.run(fn, num_proc=3, env={"OMP_NUM_THREADS": "1"})
    assert first["included"] == [True, False, False]
    assert second["sizes"] == [2, 2, 1]
    assert (first["sums"], second["sums"], third["sums"]) == ({1: 3.0}, {1: 3.0, 2: 5.0}, {2: 5.0, 3: 3.0})
    assert second["gathered"] == [[0, 1], [1, 2]]
    assert third["ranks"] == [1, 0]


def test_ranks_that_name_different_sets_get_an_error_at_init() -> None:
    """Each its own half, as one may with communicators: both would be set 1, and reduce with each other."""

    def fn() -> tuple[str, float]:
        import os

        import hvd_cluster.torch as hvd

        mine = [0, 1] if int(os.environ["HOROVOD_RANK"]) < 2 else [2, 3]
        with pytest.raises(ValueError, match="process_sets") as caught:
            hvd.init(process_sets=[hvd.ProcessSet(mine)])
        hvd.init(process_sets=[hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])])
        return str(caught.value), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    told = local.run(fn, num_proc=4, env={"OMP_NUM_THREADS": "1"})
    for text, total in told:
        assert "init(process_sets=...) must be equal on all ranks, but is [[0, 1]] on rank 0" in text
        assert "[[2, 3]] on rank 2" in text
        assert total == 4.0


@pytest.mark.parametrize(
    ("variable", "value"), [("HOROVOD_SHARED_MEMORY", "0"), ("HOROVOD_CACHE_CAPACITY", "7")], ids=["memory", "cache"]
)
def test_ranks_whose_settings_cannot_work_together_get_an_error_at_init(variable: str, value: str) -> None:
    def fn() -> str:
        import os

        import hvd_cluster.torch as hvd

        if os.environ["HOROVOD_RANK"] == "1":
            os.environ[variable] = value
        with pytest.raises(ValueError, match="must be equal on all ranks") as caught:
            hvd.init()
        return str(caught.value)

    for text in local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}):
        assert text.startswith(f"{variable} must be equal")


def test_process_sets_are_added_and_removed_at_run_time() -> None:
    def fn() -> dict[str, Any]:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine import process_sets

        hvd.init(process_sets="dynamic")
        rank = hvd.rank()
        told: dict[str, Any] = {}
        for turn in range(3):
            pair = hvd.add_process_set([1, 2])
            told[f"id {turn}"] = pair.process_set_id
            if pair.included():
                total = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, name="pair", process_set=pair)
                told[f"sum {turn}"] = total.item()
            with pytest.raises(ValueError, match=r"with the ranks \[1, 2\] exists already"):
                hvd.add_process_set(hvd.ProcessSet([2, 1]))
            assert hvd.remove_process_set(pair)
            assert pair.process_set_id is None
            assert not hvd.remove_process_set(pair)
            assert pair not in process_sets._registered  # or a loop that adds and removes sets would keep them all
        assert not hvd.remove_process_set(hvd.global_process_set)
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched process sets: One rank named the ranks"):
            hvd.add_process_set([0, 1] if rank else [0, 2])
        kept = hvd.add_process_set([0, 2])
        handle = None
        if rank == 0:  # rank 2 never comes: the removal ends the wait
            handle = hvd.allreduce_async(torch.ones(1), name="orphan", process_set=kept)
        hvd.barrier()
        hvd.remove_process_set(kept)
        if handle is not None:
            with pytest.raises(hvd.HorovodInternalError, match=r"process set of 'allreduce\.orphan' was removed"):
                hvd.synchronize(handle)
        told["after"] = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.shutdown()
        hvd.init()
        with pytest.raises(ValueError, match="Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets"):
            hvd.add_process_set([0, 1])
        return told

    results = local.run(fn, num_proc=3, env={"OMP_NUM_THREADS": "1"})
    ids = {"id 0": 1, "id 1": 2, "id 2": 3, "after": 3.0}
    sums = {f"sum {turn}": 3.0 for turn in range(3)}
    assert results == [ids, ids | sums, ids | sums]


def test_an_operation_that_comes_into_the_log_behind_the_removal_of_its_set_fails_alone() -> None:
    def fn() -> float:
        import time

        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.messages import Run
        from hvd_cluster.engine.negotiation import Negotiator

        hvd.init()
        take_log = Negotiator.take_log

        def slowly(self: Negotiator) -> Any:
            entries = take_log(self)
            if any(isinstance(entry, Run) for entry in entries):
                time.sleep(0.5)  # meanwhile the last vote for the removal comes straight into the log
            return entries

        hvd.remove_process_set(hvd.add_process_set([0, 1]))  # what is known from before is voted for
        both = hvd.add_process_set([0, 1])
        hvd.barrier()
        if hvd.rank() == 0:
            Negotiator.take_log = slowly  # type: ignore[method-assign]
        else:
            time.sleep(0.3)
        late = None
        if both.included():
            late = hvd.allreduce_async(torch.ones(2), name="late", process_set=both)
            time.sleep(0.1)  # it is reported, for want of a number to vote for
        hvd.remove_process_set(both)
        Negotiator.take_log = take_log  # type: ignore[method-assign]
        if late is not None:
            with pytest.raises(hvd.HorovodInternalError, match=r"the process set of 'allreduce\.late' was removed"):
                hvd.synchronize(late)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    env = {"OMP_NUM_THREADS": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    assert local.run(fn, num_proc=3, env=env) == [3.0] * 3


def test_a_root_that_stood_still_takes_no_new_request_for_the_one_of_that_name_before() -> None:
    """It is not in the set: the others go on without it, and it reads all of it at once when it comes back."""

    def fn(folder: str) -> list[list[float]]:
        import os
        import signal
        import time
        from pathlib import Path

        import hvd_cluster.torch as hvd

        pair = hvd.ProcessSet([1, 2])
        hvd.init(process_sets=[pair])
        if hvd.rank() == 0:
            Path(folder, "root.pid").write_text(str(os.getpid()))
        hvd.barrier()
        sums = []
        if hvd.rank() > 0:
            root = int(Path(folder, "root.pid").read_text())
            sums.append(hvd.allreduce(torch.ones(4), name="x", op=hvd.Sum, process_set=pair).tolist())
            if hvd.rank() == 1:
                os.kill(root, signal.SIGSTOP)
            sums.append(hvd.allreduce(torch.ones(4), name="x", op=hvd.Sum, process_set=pair).tolist())
            handle = hvd.allreduce_async(torch.ones(5), name="x", op=hvd.Sum, process_set=pair)
            time.sleep(0.5)  # until it has been reported
            os.kill(root, signal.SIGCONT)
            sums.append(hvd.synchronize(handle).tolist())
        hvd.barrier()
        hvd.shutdown()
        return sums

    with tempfile.TemporaryDirectory() as folder:
        limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}
        results = local.run(fn, args=(folder,), num_proc=3, env={"OMP_NUM_THREADS": "1", **limits})
    assert results == [[], *[[[2.0] * 4, [2.0] * 4, [2.0] * 5]] * 2]
