"""torch.distributed on the backend "hvd", and on Gloo: DDP, FSDP2, and single calls.

DDP trains the models of ``training_step``, with gradients as views of its buckets, which ``hvd.shared_bucket_hook``
keeps in shared memory. Beside it are the same step with ``hvd.DistributedOptimizer``, without a hook, with a hook of
torch's all_reduce, and with one that communicates nothing: DDP copies each gradient into a bucket, which the optimizer
does not. A hook also saves DDP from scaling the gradients: the engine does so while it adds them.
FSDP2 shards 24 blocks of 1024-4096-1024, 201 million parameters, block by block, with batches of 16 rows: it gathers
the weights twice and scatters the gradients once in each step. All contenders run in the same processes, in turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Table, compare, row
from benchmarks.report import Reports
from benchmarks.training_step import model_and_loss
from hvd_cluster.launch import local

WIDTH, NUM_BLOCKS, ROWS = 1024, 24, 16

#: By name, the seconds of a step in each turn, ours and the peer's; and the largest relative difference of the losses.
Found = tuple[dict[str, dict[str, list[float]]], float]


class Trained:
    """A model that takes steps, and its losses."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[Any], torch.Tensor]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss_of = loss_of
        self.losses: list[float] = []

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = self._loss_of(self._model)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())

    def difference(self, other: Trained) -> float:
        """The largest relative difference between the losses of both."""
        pairs = zip(self.losses, other.losses, strict=False)
        return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def groups() -> tuple[Any, Any]:
    """A group of each backend, over all ranks."""
    import torch.distributed as dist

    import hvd_cluster.torch  # noqa: F401 - registers the backend

    dist.init_process_group("hvd")
    return dist.group.WORLD, dist.new_group(backend="gloo")


def ddp(turns: int, what: str) -> Found:
    import torch.distributed as dist

    import hvd_cluster.torch as hvd

    ours, peer = groups()
    net, loss_of = model_and_loss(what)

    def trained(group: Any, hook: Callable[[Any, Any], Any] | None = None) -> Trained:
        model = torch.nn.parallel.DistributedDataParallel(net(), process_group=group, gradient_as_bucket_view=True)
        if hook is not None:
            model.register_comm_hook(None, hook)
        return Trained(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_of)

    def averaged(bucket: Any) -> Any:
        future = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def as_it_is(bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    on_hvd, on_gloo, own = trained(ours, hvd.shared_bucket_hook), trained(peer), net()
    plain = trained(ours)
    with_hook, alone = (
        trained(ours, lambda _, bucket: averaged(bucket)),
        trained(ours, lambda _, bucket: as_it_is(bucket)),
    )
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(own.parameters(), lr=0.01), list(own.named_parameters()))
    with_optimizer = Trained(own, optimizer, loss_of)
    found = {
        "DDP on Gloo": compare(on_hvd.step, on_gloo.step, turns, per_turn=3),
        "hvd.DistributedOptimizer": compare(on_hvd.step, with_optimizer.step, turns, per_turn=3),
        "DDP on hvd without a hook": compare(on_hvd.step, plain.step, turns, per_turn=3),
        "DDP on hvd with a hook of AVG": compare(on_hvd.step, with_hook.step, turns, per_turn=3),
        "DDP without communication (the limit)": compare(on_hvd.step, alone.step, turns, per_turn=3),
    }
    return found, on_hvd.difference(on_gloo)


def fsdp2(turns: int) -> Found:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    x = torch.randn(ROWS, WIDTH)

    def trained(group: Any) -> Trained:
        torch.manual_seed(0)
        mesh = DeviceMesh.from_group(group, "cpu")
        model = torch.nn.Sequential()
        for _ in range(NUM_BLOCKS):
            block = torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(4 * WIDTH, WIDTH)
            )
            fully_shard(block, mesh=mesh)
            model.append(block)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return Trained(model, optimizer, lambda net: net(x).square().mean())

    ours, peer = groups()
    on_hvd, on_gloo = trained(ours), trained(peer)
    times = compare(on_hvd.step, on_gloo.step, turns, per_turn=1)
    return {"FSDP2 on Gloo": times}, on_hvd.difference(on_gloo)


def calls(turns: int) -> Found:
    import torch.distributed as dist

    ours, peer = groups()
    size = dist.get_world_size()
    found = {}
    for text, elements in (("4 KB", 1 << 10), ("16 MB", 1 << 22)):
        whole, part = torch.ones(elements), torch.ones(elements // size)
        per_turn = 50 if elements < 1 << 20 else 3
        for name, call in {
            "all_reduce": lambda group, whole=whole: dist.all_reduce(whole, dist.ReduceOp.MAX, group=group),
            "all_gather": lambda group, whole=whole, part=part: dist.all_gather_into_tensor(whole, part, group=group),
            "reduce_scatter": lambda group, whole=whole, part=part: dist.reduce_scatter_tensor(
                part, whole, dist.ReduceOp.MAX, group=group
            ),
            "broadcast": lambda group, whole=whole: dist.broadcast(whole, 0, group=group),
        }.items():
            on_hvd, on_gloo = functools.partial(call, ours), functools.partial(call, peer)
            found[f"{name} of {text}"] = compare(on_hvd, on_gloo, turns, per_turn)
    return found, 0.0


def measure(turns: int = 15) -> Reports:
    tables = []
    for title, work, ranks, num_turns in (
        ("A step of DDP on the backend hvd: the MLP", functools.partial(ddp, what="MLP"), (2, 4), 3 * turns),
        ("A step of DDP on the backend hvd: the transformer", functools.partial(ddp, what="transformer"), (2,), turns),
        ("A step of FSDP2 on the backend hvd", fsdp2, (2, 4), max(3, turns // 3)),
        ("One call of torch.distributed on the backend hvd, and on Gloo", calls, (2, 4), turns),
    ):
        rows = []
        for num_proc in ranks:
            found, difference = local.run(work, (num_turns,), num_proc=num_proc, env={"OMP_NUM_THREADS": "1"})[0]
            if difference > 1e-6:
                raise AssertionError(f"{title}: the losses differ by {difference:g}")
            rows += [row(f"{num_proc} ranks, {name}", times) for name, times in found.items()]
        tables.append(Table(title, "the peer", rows))
    return Reports(tables)
