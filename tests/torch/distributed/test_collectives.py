"""Every collective of torch.distributed on the backend hvd gives what Gloo gives."""

from __future__ import annotations

from typing import Any

import pytest


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


def test_a_continuation_may_wait_for_another_call(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[float]:
        import torch

        def again(future: Any) -> Any:
            return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()

        futures = [dist.all_reduce(torch.ones(3), async_op=True).get_future().then(again) for _ in range(4)]
        return [float(future.wait()[0][0]) for future in futures]

    assert pair(fn) == [[4.0] * 4] * 2


def test_sparse_tensors_are_summed(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[list[float]]:
        import torch

        rank = dist.get_rank()
        sparse = torch.sparse_coo_tensor([[0, rank + 1]], torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (4, 2))
        dist.all_reduce(sparse)
        result: list[list[float]] = sparse.to_dense().tolist()
        return result

    assert pair(fn) == [[[2.0, 4.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0]]] * 2


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
