"""Allreduce in place on one host, of ordinary tensors and of tensors in shared memory, negotiated, against raw Gloo."""

from __future__ import annotations

from benchmarks.measure import Table, compare, row
from hvd_cluster.launch import local

SIZES = {"4 KB": 1 << 10, "64 KB": 16 << 10, "1 MB": 256 << 10, "16 MB": 4 << 20, "100 MB": 25 << 20}


def worker() -> dict[str, dict[str, list[float]]]:
    import torch
    import torch.distributed as dist

    import hvd_cluster.torch as hvd

    hvd.init()
    dist.init_process_group("gloo")
    found = {}
    for name, length in SIZES.items():
        theirs = torch.ones(length)
        megabytes = length * 4 / 1e6
        for where, mine in (("", torch.ones(length)), (", shared tensor", hvd.shared_empty(length).fill_(1.0))):
            found[name + where] = compare(
                lambda mine=mine, name=name: hvd.allreduce_(mine, op=hvd.Average, name=name),
                lambda theirs=theirs: dist.all_reduce(theirs, op=dist.ReduceOp.SUM),
                turns=15,
                per_turn=max(1, min(100, int(50 / megabytes))),
            )
    dist.destroy_process_group()
    hvd.shutdown()
    return found


def measure() -> Table:
    rows = []
    for num_proc in (2, 4):
        slowest = local.run(worker, num_proc=num_proc, env={"OMP_NUM_THREADS": "1"})[0]
        rows += [row(f"{num_proc} ranks, {name}", times) for name, times in slowest.items()]
    return Table("Allreduce of one tensor, in place, blocking", "raw Gloo (sum, not negotiated)", rows)
