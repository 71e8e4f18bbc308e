"""Training on GPUs reaches the losses and weights that it reaches on the CPU."""

from __future__ import annotations

import sys
import time
from typing import Any

import cloudpickle
import pytest
import torch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two passes a step": {"backward_passes_per_step": 2},
    "groups": {"num_groups": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "sum": {"op": "Sum"},
    "adasum": {"op": "Adasum"},
    "fp16 compression": {"compression": "fp16"},
    "sparse as dense": {"sparse_as_dense": True},
    "clipped": {"clip": True},
    "bf16 autocast": {"autocast": torch.bfloat16},
    "fp16 autocast and scaler": {"autocast": torch.float16},
    "compiled": {"compile": True},
}


def train(hvd: Any, device: str, case: dict[str, Any]) -> list[float]:
    """The losses of some steps, and a sum of the weights."""
    case = dict(case)
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(11, 16, sparse=case.get("sparse_as_dense", False))
    net = torch.nn.Sequential(embedding, torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU())
    net.append(torch.nn.Linear(32, 5))
    net.to(device)
    autocast, clips, compiles = case.pop("autocast", None), case.pop("clip", False), case.pop("compile", False)
    named = {"op": vars(hvd).get(case.pop("op", "Average"))}
    if case.pop("compression", None):
        named["compression"] = hvd.Compression.fp16
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.0 if "sparse_as_dense" in case else 0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), **case, **named)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler(device, enabled=autocast == torch.float16 and device == "cuda", init_scale=256.0)
    model = torch.compile(net) if compiles and device == "cuda" else net
    generator = torch.Generator().manual_seed(hvd.rank())
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(case.get("backward_passes_per_step", 1)):
            x = torch.randint(0, 11, (16, 4), generator=generator).to(device)
            y = torch.randint(0, 5, (16,), generator=generator).to(device)
            with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None and device == "cuda"):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
        if clips or scaler.is_enabled():
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5 if clips else 1e9)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        losses.append(loss.item())
    return [*losses, sum(parameter.double().abs().sum().item() for parameter in net.parameters())]


@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_trains_as_on_the_cpu(pair: Any, name: str) -> None:
    case = CASES[name]
    both = pair(lambda hvd: (train(hvd, "cpu", case), train(hvd, "cuda", case)))
    tolerance = 2e-2 if "autocast" in case or "compression" in case else 2e-4
    for on_cpu, on_gpu in both:
        assert on_gpu == pytest.approx(on_cpu, rel=tolerance)
    (_, first), (_, second) = both
    assert first[-1] == second[-1]  # the same weights on both ranks


def test_sync_batch_norm_is_that_of_the_cpu(pair: Any) -> None:
    def fn(hvd: Any) -> bool:
        found = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(hvd.rank())
            norm = hvd.SyncBatchNorm(4).to(device)
            x = torch.randn(3 + hvd.rank(), 4, 5, 5).to(device).requires_grad_()
            y = norm(x)
            (y * y.detach().cos()).sum().backward()
            found.append([t.detach().cpu() for t in (y, x.grad, norm.weight.grad, norm.running_mean, norm.running_var)])
        return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*found, strict=True))

    assert pair(fn) == [True, True]


def test_ddp_and_fsdp2_on_the_backend_hvd_train_as_on_the_cpu(pair: Any) -> None:
    def losses(rank: int, device: str, kind: str) -> list[float]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5)).to(device)
        if kind == "fsdp2":
            fully_shard(model, mesh=init_device_mesh(device, (2,)))
        else:
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        if kind == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif kind == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        generator, found = torch.Generator().manual_seed(rank), []
        for _ in range(6):
            x = torch.randn(16, 20, generator=generator).to(device)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            with pytest.MonkeyPatch.context() as patch:
                if device == "cpu":  # where there is a GPU, torch's hook would synchronize the CPU as one
                    patch.setattr(torch.cuda, "is_available", lambda: False)
                loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def fn(hvd: Any) -> Any:
        import torch.distributed as dist

        dist.init_process_group("hvd", device_id=None)
        try:
            return [[losses(hvd.rank(), device, kind) for device in ("cpu", "cuda")] for kind in tolerances]
        finally:
            dist.destroy_process_group()

    # Hooks send rounded gradients, or products of thin matrices.
    tolerances = {"ddp": 1e-4, "fsdp2": 1e-4, "fp16": 1e-2, "powersgd": 1e-2}
    for kinds in pair(fn):
        for (on_cpu, on_gpu), tolerance in zip(kinds, tolerances.values(), strict=True):
            assert on_gpu == pytest.approx(on_cpu, rel=tolerance)


def test_the_calls_of_torch_distributed_on_the_backend_hvd(pair: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        import torch.distributed as dist

        dist.init_process_group("hvd")
        rank, wrong = dist.get_rank(), []

        def results(device: str) -> Any:
            x = torch.arange(8.0, device=device) + rank
            total = x.clone()
            dist.all_reduce(total)
            yield total
            parts = [torch.empty(8, device=device) for _ in range(2)]
            dist.all_gather(parts, x)
            yield torch.cat(parts)
            out = torch.empty(16, device=device)
            dist.all_gather_into_tensor(out, x)
            yield out
            out = torch.empty(4, device=device)
            dist.reduce_scatter_tensor(out, x)
            yield out
            out = torch.empty(8, device=device)
            dist.all_to_all_single(out, x)
            yield out
            sent = x.clone()
            dist.broadcast(sent, src=1)
            yield sent
            other = torch.empty(8, device=device)
            works = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
            for work in dist.batch_isend_irecv(works):
                work.wait()
            yield other
            future = dist.all_reduce(x.clone(), async_op=True).get_future()
            yield future.then(lambda f: f.value()[0] * 2).wait()
            dist.barrier()

        try:
            for number, (here, there) in enumerate(zip(results("cpu"), results("cuda"), strict=True)):
                if not torch.equal(here, there.cpu()):
                    wrong.append(f"{number}: {here} {there}")
            return wrong
        finally:
            dist.destroy_process_group()

    assert pair(fn) == [[], []]


def test_a_continuation_sees_what_those_before_it_have_queued_on_the_gpu(pair: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import torch.distributed as dist

        def slowly_added(future: Any) -> torch.Tensor:
            value = future.value()
            torch.cuda._sleep(100_000_000)
            result: torch.Tensor = (value[0] if isinstance(value, list) else value).add_(1)
            return result

        dist.init_process_group("hvd")
        try:
            future: Any = dist.all_reduce(torch.zeros(3, device="cuda"), async_op=True).get_future()
            for _ in range(5):
                future = future.then(slowly_added)
            return [value.item() for value in future.wait()]
        finally:
            dist.destroy_process_group()

    assert pair(fn) == [[5.0] * 3] * 2


def test_the_future_of_a_call_does_not_make_the_stream_of_the_program_wait(pair: Any) -> None:
    def fn(hvd: Any) -> tuple[bool, list[float]]:
        import torch.distributed as dist

        dist.init_process_group("hvd")
        try:
            x = torch.ones(3, device="cuda")
            dist.all_reduce(x)
            torch.cuda.synchronize()
            dist.barrier()
            if hvd.rank() == 1:
                torch.cuda._sleep(2_000_000_000)  # a second on a GPU of 2 GHz
            work = dist.all_reduce(x, async_op=True)
            future: Any = work.get_future()
            while not future.done():
                time.sleep(0.001)
            torch.cuda.current_stream().synchronize()
            is_in_progress = not work.is_completed()
            return is_in_progress, future.wait()[0].tolist()
        finally:
            dist.destroy_process_group()

    (is_in_progress, first), (_, second) = pair(fn)
    assert first == second == [4.0] * 3
    # Over shared memory, a future is complete when the call is.
    assert is_in_progress or pair.transport == "shm"


def test_a_call_that_another_thread_executes_waits_for_the_stream_of_its_input(pair: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import torch.distributed as dist

        dist.init_process_group("hvd")
        side, found = torch.cuda.Stream(), []
        try:
            for turn in range(5):
                with torch.cuda.stream(side):
                    torch.cuda._sleep(40_000_000)
                    x = torch.full((1 << 20,), float(turn + hvd.rank()), device="cuda")
                    work = dist.all_reduce(x, async_op=True)
                    while not work.is_completed():  # the engine's thread executes it meanwhile
                        time.sleep(0.001)
                    work.wait()
                    found.append(x.mean().item() - 2 * turn)
            return found
        finally:
            dist.destroy_process_group()

    assert pair(fn) == [[1.0] * 5] * 2


def test_a_bucket_waits_for_gradients_that_other_streams_compute(pair: Any) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
                return value.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                torch.cuda._sleep(40_000_000)
                return gradient.clone()

        weights = [torch.nn.Parameter(torch.ones(1000, device="cuda")) for _ in range(2)]
        names = [("quick", weights[0]), ("slow", weights[1])]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.0), names)
        sides = [torch.cuda.Stream(), torch.cuda.Stream()]
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            current, losses = torch.cuda.current_stream(), []
            for index, (side, weight) in enumerate(zip(sides, weights, strict=True)):
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    value = weight * float(hvd.rank() + 1)
                    losses.append((Slow.apply(value) if index else value).sum())
            for side in sides:
                current.wait_stream(side)
            torch.stack(losses).sum().backward()  # the slow branch first, so the other one completes the bucket
            found.append([weight.grad.mean().item() for weight in weights])
            optimizer.step()
        return found

    assert pair(fn) == [[[1.5, 1.5]] * 4] * 2


def test_what_a_continuation_raises_reaches_those_who_wait(pair: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        import torch.distributed as dist

        def fail(_: Any) -> Any:
            raise KeyError("mine")

        dist.init_process_group("hvd")
        found = []
        try:
            failed = dist.all_reduce(torch.ones(3, device="cuda"), async_op=True).get_future().then(fail)
            for future in (failed, failed.then(lambda future: future.value())):
                try:
                    future.wait()
                except KeyError as error:
                    found.append(str(error))
            return found
        finally:
            dist.destroy_process_group()

    assert pair(fn) == [["'mine'"] * 2] * 2
