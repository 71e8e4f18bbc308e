"""The operations on GPU tensors give what they give on the CPU, and are ordered with the caller's stream."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hvd_cluster.engine.timeline.trace import read

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_the_ranks_use_the_transport_that_is_tested(pair: Any) -> None:
    def fn(hvd: Any) -> str:
        from hvd_cluster.engine import basics

        device = torch.device("cuda", 0)
        hvd.allreduce(torch.ones(3, device=device))
        return basics.engine().transport_name(0, device)

    assert pair(fn) == [{"shm": "SHM", "nccl": "NCCL"}[pair.transport]] * 2


def test_reductions_of_every_dtype_are_those_of_the_cpu(pair: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        wrong = []
        generator = torch.Generator().manual_seed(hvd.rank())
        floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
        ops = {"Sum": hvd.Sum, "Average": hvd.Average, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}
        for dtype in [*floats, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]:
            here = torch.randint(0, 5, (33, 7), generator=generator).to(dtype)
            for name, op in ops.items():
                for scales in [{}] if name != "Sum" else [{}, {"prescale_factor": 0.5, "postscale_factor": 3.0}]:
                    found = []
                    for tensor in (here, here.cuda()):
                        try:
                            found.append(hvd.allreduce(tensor, op=op, **scales).cpu())
                        except ValueError as error:
                            found.append(str(error))
                    alike = found[0] == found[1] if isinstance(found[0], str) else None
                    if alike is None and isinstance(found[1], torch.Tensor):
                        alike = found[0].dtype == found[1].dtype and torch.allclose(
                            found[0].double(), found[1].double(), rtol=2e-3
                        )
                    if not alike:
                        wrong.append(f"{dtype} {name} {scales}: {found}"[:300])
        return wrong

    assert pair(fn) == [[], []]


def test_every_other_operation_is_that_of_the_cpu(pair: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        rank, wrong = hvd.rank(), []

        def results(device: str) -> Any:
            base = torch.arange(24, dtype=torch.float32, device=device).reshape(6, 4) + rank
            yield "allgather", hvd.allgather(base[: 2 + rank])
            yield "allgather of nothing", hvd.allgather(base[:0] if rank else base)
            yield "grouped allgather", hvd.grouped_allgather([base[: rank + 1], base.long()])
            yield "broadcast", hvd.broadcast(base, root_rank=1)
            yield "broadcast_", hvd.broadcast_(base.clone(), root_rank=0)
            yield "alltoall", hvd.alltoall(base, splits=[1, 5] if rank else [4, 2])
            yield "alltoall of equal parts", hvd.alltoall(base.half())
            yield "reducescatter", hvd.reducescatter(base[:5], op=hvd.Sum)
            yield "grouped reducescatter", hvd.grouped_reducescatter([base, base.double()], op=hvd.Average)
            yield "grouped allreduce", hvd.grouped_allreduce([base, base.half(), base.long()], op=hvd.Sum)
            yield "allreduce_ of a view", hvd.allreduce_(base.clone()[1:3], op=hvd.Sum)
            yield "allreduce of nothing", hvd.allreduce(base[:0], op=hvd.Sum)
            yield "allreduce of a number", hvd.allreduce(base.sum(), op=hvd.Sum)
            yield "adasum", hvd.allreduce(base + 1, op=hvd.Adasum)
            yield "fp16 compression", hvd.allreduce(base, compression=hvd.Compression.fp16)
            indices = torch.tensor([[0, 2 + rank]], device=device)
            sparse = torch.sparse_coo_tensor(indices, torch.ones(2, 3, device=device), (5, 3))
            handle = hvd.sparse_allreduce_async(sparse, name=f"sparse.{device}", op=hvd.Sum)
            yield "sparse allreduce", handle().to_dense()
            yield "an object", hvd.broadcast_object({"t": base}, root_rank=1)["t"]

        def listed(value: Any) -> list[torch.Tensor]:
            values = value if isinstance(value, (list, tuple)) else [value]
            return [one.cpu() for one in values]

        for (name, here), (_, there) in zip(results("cpu"), results("cuda"), strict=True):
            for left, right in zip(listed(here), listed(there), strict=True):
                if left.shape != right.shape or left.dtype != right.dtype or not torch.allclose(left, right, rtol=1e-3):
                    wrong.append(f"{name}: {left} and {right}")
        if hvd.broadcast(torch.ones(2).cuda(), 0).device.type != "cuda":
            wrong.append("a result is not on the GPU")
        return wrong

    assert pair(fn) == [[], []]


def test_many_operations_at_once_are_fused_and_keep_their_values(pair: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        wrong = []
        generator = torch.Generator().manual_seed(3)
        sizes = torch.randint(1, 20_000, (60,), generator=generator).tolist()
        for turn in range(5):
            tensors = [torch.full((size,), float(i + turn + hvd.rank()), device="cuda") for i, size in enumerate(sizes)]
            order = torch.randperm(60, generator=torch.Generator().manual_seed(turn * 2 + hvd.rank())).tolist()
            handles = {i: hvd.allreduce_async_(tensors[i], op=hvd.Sum, name=f"many.{i}") for i in order}
            for i, handle in handles.items():
                hvd.synchronize(handle)
                expected = float(2 * (i + turn) + 1)
                if not bool((tensors[i] == expected).all()):
                    wrong.append(f"turn {turn}, tensor {i}: {tensors[i][:3]} and not {expected}")
        return wrong

    assert pair(fn) == [[], []]


def test_an_operation_waits_for_the_stream_that_computes_its_input_and_the_stream_for_its_result(pair: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        side = torch.cuda.Stream()
        found = []
        for turn in range(10):
            stream = side if turn % 2 else torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(40_000_000)
                tensor = torch.empty(1 << 20, device="cuda").fill_(turn + hvd.rank())
                handle = hvd.allreduce_async(tensor, op=hvd.Sum)
                del tensor  # the memory may be given out again only when the operation has read it
                torch.empty(1 << 20, device="cuda").fill_(1000.0)
                result = hvd.synchronize(handle)
                found.append(result.mean().item() - 2 * turn)
        return found

    assert pair(fn) == [[1.0] * 10] * 2


def test_an_exchange_is_launched_and_not_awaited(pair: Any) -> None:
    def fn(hvd: Any) -> tuple[bool, list[int]]:
        x = torch.ones(4, device="cuda")
        hvd.alltoall(x)
        torch.cuda.synchronize()
        hvd.barrier()
        if hvd.rank() == 1:
            torch.cuda._sleep(2_000_000_000)  # a second on a GPU of 2 GHz
        _, received = hvd.alltoall(x, splits=[1, 3])
        is_in_progress = not torch.cuda.current_stream().query()
        return is_in_progress, received.tolist()

    (is_in_progress, first), (_, second) = pair(fn)
    assert (first, second) == ([1, 1], [3, 3])
    # Shared memory has the other rank's rows only when its GPU has computed them.
    assert is_in_progress or pair.transport == "shm"


def test_process_sets_and_join(pair: Any) -> None:
    def fn(hvd: Any) -> Any:
        both = hvd.global_process_set
        single = hvd.add_process_set([1])
        x = torch.full((5,), float(hvd.rank() + 1), device="cuda")
        found = [hvd.allreduce(x, op=hvd.Sum, process_set=both).tolist()]
        if hvd.rank() == 1:
            found.append(hvd.allreduce(x, op=hvd.Sum, process_set=single).tolist())
        found += [hvd.allreduce(x, op=hvd.Sum, name="uneven").tolist() for _ in range(2 + 3 * hvd.rank())]
        last = hvd.join(0)
        hvd.remove_process_set(single)
        return found, last

    (first, last), (second, _) = pair(fn)
    assert last == 1
    assert first == [[3.0] * 5] * 3
    assert second == [[3.0] * 5, [2.0] * 5, [3.0] * 5, [3.0] * 5, *[[2.0] * 5] * 3]


def test_operations_of_two_process_sets_in_opposite_orders_do_not_wait_for_each_other(pair: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        own = [hvd.add_process_set([rank]) for rank in range(2)]
        tensor = torch.ones(100_000, device="cuda")
        found = []
        for turn in range(20):
            calls = {
                "all": lambda turn=turn: hvd.allreduce_async(tensor, op=hvd.Sum, name=f"all.{turn}"),
                "own": lambda turn=turn: hvd.allreduce_async(
                    tensor, op=hvd.Sum, name=f"own.{turn}", process_set=own[hvd.rank()]
                ),
            }
            order = list(calls) if hvd.rank() else list(reversed(calls))
            handles = {name: calls[name]() for name in order}
            found.append(sum(hvd.synchronize(handle).mean().item() for handle in handles.values()))
        for process_set in own:
            hvd.remove_process_set(process_set)
        return found

    assert pair(fn) == [[3.0] * 20] * 2


def test_a_graph_of_the_users_is_captured_and_replayed_between_operations(pair: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        hvd.allreduce(torch.ones(4, device="cuda"))
        x = torch.ones(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            y = x * 2
        found = []
        for turn in range(5):
            x.fill_(turn)
            graph.replay()
            found.append(hvd.allreduce(y, op=hvd.Sum).max().item())
        return found

    assert pair(fn) == [[4.0 * turn for turn in range(5)]] * 2


def test_the_timeline_names_what_moved_the_tensors(tmp_path: Any, pair: Any) -> None:
    def fn(hvd: Any, path: str) -> None:
        hvd.start_timeline(path)
        for _ in range(3):
            hvd.allreduce(torch.ones(1000, device="cuda"), name="seen")
        hvd.barrier()
        hvd.stop_timeline()

    path = tmp_path / "timeline.json"
    pair(fn, str(path))
    expected = {"nccl": "NCCL_ALLREDUCE", "shm": "SHM_ALLREDUCE"}[pair.transport]
    limit_s = time.monotonic() + 20
    while expected not in {span.name for span in read(path).spans}:  # written after the last call
        assert time.monotonic() < limit_s
        time.sleep(0.05)


def test_the_default_device_does_not_matter(pair: Any) -> None:
    def fn(hvd: Any) -> Any:
        torch.set_default_device("cuda")
        try:
            model = torch.nn.Linear(3, 2)
            optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            model(torch.ones(4, 3) * hvd.rank()).sum().backward()
            optimizer.step()
            gathered = hvd.allgather_object({"rank": hvd.rank()})
            hvd.barrier()
            return gathered, [p.tolist() for p in model.parameters()]
        finally:
            torch.set_default_device("cpu")

    first, second = pair(fn)
    assert first == second
    assert first[0] == [{"rank": 0}, {"rank": 1}]
