"""200 tensors of 1 to 64 KB, submitted asynchronously and then awaited: fusion against one Gloo call each."""

from __future__ import annotations

from benchmarks.measure import Table, compare, row
from hvd_cluster.launch import local


def worker() -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    import hvd_cluster.torch as hvd

    hvd.init()
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(256, 16384, (200,), generator=generator).tolist()
    mine = [torch.ones(length) for length in lengths]
    theirs = [torch.ones(length) for length in lengths]

    def ours() -> None:
        handles = [hvd.allreduce_async_(tensor, name=f"t{i}") for i, tensor in enumerate(mine)]
        for handle in handles:
            hvd.synchronize(handle)

    def one_by_one() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in theirs]
        for work in works:
            work.wait()

    times = compare(ours, one_by_one, turns=15, per_turn=3)
    dist.destroy_process_group()
    hvd.shutdown()
    return times


def measure() -> Table:
    times = local.run(worker, num_proc=2, env={"OMP_NUM_THREADS": "1"})[0]
    return Table("200 tensors of 1 to 64 KB, asynchronous", "raw Gloo, one call each", [row("2 ranks", times)])
