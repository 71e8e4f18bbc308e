"""200 tensors of 1 to 64 KB, submitted asynchronously and then awaited: fusion against one Gloo call each.

What bounds it: the calls themselves, and the bytes, which as one tensor would take a vote and one stream of chunks. The
rest is what 200 tensors take more than one does: to be voted for, packed, unpacked and reported.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.measure import Table, compare, row, seconds
from benchmarks.report import Report, Reports
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
    whole = torch.ones(sum(lengths))
    times |= {"all": [], "calls": [], "bytes": []}
    for _ in range(45):
        start_s = time.perf_counter()
        handles = [hvd.allreduce_async_(tensor, name=f"t{i}") for i, tensor in enumerate(mine)]
        times["calls"].append(time.perf_counter() - start_s)
        for handle in handles:
            hvd.synchronize(handle)
        times["all"].append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        hvd.allreduce_(whole, name="whole")
        times["bytes"].append(time.perf_counter() - start_s)
    dist.destroy_process_group()
    hvd.shutdown()
    return times


def measure() -> Reports:
    times = local.run(worker, num_proc=2, env={"OMP_NUM_THREADS": "1"})[0]
    table = Table("200 tensors of 1 to 64 KB, asynchronous", "raw Gloo, one call each", [row("2 ranks", times)])
    whole_s, calls_s, bytes_s = (statistics.median(times[name]) for name in ("all", "calls", "bytes"))
    rows = [
        ("all, repeatedly", whole_s),
        ("200 calls of allreduce_async_", calls_s),
        ("one tensor of as many bytes", bytes_s),
        ("the rest", whole_s - calls_s - bytes_s),
    ]
    parts = [[name, seconds(value_s), f"{value_s / whole_s:.0%}"] for name, value_s in rows]
    return Reports([table, Report("200 tensors: where the time goes", ("", "ours", "share"), parts)])
