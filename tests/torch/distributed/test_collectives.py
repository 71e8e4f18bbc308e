"""Every collective of torch.distributed on the backend hvd gives what Gloo gives."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_cluster.launch import local


def same(ours: Any, theirs: Any) -> bool:
    """Equal element by element; halves may differ by their rounding, because Gloo adds them in their own type."""
    import torch

    is_half = ours.dtype in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(ours, theirs, **({"rtol": 2e-2, "atol": 2e-2} if is_half else {"rtol": 0, "atol": 0}))
    return True


def sample(rank: int, dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7, 3), (600_000,)]


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8"])
def test_reductions_equal_gloos(trio: Any, name: str) -> None:
    def fn(dist: Any, gloo: Any, name: str) -> bool:
        import torch

        dtype, rank, size = getattr(torch, name), dist.get_rank(), dist.get_world_size()
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
        if not dtype.is_floating_point:
            ops += [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
        for op in ops:
            for shape in SHAPES:
                one, other = sample(rank, dtype, shape), sample(rank, dtype, shape)
                dist.all_reduce(one, op)
                dist.all_reduce(other, op, group=gloo)
                assert same(one, other), (op, shape)
            one, other = sample(rank, dtype, (5,)), sample(rank, dtype, (5,))
            dist.reduce(one, 1, op)
            dist.reduce(other, 1, op, group=gloo)
            if rank == 1:
                assert same(one, other), op
            else:
                assert same(one, sample(rank, dtype, (5,)))
            parts = [sample(rank, dtype, (5, 2), seed) for seed in range(size)]
            one = torch.empty(5, 2, dtype=dtype)
            dist.reduce_scatter(one, parts, op)
            whole = torch.stack(parts)
            dist.all_reduce(whole, op, group=gloo)
            assert same(one, whole[rank]), op
            one = torch.empty(50_000, dtype=dtype)
            whole = sample(rank, dtype, (size * 50_000,))
            dist.reduce_scatter_tensor(one, whole, op)
            dist.all_reduce(whole, op, group=gloo)
            assert same(one, whole.view(size, -1)[rank]), op
        return True

    assert all(trio(fn, name))


def test_averages_and_scaled_sums(trio: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        rank, size = dist.get_rank(), dist.get_world_size()
        mean = torch.full((3,), float(rank))
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * size) + rank, dist.ReduceOp.AVG)
        scaled = torch.ones(2)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        return mean.tolist(), part.tolist(), scaled.tolist()

    for rank, (mean, part, scaled) in enumerate(trio(fn)):
        assert mean == [1.0] * 3
        assert part == [2.0 * rank + 1.0, 2.0 * rank + 2.0]
        assert scaled == [1.5] * 2


@pytest.mark.slow
def test_each_rank_may_scale_what_it_gives_by_a_factor_of_its_own(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        rank = dist.get_rank()
        op = dist._make_nccl_premul_sum([0.25, 3.0][rank])
        whole, numbers, at_root, part = torch.ones(3), torch.full((2,), 4), torch.ones(1), torch.empty(1)
        dist.all_reduce(whole, op)
        dist.all_reduce(numbers, op)
        dist.reduce(at_root, 0, op)
        given = torch.tensor([1.0, 2.0])
        dist.reduce_scatter_tensor(part, given, op)
        return whole.tolist(), numbers.tolist(), at_root.item(), part.item(), given.tolist()

    assert pair(fn) == [
        ([3.25] * 3, [13, 13], 3.25, 3.25, [1.0, 2.0]),
        ([3.25] * 3, [13, 13], 1.0, 6.5, [1.0, 2.0]),
    ]


def test_tensors_of_different_sizes_are_gathered(trio: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        rank = dist.get_rank()
        parts = [torch.zeros(size) for size in (2, 0, 3)]
        dist.all_gather(parts, torch.full((len(parts[rank]),), rank + 1.0))
        with pytest.raises(ValueError, match="all_gather: Invalid tensor size"):
            dist.all_gather(parts, torch.ones(7))
        return [part.tolist() for part in parts]

    assert trio(fn) == [[[1.0, 1.0], [], [3.0, 3.0, 3.0]]] * 3


def test_complex_tensors_are_added(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        rank = dist.get_rank()
        every = [torch.tensor([1 + 2j, 3.5 - 1j, 5j, -2]) * (rank + 1) for rank in range(2)]
        for op, total in [(dist.ReduceOp.SUM, every[0] + every[1]), (dist.ReduceOp.AVG, (every[0] + every[1]) / 2)]:
            whole, at_root = every[rank].clone(), every[rank].clone()
            dist.all_reduce(whole, op)
            dist.reduce(at_root, 0, op)
            assert torch.equal(whole, total)
            assert torch.equal(at_root, every[1] if rank else total)
            part, other = torch.empty(2, dtype=torch.complex64), torch.empty(2, dtype=torch.complex64)
            dist.reduce_scatter_tensor(part, every[rank], op)
            dist.reduce_scatter(other, list(every[rank].chunk(2)), op)
            assert torch.equal(part, total.chunk(2)[rank])
            assert torch.equal(other, part)
        return True

    assert all(pair(fn))


@pytest.mark.parametrize("name", ["complex64", "uint16", "float8_e4m3fn"])
def test_a_reduction_of_elements_that_have_none_is_refused(pair: Any, name: str) -> None:
    def fn(dist: Any, gloo: Any, name: str) -> Any:
        import torch

        dtype, refused = getattr(torch, name), 0
        op = dist.ReduceOp.MAX if dtype.is_complex else dist.ReduceOp.SUM
        tensor, part = torch.ones(4).to(dtype), torch.ones(2).to(dtype)
        for call in (
            lambda: dist.all_reduce(tensor, op),
            lambda: dist.reduce(tensor, 0, op),
            lambda: dist.reduce_scatter_tensor(part, tensor, op),
            lambda: dist.reduce_scatter(part, list(tensor.chunk(2)), op),
        ):
            try:
                call()
            except ValueError:
                refused += 1
        dist.barrier()
        return refused

    assert pair(fn, name) == [4, 4]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "int16", "complex64", "float8_e4m3fn"])
def test_moves_give_the_tensors_of_the_ranks(trio: Any, name: str) -> None:
    def fn(dist: Any, gloo: Any, name: str) -> bool:
        import torch

        dtype, rank, size = getattr(torch, name), dist.get_rank(), dist.get_world_size()

        def raw(tensor: Any) -> Any:
            return tensor.contiguous().view(-1).view(torch.uint8)

        for shape in [(), (0,), (4, 3), (400_000,)]:
            every = [sample(other, dtype, shape) for other in range(size)]
            mine = every[rank]
            root = mine.clone()
            dist.broadcast(root, 1)
            assert torch.equal(raw(root), raw(every[1]))
            lists = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(lists, mine)
            gathered = [torch.empty_like(mine) for _ in range(size)] if rank == 2 else None
            dist.gather(mine, gathered, dst=2)
            for ours in [lists, *([] if gathered is None else [gathered])]:
                assert all(torch.equal(raw(a), raw(b)) for a, b in zip(ours, every, strict=True))
            got = torch.empty_like(mine)
            dist.scatter(got, every if rank == 0 else None, src=0)
            assert torch.equal(raw(got), raw(mine))
            if mine.dim():
                whole = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
                dist.all_gather_into_tensor(whole, mine)
                assert torch.equal(raw(whole), raw(torch.cat(every)))
        return True

    assert all(trio(fn, name))


def test_alltoall_with_equal_and_unequal_splits(trio: Any) -> None:
    def fn(dist: Any, gloo: Any) -> bool:
        import torch

        rank, size = dist.get_rank(), dist.get_world_size()
        equal = torch.arange(size * 4).view(size * 2, 2) + 100 * rank
        ours, theirs = torch.empty_like(equal), torch.empty_like(equal)
        dist.all_to_all_single(ours, equal)
        dist.all_to_all_single(theirs, equal, group=gloo)
        assert same(ours, theirs)
        sent = [rank + other for other in range(size)]  # rows for each rank; 0 from rank 0 to itself
        rows = torch.arange(sum(sent) * 3.0).view(-1, 3) + 1000 * rank
        ours, theirs = torch.empty(sum(sent), 3), torch.empty(sum(sent), 3)
        dist.all_to_all_single(ours, rows, sent, sent)
        dist.all_to_all_single(theirs, rows, sent, sent, group=gloo)
        assert same(ours, theirs)
        inputs = [torch.full((count, 2), float(rank)) for count in sent]
        outputs = [torch.empty(count, 2) for count in sent]
        dist.all_to_all(outputs, inputs)
        assert all((output == other).all() for other, output in enumerate(outputs))
        return True

    assert all(trio(fn))


def test_tensors_that_are_not_contiguous(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> bool:
        import torch

        rank = dist.get_rank()
        base = torch.arange(12.0).view(3, 4) + rank
        column = base.t()
        dist.all_reduce(column)
        assert base.tolist() == (torch.arange(12.0).view(3, 4) * 2 + 1).tolist()
        every_other = (torch.arange(8.0) + 10 * rank)[::2]
        dist.broadcast(every_other, 0)
        assert every_other.tolist() == [0.0, 2.0, 4.0, 6.0]
        outputs = list(torch.zeros(4, 2).t())
        dist.all_gather(outputs, torch.arange(4.0) + rank)
        assert [output.tolist() for output in outputs] == [[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]
        return True

    assert all(pair(fn))


def test_coalesced_calls_and_objects(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        rank = dist.get_rank()
        tensors = [torch.full((2,), float(rank + 1)), torch.full((3,), 10.0 * (rank + 1))]
        dist.all_reduce_coalesced(tensors)
        wholes = [torch.empty(4), torch.empty(2)]
        dist.distributed_c10d._get_default_group().allgather_into_tensor_coalesced(
            wholes, [torch.full((2,), float(rank)), torch.full((1,), 5.0 + rank)]
        ).wait()
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        box = [rank * 7] if rank else [{"from": 0}]
        dist.broadcast_object_list(box, 0)
        return [t.tolist() for t in tensors], [w.tolist() for w in wholes], objects, box

    expected = ([[3.0] * 2, [30.0] * 3], [[0.0, 0.0, 1.0, 1.0], [5.0, 6.0]], [{"rank": 0}, {"rank": 1}], [{"from": 0}])
    assert pair(fn) == [expected] * 2


def test_asynchronous_calls_complete_in_any_order_of_waiting(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> bool:
        import torch

        tensors = [torch.full((size,), 1.0) for size in [5, 5, 5, 5, 5, 5, 300_000, 300_000, 17]]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        future = works[2].get_future()
        for work in reversed(works):
            work.wait()
            assert work.is_completed()
            assert work.is_success()
        assert future.wait()[0] is tensors[2] or torch.equal(future.wait()[0], tensors[2])
        assert all(bool((tensor == 2).all()) for tensor in tensors)
        return True

    assert all(pair(fn))


def test_get_future_waits_for_no_rank_that_waits_for_what_comes_next() -> None:
    def fn() -> list[float]:
        import os

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # get_future() advances the engine if cores are scarce
        dist.init_process_group("hvd")
        found = []
        for number in range(5):
            tensor = torch.full((3,), float(number))
            if dist.get_rank() == 0:
                future = dist.all_reduce(tensor, async_op=True).get_future()
                dist.send(torch.ones(1), 1)
            else:
                dist.recv(torch.ones(1), 0)
                future = dist.all_reduce(tensor, async_op=True).get_future()
            found.append(float(future.wait()[0][0]))
        dist.destroy_process_group()
        return found

    assert local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


def test_get_future_works_for_the_call_if_cores_are_scarce() -> None:
    def fn() -> bool:
        import os
        import time

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend
        from hvd_cluster.engine import engine

        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        vars(engine)["_BRIEFLY_S"] = 60.0
        dist.init_process_group("hvd")
        time.sleep(dist.get_rank() * 0.5)
        is_done = dist.all_reduce(torch.ones(3), async_op=True).get_future().done()
        dist.destroy_process_group()
        return is_done

    assert local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [True] * 2


def test_calls_of_continuations_meet_those_after_the_same_call(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[float]:
        import torch

        def again(future: Any) -> Any:
            return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

        def twice(future: Any) -> Any:
            for _ in range(2):
                dist.all_reduce(future.value())
            return future.value()

        rank, futures = dist.get_rank(), []
        for number in range(1, 5):
            future = dist.all_reduce(torch.full((3,), float(number)), async_op=True).get_future()
            if rank == 1:  # its continuation runs in this thread at once, and that of rank 0 in another one
                future.wait()
            futures.append(future.then(again).then(twice))
        return [float(future.wait()[0]) for future in futures]

    for _ in range(5):
        assert pair(fn) == [[16.0, 32.0, 48.0, 64.0]] * 2


def test_a_callback_and_a_coalesced_call_are_followed_too(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[float]:
        import torch

        works, futures = [], []
        # All of them first: torch keeps such calls per group, and one that a continuation makes meanwhile joins them.
        for number in range(4):
            each = torch.full((2,), float(number))
            with dist._coalescing_manager(async_ops=True) as manager:
                for one in each:
                    dist.all_reduce(one)
            works.append(manager.works[0])
        for work in works:
            future = work.get_future()
            if dist.get_rank() == 1:
                future.wait()
            done: Any = torch.futures.Future()

            def add(future: Any, done: Any = done) -> None:
                total = sum(future.value())
                dist.all_reduce(total)
                done.set_result(float(total))

            future.add_done_callback(add)
            futures.append(done)
        return [done.wait() for done in futures]

    assert pair(fn) == [[0.0, 8.0, 16.0, 24.0]] * 2


def test_an_error_of_a_continuation_reaches_those_who_wait(pair: Any) -> None:
    def fn(dist: Any, gloo: Any, kind: type[BaseException]) -> Any:
        import gc
        import time
        import weakref
        from functools import partial

        import torch

        class Held:
            pass

        held = []

        def fail(future: Any) -> Any:
            mine = Held()
            held.append(weakref.ref(mine))
            raise kind("mine")

        texts = []
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(fail)
        following = future.then(lambda future: future.value())
        for wait in (future.wait, following.wait, future.value, partial(torch.futures.wait_all, [future])):
            try:
                wait()
            except kind as caught:
                texts.append(str(caught))
        del future, following, wait
        for _ in range(100):  # the thread that has run it may still hold it
            gc.collect()
            if held[0]() is None:
                break
            time.sleep(0.05)
        return texts, held[0]()

    for kind in (KeyError, SystemExit):
        assert pair(fn, kind) == [([str(kind("mine"))] * 4, None)] * 2


def test_continuations_that_only_some_ranks_add_change_nothing(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> float:
        import torch

        def again(future: Any) -> Any:
            dist.all_reduce(future.value()[0])
            return future.value()[0]

        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        if dist.get_rank() == 0:
            future.then(lambda future: None)
            future.add_done_callback(lambda future: None)
        return float(future.then(again).wait()[0])

    assert pair(fn) == [4.0] * 2


def test_more_continuations_may_wait_than_there_are_threads(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[float]:
        import time

        import torch

        def first(future: Any) -> Any:
            return future.value()[0]

        def again(future: Any) -> Any:
            return dist.all_reduce(future.value()[0], async_op=True).get_future().then(first).wait()

        time.sleep(dist.get_rank())
        works = [dist.all_reduce(torch.full((100,), float(number)), async_op=True) for number in range(150)]
        futures = [work.get_future().then(again) for work in works]
        return [float(future.wait()[0]) for future in futures]

    assert pair(fn) == [[4.0 * number for number in range(150)]] * 2


def test_a_long_chain_of_continuations(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> float:
        import torch

        future: Any = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        for _ in range(1000):
            future = future.then(lambda future: future.value())
        return float(future.wait()[0][0])

    assert pair(fn) == [2.0] * 2


def test_a_continuation_may_wait_for_what_follows_the_wait_for_its_call(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[bool]:
        import threading
        import time

        import torch

        found = []
        for _ in range(5):
            if dist.get_rank() == 1:
                time.sleep(0.2)  # the other rank adds its continuation before the call is done
                dist.all_reduce(torch.ones(3))
                continue
            done = threading.Event()
            future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
            following = future.then(lambda _, done=done: done.wait(30))
            future.wait()
            done.set()
            found.append(following.wait())
        return found

    assert pair(fn) == [[True] * 5, []]


def test_continuations_of_equal_calls_of_two_groups_call_a_third(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[float]:
        import torch

        kept = vars(torch).setdefault("_test_groups", [])
        if not kept:
            kept += [dist.new_group([0, 1]), dist.new_group([0, 1])]

        def again(future: Any) -> Any:
            return dist.all_reduce(future.value()[0], async_op=True), future.value()[0]

        futures = [
            dist.all_reduce(torch.full((3,), 10.0**number), group=group, async_op=True).get_future()
            for number, group in enumerate(kept)
        ]
        followed = {}
        for number in (0, 1) if dist.get_rank() == 0 else (1, 0):
            futures[number].wait()
            followed[number] = futures[number].then(again).wait()
        for work, _ in followed.values():
            work.wait()
        return [float(followed[number][1][0]) for number in (0, 1)]

    assert pair(fn) == [[4.0, 40.0]] * 2


def test_groups_of_some_ranks_may_call_the_group_of_all(four: Any) -> None:
    def fn(dist: Any, gloo: Any) -> float:
        import torch

        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

        def total(future: Any) -> float:
            dist.all_reduce(future.value()[0])
            return float(future.value()[0][0])

        group = halves[dist.get_rank() // 2]
        return float(dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().then(total).wait())

    assert four(fn) == [8.0] * 4


def test_a_continuation_that_adds_itself_again_and_again(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[Any]:
        import threading

        import torch

        total, steps, done = torch.ones(3), [], threading.Event()

        def again(_: Any) -> None:
            steps.append(dist.get_rank())
            if len(steps) < 200:
                dist.all_reduce(total, dist.ReduceOp.AVG, async_op=True).get_future().add_done_callback(again)
            else:
                done.set()

        again(None)
        return [done.wait(60), total.tolist()]

    assert pair(fn) == [[True, [1.0] * 3]] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensors_around_other_tensors_are_refused_with_the_remedy_and_the_engine_continues(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[float]:
        import torch
        from torch.distributed import _functional_collectives, _tensor
        from torch.distributed.device_mesh import DeviceMesh

        place, mesh = _tensor.Shard(0), DeviceMesh("cpu", [0, 1])
        pending = _functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        for tensor, remedy in (
            (
                _tensor.DTensor.from_local(torch.ones(2), mesh, [place]),
                r"type DTensor has .*: use tensor\.full_tensor\(\)",
            ),
            (pending, r"type AsyncCollectiveTensor has .*: use tensor\.wait\(\)"),
        ):
            for act in (
                lambda tensor: dist.all_reduce(tensor),
                lambda tensor: dist.broadcast(tensor, 0),
                lambda tensor: dist.all_gather([torch.ones(tensor.numel())] * 2, tensor),
                lambda tensor: dist.all_gather([tensor, tensor], torch.ones(tensor.numel())),
            ):
                with pytest.raises(ValueError, match=remedy):
                    act(tensor)
        result = pending.wait()
        dist.all_reduce(result)
        return result.tolist()

    assert pair(fn) == [[4.0, 4.0]] * 2


def test_sparse_tensors_are_summed(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[list[float]]:
        import torch

        rank = dist.get_rank()
        sparse = torch.sparse_coo_tensor([[0, rank + 1]], torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (4, 2))
        dist.all_reduce(sparse)
        result: list[list[float]] = sparse.to_dense().tolist()
        return result

    assert pair(fn) == [[[2.0, 4.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0]]] * 2


def test_sparse_tensors_are_summed_together_with_others_in_one_call(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        rank = dist.get_rank()
        one, other = (torch.sparse_coo_tensor([[rank, 2]], [factor, factor], (3,)) for factor in (1.0, 10.0))
        dense = torch.ones(2)
        dist.all_reduce_coalesced([one, dense, other])
        with dist._coalescing_manager():
            dist.all_reduce(one)
            dist.all_reduce(other)
        return one.to_dense().tolist(), other.to_dense().tolist(), dense.tolist()

    assert pair(fn) == [([2.0, 2.0, 4.0], [20.0, 20.0, 40.0], [2.0, 2.0])] * 2


def test_means_of_sparse_integers_are_rounded_as_those_of_dense_ones(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        sparse = torch.sparse_coo_tensor([[0, 1, 2]], [1, -4, -1 - 2 * dist.get_rank()], (4,))
        dense = sparse.to_dense()
        dist.all_reduce(sparse, dist.ReduceOp.AVG)
        dist.all_reduce(dense, dist.ReduceOp.AVG)
        return sparse.to_dense().tolist(), dense.tolist()

    assert pair(fn) == [([1, -4, -2, 0], [1, -4, -2, 0])] * 2


def test_ranks_that_sum_sparse_tensors_of_different_shapes_or_otherwise_are_an_error(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[str]:
        import torch

        rank = dist.get_rank()
        found = []
        for size, op in ((2 + rank, dist.ReduceOp.SUM), (2, [dist.ReduceOp.SUM, dist.ReduceOp.AVG][rank])):
            sparse = torch.eye(size).to_sparse()
            with pytest.raises(RuntimeError, match="Mismatched") as caught:
                dist.all_reduce(sparse, op)
            assert sparse.to_dense().equal(torch.eye(size)), "unchanged"
            found.append(str(caught.value).split(":")[0])
        return found

    assert pair(fn) == [["Mismatched shapes of sparse tensors", "Mismatched reduction operation"]] * 2


def test_the_engine_does_not_add_up_sparse_tensors_for_which_it_would_wait_for_a_gpu(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[Any]:
        import traceback

        import torch

        places: list[list[str]] = []
        make = torch.sparse_coo_tensor

        def noted(*args: Any, **kwargs: Any) -> Any:
            places.append([frame.filename for frame in traceback.extract_stack()])
            return make(*args, **kwargs)

        sparse = make([[0]], torch.ones(1, 2), (2, 2))
        torch.sparse_coo_tensor = noted
        try:
            work = dist.all_reduce(sparse, async_op=True)
            while not work.is_completed():
                pass
            done = sparse.to_dense().tolist()
            work.wait()
        finally:
            torch.sparse_coo_tensor = make
        return [done, len(places), any("engine" in filename for place in places for filename in place)]

    assert pair(fn) == [[[[2.0, 2.0], [0.0, 0.0]], 1, False]] * 2


def test_tensors_of_inference_mode_and_parameters_that_require_gradients(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> bool:
        import torch

        weight = torch.nn.Parameter(torch.ones(4))
        version = weight._version
        dist.all_reduce(weight)
        assert weight.tolist() == [2.0] * 4
        assert weight._version == version
        with torch.inference_mode():
            tensor = torch.ones(3)
            dist.all_reduce(tensor, async_op=True).wait()
            assert tensor.tolist() == [2.0] * 3
        return True

    assert all(pair(fn))


def test_wrong_arguments_are_refused_before_anything_is_sent(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[str]:
        import torch

        group = dist.distributed_c10d._get_default_group()
        refused = []
        for call in (
            lambda: group.allgather([[torch.empty(2)]], [torch.empty(2)]),
            lambda: group._allgather_base(torch.empty(3), torch.empty(2)),
            lambda: group.alltoall_base(torch.empty(3), torch.empty(3), [], []),
            lambda: group.allreduce([torch.empty(3)], dist.ReduceOp.BXOR),
        ):
            try:
                call()
            except ValueError as error:
                refused.append(str(error))
        dist.barrier()
        return refused

    assert [len(refused) for refused in pair(fn)] == [4, 4]
