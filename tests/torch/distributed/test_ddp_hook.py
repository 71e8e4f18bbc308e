"""The hook that keeps DDP's buckets in shared memory changes where they are, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

#: The engine reduces fewer bytes than 128 KiB by copying them, so these layers have more.
WIDTH = 200


def trained(dist: Any, **changes: Any) -> tuple[list[float], list[bool]]:
    """Train with the hook, and with torch's; the largest difference of a weight by steps, and which gradients moved."""
    import torch

    import hvd_cluster.torch as hvd

    def averaged(buffer: Any) -> Any:
        future = dist.all_reduce(buffer, dist.ReduceOp.AVG, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    models = []
    for hook in (hvd.shared_bucket_hook, lambda _, bucket: averaged(bucket.buffer())):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        net = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.3, **changes}
        model = torch.nn.parallel.DistributedDataParallel(net, **options)
        model.register_comm_hook(None, hook)
        models.append((model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)))
    differences = []
    for step in range(8):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(8, WIDTH, generator=generator)
        for model, optimizer in models:
            if step == 5:
                with model.no_sync():
                    model(x).square().mean().backward()
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        pairs = zip(models[0][0].parameters(), models[1][0].parameters(), strict=True)
        differences.append(max((mine - theirs).abs().max().item() for mine, theirs in pairs))
    models[0][0](x).square().mean().backward()
    models[1][0](x).square().mean().backward()
    return differences, [hvd.is_shared(parameter.grad) for parameter in models[0][0].parameters()]


def test_buckets_move_to_shared_memory_and_nothing_else_changes(trio: Any, request: pytest.FixtureRequest) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        return trained(dist)

    has_shared_memory = request.node.callspec.params["trio"] == "shm"
    # Gloo sums the operands of three ranks in an order that depends on which buckets are fused.
    bound = 0.0 if has_shared_memory else 1e-7
    for differences, moved in trio(fn):
        assert max(differences) <= bound
        assert moved == [has_shared_memory] * 10


def test_a_bucket_stays_unless_gradients_are_views_of_it(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        return trained(dist, gradient_as_bucket_view=False)

    assert pair(fn) == [([0.0] * 8, [False] * 10)] * 2


def test_a_bucket_stays_where_shared_memory_is_used_up(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import unittest.mock

        from hvd_cluster.torch.distributed import ddp_hook

        with unittest.mock.patch.object(ddp_hook, "shared_empty", side_effect=MemoryError("full")):
            return trained(dist)

    assert pair(fn) == [([0.0] * 8, [False] * 10)] * 2


def test_unused_parameters_and_sparse_gradients(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[float]:
        import torch

        import hvd_cluster.torch as hvd

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.nn.Embedding(30, WIDTH, sparse=True)
                self.always = torch.nn.Linear(WIDTH, WIDTH)
                self.sometimes = torch.nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Any) -> Any:
                h = self.always(self.table(x))
                return (self.sometimes(h) if x[0] % 3 else h).square().mean()

        weights = []
        for group, hook in ((None, hvd.shared_bucket_hook), (gloo, None)):
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(
                Net(), process_group=group, find_unused_parameters=True, gradient_as_bucket_view=True
            )
            if hook is not None:
                model.register_comm_hook(group, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(6):
                optimizer.zero_grad()
                model(torch.arange(6) + step + dist.get_rank()).backward()
                optimizer.step()
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
        return weights[0].sum().tolist()

    mine, other = pair(fn)
    assert mine == other


def test_models_that_share_a_backward_pass_and_one_whose_pass_was_interrupted(trio: Any) -> None:
    """Where cores are few, buckets wait for the last one of a pass; of whichever model that is."""

    def fn(dist: Any, gloo: Any) -> tuple[bool, float]:
        import torch

        import hvd_cluster.torch as hvd

        def averaged(bucket: Any) -> Any:
            future = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True).get_future()
            return future.then(lambda done: done.value()[0])

        def model(hook: Any, dtype: Any) -> Any:
            layers = [torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3)]
            options: dict[str, Any] = {"bucket_cap_mb": 0.2, "gradient_as_bucket_view": True}
            ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), **options)
            ddp.register_comm_hook(None, hook)
            return ddp

        def abandon(hook: Any) -> None:
            def interrupt(_: Any) -> None:
                raise RuntimeError("interrupted")

            ddp = model(hook, torch.float32)
            x = torch.ones(4, WIDTH)
            ddp(x).sum().backward()  # DDP makes its buckets small after the first pass
            ddp.module[1].register_forward_hook(lambda *parts: parts[2].register_hook(interrupt) and None)
            with pytest.raises(RuntimeError, match="interrupted"):
                ddp(x).sum().backward()

        def trained(hook: Any, dtypes: list[Any]) -> list[Any]:
            abandon(hook)
            torch.manual_seed(0)
            halves = [model(hook, dtype) for dtype in dtypes]
            parameters = [parameter for half in halves for parameter in half.parameters()]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            for _ in range(4):
                x = torch.full((4, WIDTH), 1.0 + dist.get_rank(), dtype=dtypes[0])
                halves[1](halves[0](x).to(dtypes[1])).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return parameters

        equal = []
        for dtypes in ([torch.float32] * 2, [torch.float64, torch.float32]):
            mine, theirs = (
                trained(hook, dtypes) for hook in (hvd.shared_bucket_hook, lambda _, bucket: averaged(bucket))
            )
            equal += [torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(mine, theirs, strict=True)]
        return all(equal), sum(parameter.double().sum().item() for parameter in mine)

    results = trio(fn)
    assert results[0][0]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("lacks_cores", [True, False])
def test_hooks_around_it_may_wait_for_a_bucket_or_continue_with_a_call(pair: Any, lacks_cores: bool) -> None:
    """A continuation's call meets that of the same bucket, however the ranks interleave."""

    def fn(dist: Any, gloo: Any, lacks_cores: bool) -> list[float]:
        import random
        import time

        import torch

        import hvd_cluster.torch as hvd
        from hvd_cluster.engine import current
        from hvd_cluster.torch.distributed import ddp_hook

        current.engine().lacks_cores = lacks_cores
        ddp_hook._held.clear()

        def waits(bucket: Any) -> Any:
            future = hvd.shared_bucket_hook(None, bucket)
            future.wait()
            return future

        def continues(bucket: Any) -> Any:
            time.sleep(random.random() * 0.004)

            def double(done: Any) -> Any:
                time.sleep(random.random() * 0.004)
                again = 2 * done.value()
                dist.all_reduce(again, dist.ReduceOp.AVG)  # as the hook does, so the calls could be confused
                return again

            return hvd.shared_bucket_hook(None, bucket).then(double)

        norms = []
        for hook in (waits, continues):
            torch.manual_seed(0)
            layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(5)]
            model = torch.nn.parallel.DistributedDataParallel(
                torch.nn.Sequential(*layers), bucket_cap_mb=0.2, gradient_as_bucket_view=True
            )
            model.register_comm_hook(None, lambda _, bucket, hook=hook: hook(bucket))
            x = torch.full((2, WIDTH), 1.0 + dist.get_rank())
            for _ in range(6):
                model.zero_grad()
                model(x).square().mean().backward()
            norms += [parameter.grad.double().norm().item() for parameter in model.parameters()]
        first, second = norms[:10], norms[10:]
        torch.testing.assert_close(torch.tensor(second), 2 * torch.tensor(first), rtol=1e-5, atol=0)
        return first

    one, other = pair(fn, lacks_cores)
    assert one == other
