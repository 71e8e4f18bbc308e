"""Several groups at once, meshes, and named operations of hvd beside the calls of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.launch import local


def test_subgroups_and_the_default_group_at_once(four: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        rank = dist.get_rank()
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        odd = dist.new_group([1, 3])
        alone = [dist.new_group([each]) for each in range(4)]
        whole = dist.new_group(list(range(4)))
        mine = halves[rank // 2]
        tensors = [torch.full((3,), float(rank)) for _ in range(4)]
        works = [
            dist.all_reduce(tensors[0], group=mine, async_op=True),
            dist.all_reduce(tensors[1], async_op=True),
            *([dist.broadcast(tensors[2], 3, group=odd, async_op=True)] if rank % 2 else []),
            dist.all_reduce(tensors[3], group=whole, async_op=True),
        ]
        for work in reversed(works):
            work.wait()
        one = torch.ones(1)
        dist.all_reduce(one, group=alone[rank])
        assert one.item() == 1.0
        for group in [*halves, odd, *alone, whole]:
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        return [float(tensor[0]) for tensor in tensors]

    assert four(fn) == [
        [1.0, 6.0, 0.0, 6.0],
        [1.0, 6.0, 3.0, 6.0],
        [5.0, 6.0, 2.0, 6.0],
        [5.0, 6.0, 3.0, 6.0],
    ]


def test_a_group_that_permutes_all_ranks_uses_its_own_order(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        rank = dist.get_rank()
        group = dist.new_group([1, 0], sort_ranks=False)
        gathered, share, exchanged = torch.zeros(2), torch.zeros(1), torch.zeros(2)
        dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
        dist.reduce_scatter_tensor(share, torch.tensor([10.0, 20.0]), group=group)
        dist.all_to_all_single(exchanged, torch.tensor([0.0, 1.0]) + 10 * rank, group=group)
        sent = torch.tensor([float(rank)])
        dist.broadcast(sent, group_src=0, group=group)
        dist.destroy_process_group(group)
        return gathered.tolist(), share.item(), exchanged.tolist(), sent.item()

    assert pair(fn) == [([1.0, 0.0], 40.0, [11.0, 1.0], 1.0), ([1.0, 0.0], 20.0, [10.0, 0.0], 1.0)]


def test_ranks_may_start_calls_of_different_groups_in_different_orders(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        other = dist.new_group([0, 1])
        groups = [None, other] if dist.get_rank() == 0 else [other, None]
        tensors = {group: torch.ones(400_000) for group in groups}
        works = [dist.all_reduce(tensors[group], group=group, async_op=True) for group in groups]
        for work in works:
            work.wait()
        return all(bool((tensor == 2).all()) for tensor in tensors.values())

    assert pair(fn) == [True, True]


def test_named_operations_of_another_thread(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import threading

        import torch

        import hvd_cluster.torch as hvd

        totals: list[float] = []

        def named() -> None:
            for number in range(40):
                total = hvd.allreduce(torch.full((1000,), 1.0), op=hvd.Sum, name=f"named.{number % 3}")
                totals.append(float(total[0]))

        thread = threading.Thread(target=named)
        thread.start()
        ours = []
        for number in range(40):
            tensor = torch.full((2000 + number,), 1.0)
            dist.all_reduce(tensor)
            ours.append(float(tensor[-1]))
        thread.join()
        return ours == [2.0] * 40 and totals == [2.0] * 40

    assert pair(fn) == [True, True]


def test_a_mesh_of_two_dimensions_with_dtensor(four: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        whole = torch.randn(8, 6)
        placed = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert placed.to_local().shape == (4, 3)
        assert torch.equal(placed.redistribute(placements=[Replicate(), Replicate()]).to_local(), whole)
        assert torch.equal(placed.redistribute(placements=[Shard(1), Shard(0)]).full_tensor(), whole)
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        expected = net(whole)
        parallel = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.testing.assert_close(parallel(whole), expected)
        return True

    assert all(four(fn))


def test_a_second_group_after_the_first_is_destroyed() -> None:
    def fn() -> list[float]:
        import torch
        import torch.distributed as dist

        import hvd_cluster.torch as hvd

        found = []
        for _ in range(3):
            dist.init_process_group("hvd", init_method="hvd://")
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            found.append(float(tensor[0]))
            dist.destroy_process_group()
            assert not hvd.is_initialized()
        hvd.init()
        dist.init_process_group("hvd")
        dist.barrier()
        dist.destroy_process_group()
        found.append(float(hvd.allreduce(torch.ones(2), op=hvd.Sum)[0]))
        hvd.shutdown()
        return found

    assert local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [[2.0] * 4] * 2


def test_a_later_group_does_not_get_what_belongs_to_a_destroyed_one() -> None:
    def fn() -> Any:
        import torch
        import torch.distributed as dist

        import hvd_cluster.torch as hvd

        hvd.init()
        dist.init_process_group("hvd", init_method="hvd://")
        rank = dist.get_rank()
        olds = [torch.zeros(3), torch.zeros(2)]
        works = [dist.irecv(olds[0]), dist.irecv(olds[1], 1)] if rank == 0 else []
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("hvd", init_method="hvd://")
        news = [torch.full((3,), 7.0 * rank), torch.full((2,), 8.0 * rank)]
        for tensor in news:
            if rank:
                dist.send(tensor, 0)
            else:
                dist.recv(tensor, 1)
        dist.destroy_process_group()
        texts = [str(work.exception()) for work in works]
        return [tensor.tolist() for tensor in (*olds, *news)], texts

    tensors, texts = local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"})[0]
    assert tensors == [[0.0] * 3, [0.0] * 2, [7.0] * 3, [8.0] * 2]
    assert "was destroyed before the message came" in texts[0]


def test_a_group_after_one_that_was_aborted() -> None:
    def fn() -> list[Any]:
        import torch
        import torch.distributed as dist

        import hvd_cluster.torch as hvd

        found: list[Any] = []
        for is_aborted in (True, False):
            dist.init_process_group("hvd", init_method="hvd://")
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            found.append(float(tensor))
            if is_aborted:
                if dist.get_rank():
                    try:
                        dist.all_reduce(tensor)
                    except RuntimeError as error:
                        found.append("has aborted" in str(error))
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
            found.append(hvd.is_initialized())
        return found

    first, second = local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"})
    assert first == [2.0, False, 2.0, False]
    assert second == [2.0, True, False, 2.0, False]


def test_a_call_is_refused_after_a_rank_has_joined_and_the_group_stays_usable() -> None:
    def fn() -> tuple[list[str], float, float]:
        import torch
        import torch.distributed as dist

        import hvd_cluster.torch as hvd

        hvd.init()
        dist.init_process_group("hvd", init_method="hvd://")
        texts = []
        if dist.get_rank() == 0:
            for _ in range(3):
                try:
                    dist.all_reduce(torch.ones(2))
                except hvd.JoinUnsupportedError as error:
                    texts.append(str(error))
        named = float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="a")) if dist.get_rank() == 0 else 1.0
        hvd.join()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        hvd.shutdown()
        return texts, named, float(tensor[0])

    (texts, *first), second = local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"})
    assert len(texts) == 3
    assert all("rank 1 has called join()" in text for text in texts)
    assert first == [1.0, 2.0]
    assert second == ([], 1.0, 2.0)


@pytest.mark.slow
def test_a_rank_may_come_to_its_group_late() -> None:
    def fn(method: str | None) -> float:
        import os
        import time

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        if os.environ["RANK"] == "1":
            time.sleep(8)
        dist.init_process_group("hvd", init_method=method)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return float(tensor)

    env = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "2"}
    for method in ("hvd://", None):
        assert local.run(fn, (method,), num_proc=2, env=env) == [2.0, 2.0]


@pytest.mark.slow
def test_the_first_rank_to_destroy_its_group_waits_for_those_that_still_work() -> None:
    def fn() -> float:
        import time
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend
        from hvd_cluster.torch.distributed import group as group_module

        vars(group_module)["_MAX_END_WAIT"] = timedelta(seconds=0.5)
        dist.init_process_group("hvd")
        group = dist.new_group([1, 2])
        tensor = torch.ones(1)
        if dist.get_rank() > 0:
            time.sleep(3)
            dist.all_reduce(tensor, group=group)
        dist.destroy_process_group()
        return float(tensor)

    assert local.run(fn, num_proc=3, env={"OMP_NUM_THREADS": "1"}) == [1.0, 2.0, 2.0]


def test_a_rank_that_destroys_its_group_in_an_exception_ends_the_calls_of_the_others() -> None:
    def fn() -> str:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend
        from hvd_cluster.torch.distributed import group as group_module

        vars(group_module)["_MAX_END_WAIT"] = timedelta(seconds=0.5)
        dist.init_process_group("hvd", timeout=timedelta(seconds=40))
        try:
            try:
                if dist.get_rank() == 1:
                    raise ValueError("mine")
                dist.all_reduce(torch.ones(1))
            finally:
                dist.destroy_process_group()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "no error"

    first, second = local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"})
    assert "rank 1" in first
    assert "has called shutdown" in first
    assert second == "mine"


def test_ranks_that_destroy_their_group_do_not_wait_for_one_that_has_ended() -> None:
    def fn() -> float:
        import time

        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        dist.init_process_group("hvd")
        dist.barrier()
        start_s = time.monotonic()
        if dist.get_rank() != 1:
            dist.destroy_process_group()
        return time.monotonic() - start_s

    assert max(local.run(fn, num_proc=3, env={"OMP_NUM_THREADS": "1"})) < 60


def test_the_users_init_after_the_group_keeps_the_world() -> None:
    def fn() -> float:
        import torch
        import torch.distributed as dist

        import hvd_cluster.torch as hvd

        dist.init_process_group("hvd")
        hvd.init()
        dist.destroy_process_group()
        total = float(hvd.allreduce(torch.ones(1), op=hvd.Sum))
        hvd.shutdown()
        return total

    assert local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [2.0, 2.0]


def test_a_group_does_not_outlive_its_world() -> None:
    def fn() -> tuple[str, str]:
        import torch
        import torch.distributed as dist

        import hvd_cluster.torch as hvd

        hvd.init()
        dist.init_process_group("hvd", init_method="hvd://")
        hvd.shutdown()
        found = []
        for again in (False, True):
            if again:
                hvd.init()
            try:
                dist.all_reduce(torch.ones(1))
            except hvd.HorovodInternalError as error:
                found.append(str(error))
        dist.destroy_process_group()
        hvd.shutdown()
        return found[0], found[1]

    for before, after in local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}):
        assert "init" in before
        assert "make the groups again" in after


@pytest.mark.slow
def test_ranks_that_no_launcher_has_numbered_meet_in_torchs_store(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = tmp_path / "alone.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "import hvd_cluster.torch as hvd\n"
        "rank, path = int(sys.argv[1]), sys.argv[2]\n"
        "for _ in range(2):\n"
        "    dist.init_process_group('hvd', store=dist.FileStore(path, 2), rank=rank, world_size=2)\n"
        "    tensor = torch.full((2,), float(rank + 1))\n"
        "    dist.all_reduce(tensor)\n"
        "    dist.destroy_process_group()\n"
        "    print(tensor.tolist(), hvd.is_initialized())\n"
    )
    arguments = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*arguments, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert outputs == ["[3.0, 3.0] False\n" * 2] * 2
