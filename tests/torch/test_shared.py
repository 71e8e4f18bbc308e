"""Tensors in shared memory: the same numbers as ordinary ones, whoever has one and whoever has not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

OnRanks = Any
#: Below and above the size from which tensors stay where they are, and not divisible by ranks or pieces.
LENGTHS = [1, 1000, 32_768, 100_003, 700_001]


def test_every_rank_with_a_shared_tensor_gets_the_result_in_place(two: OnRanks, three: OnRanks) -> None:
    def fn(hvd: Any) -> list[bool]:
        right = []
        for length in LENGTHS:
            for op, expected in (
                (hvd.Sum, sum(range(1, hvd.size() + 1))),
                (hvd.Average, sum(range(1, hvd.size() + 1)) / hvd.size()),
                (hvd.Max, hvd.size()),
            ):
                tensor = hvd.shared_empty(length).fill_(hvd.rank() + 1)
                address = tensor.data_ptr()
                hvd.allreduce_(tensor, name="shared", op=op)
                is_there = tensor.data_ptr() == address
                right.append(is_there and torch.equal(tensor, torch.full((length,), float(expected))))
        return right

    for world in (two, three):
        for right in world(fn):
            assert right == [True] * (3 * len(LENGTHS))


def test_random_numbers_are_reduced_to_the_same_bits_on_all_ranks_and_like_ordinary_ones(three: OnRanks) -> None:
    def fn(hvd: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ordinary = torch.randn(300_000, generator=torch.Generator().manual_seed(hvd.rank()))
        shared = hvd.shared_empty(ordinary.shape).copy_(ordinary)
        hvd.allreduce_(ordinary, name="o", op=hvd.Average)
        hvd.allreduce_(shared, name="s", op=hvd.Average)
        return ordinary, shared.clone()

    results = three(fn)
    for ordinary, shared in results:
        torch.testing.assert_close(shared, ordinary)
        assert torch.equal(shared, results[0][1])


def test_ranks_with_and_without_a_shared_tensor_work_together(two: OnRanks, three: OnRanks) -> None:
    def fn(hvd: Any, sharing: set[int]) -> list[float]:
        sums = []
        for turn in range(3):
            for length in LENGTHS:
                is_sharing = (hvd.rank() + turn) % hvd.size() in sharing
                tensor = hvd.shared_empty(length) if is_sharing else torch.empty(length)
                tensor.fill_(hvd.rank() + 1.0)
                hvd.allreduce_(tensor, name="mixed", op=hvd.Sum)
                assert tensor.min() == tensor.max()
                sums.append(tensor[0].item())
        return sums

    for world, size in ((two, 2), (three, 3)):
        for sharing in ({0}, {1}, {0, 1}):
            total = size * (size + 1) / 2
            assert world(fn, sharing) == [[total] * 3 * len(LENGTHS)] * size


def test_a_group_and_parts_of_a_shared_tensor_are_reduced_where_they_are(two: OnRanks) -> None:
    def fn(hvd: Any) -> tuple[list[float], float]:
        whole = hvd.shared_empty((4, 50_000)).fill_(1.0)
        hvd.grouped_allreduce_([whole[0], whole[2]], name="rows", op=hvd.Sum)
        outside = whole[1].sum().item()
        return whole[:, 0].tolist(), outside

    assert two(fn) == [([2.0, 1.0, 2.0, 1.0], 50_000.0)] * 2


@pytest.mark.parametrize("length", [100, 300_000])
def test_a_shared_tensor_given_twice_or_in_overlapping_parts_is_reduced_once(two: OnRanks, length: int) -> None:
    def fn(hvd: Any) -> list[tuple[float, float]]:
        found = []
        for make in (torch.empty, hvd.shared_empty):
            whole = make(length).fill_(1.0)
            hvd.grouped_allreduce_([whole, whole], op=hvd.Sum)
            parts = make(length).fill_(1.0)
            hvd.grouped_allreduce_([parts[: 2 * length // 3], parts[length // 3 :]], op=hvd.Sum)
            flight = make(length).fill_(1.0)
            handles = [hvd.grouped_allreduce_async_([flight, flight], op=hvd.Average)]
            handles.append(hvd.allreduce_async(flight * 0, op=hvd.Sum))
            for handle in handles:
                hvd.synchronize(handle)
            found += [(t.min().item(), t.max().item()) for t in (whole, parts, flight)]
        return found

    assert two(fn) == [[(2.0, 2.0), (2.0, 2.0), (1.0, 1.0)] * 2] * 2


def test_other_operations_and_out_of_place_results_take_shared_tensors_too(two: OnRanks) -> None:
    def fn(hvd: Any) -> tuple[float, float, float]:
        tensor = hvd.shared_empty(60_000).fill_(hvd.rank() + 1.0)
        new = hvd.allreduce(tensor, name="new", op=hvd.Sum)
        gathered = hvd.allgather(tensor, name="all")
        hvd.broadcast_(tensor, 1, name="from one")
        return new[0].item(), gathered.sum().item(), tensor[-1].item()

    assert two(fn) == [(3.0, 180_000.0, 2.0)] * 2


def test_half_precision_and_integers_stay_where_they_are(two: OnRanks) -> None:
    def fn(hvd: Any) -> list[bool]:
        right = []
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
            tensor = hvd.shared_empty(200_000, dtype).fill_(hvd.rank() + 1)
            hvd.allreduce_(tensor, name=f"{dtype}", op=hvd.Sum)
            right.append(torch.equal(tensor, torch.full_like(tensor, 3)))
        return right

    assert two(fn) == [[True] * 5] * 2


def test_a_tensor_says_whether_it_is_shared(two: OnRanks, request: pytest.FixtureRequest) -> None:
    def fn(hvd: Any) -> list[bool]:
        tensor = hvd.shared_empty((3, 5))
        return [hvd.is_shared(t) for t in (tensor, tensor[1], tensor.clone(), torch.ones(3), hvd.shared_empty(0))]

    shares = "shm" in request.node.callspec.id
    assert two(fn) == [[shares, shares, False, False, False]] * 2


def test_memory_is_taken_at_the_call_and_given_back_with_the_last_reference(
    two: OnRanks, request: pytest.FixtureRequest
) -> None:
    def fn(hvd: Any) -> tuple[int, int]:
        import re
        from pathlib import Path

        def shared_kib() -> int:
            return int(re.search(r"Shmem:\s+(\d+)", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]

        if hvd.rank():
            hvd.barrier()
            return 0, 0
        before = shared_kib()
        tensor = hvd.shared_empty(100 << 20, torch.uint8)
        part = tensor[5:9]
        taken = shared_kib() - before
        del tensor
        part.fill_(1)  # the memory is there as long as anybody uses it
        del part
        left = shared_kib() - before
        hvd.barrier()
        return taken, left

    (taken, left), _ = two(fn)
    is_shared = "shm" in request.node.callspec.id
    # In KiB, of the whole machine: others may take and give back a little meanwhile.
    assert (taken > 90 << 10) == is_shared
    assert left < 20 << 10


def test_a_shared_tensor_outlives_the_world() -> None:
    from hvd_cluster.launch import local

    def fn() -> list[float]:
        import hvd_cluster.torch as hvd

        hvd.init()
        tensor = hvd.shared_empty(100_000).fill_(hvd.rank() + 1.0)
        hvd.allreduce_(tensor, name="before", op=hvd.Sum)
        hvd.shutdown()
        alone = tensor[0].item()
        hvd.init()
        hvd.allreduce_(tensor, name="after", op=hvd.Sum)  # an ordinary tensor in this world
        assert not hvd.is_shared(tensor)
        hvd.shutdown()
        tensor.fill_(5.0)
        return [alone, tensor[-1].item()]

    assert local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [[3.0, 5.0]] * 2


def test_a_forked_child_that_releases_a_tensor_takes_nothing_from_the_parent() -> None:
    from hvd_cluster.launch import local

    def fn() -> float:
        import os
        import warnings

        import hvd_cluster.torch as hvd

        hvd.init()
        tensor = hvd.shared_empty(100_000).fill_(7.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
            pid = os.fork()
        if pid == 0:
            del tensor
            os._exit(0)
        os.waitpid(pid, 0)
        hvd.barrier()
        hvd.shutdown()
        return tensor.min().item()

    assert local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [7.0, 7.0]


def test_a_region_that_is_full_says_which_knob_sets_it() -> None:
    from hvd_cluster.launch import local

    def fn() -> str:
        import hvd_cluster.torch as hvd

        hvd.init()
        kept = [hvd.shared_empty(1 << 18) for _ in range(3)]  # 1 MiB each
        with pytest.raises(MemoryError) as caught:
            hvd.shared_empty(2 << 18)
        del kept[1]
        kept.append(hvd.shared_empty(1 << 18))
        hvd.barrier()  # the world ends for all when the first rank leaves it
        hvd.shutdown()
        return str(caught.value)

    env = {"OMP_NUM_THREADS": "1", "HOROVOD_SHARED_MEMORY_REGION_MB": "4"}
    for text in local.run(fn, num_proc=2, env=env):
        assert "HOROVOD_SHARED_MEMORY_REGION_MB" in text


def test_where_the_world_has_ended_it_says_so() -> None:
    from hvd_cluster.launch import local

    def fn() -> str:
        import hvd_cluster.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            hvd.shutdown()
            return "left"

        def allocate() -> None:
            deadline_s = time.monotonic() + 30
            while time.monotonic() < deadline_s:
                hvd.shared_empty(1000)
                time.sleep(0.01)

        with pytest.raises(hvd.HorovodInternalError) as caught:
            allocate()
        hvd.shutdown()
        return str(caught.value)

    told, left = local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"})
    assert left == "left"
    assert "Horovod has been shut down" in told
