"""Random operations of every kind on overlapping process sets, each with what it must give."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from pathlib import Path
from typing import Any

import torch

PER_ROUND = 500
#: Overlapping, and none of them everybody.
SETS = ([0, 1], [1, 2, 3], [0, 3])
DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16)


class Op:
    """One operation, drawn from random numbers that all ranks share, and what it must give."""

    def __init__(self, choose: random.Random, number: int) -> None:
        self.name = f"op.{number % (3 * PER_ROUND)}"  # most names come again, with another operation
        self.set = choose.randrange(-1, len(SETS))
        self.members = list(range(4)) if self.set < 0 else SETS[self.set]
        self.kind = choose.choice(
            ["sum", "sum", "sum", "average", "min", "max", "group", "gather", "broadcast", "alltoall", "scatter"]
        )
        self.dtype = choose.choice(DTYPES)
        self.second_dtype = choose.choice(DTYPES)
        #: Some groups are so long that they travel in another way than the rest.
        self.second_length = choose.choice([5] * 49 + [300_000])
        self.length = choose.choice([0, 1, 2, 3, 8, 33])
        self.base = choose.randrange(20)
        self.root = choose.choice(self.members)
        self.rows = {rank: choose.randrange(3) for rank in self.members}
        self.name += f".{self.kind}.{self.set}"

    def sent(self, rank: int, length: int | None = None) -> torch.Tensor:
        """Small whole numbers, so that every type holds every sum exactly."""
        length = self.length if length is None else length
        return (torch.arange(length) % 4 + self.base + rank).to(self.dtype)

    def sent_beside(self, rank: int) -> torch.Tensor:
        """The second tensor of a group."""
        return self.sent(rank, self.second_length).to(self.second_dtype)

    def submit(self, hvd: Any, rank: int, process_sets: list[Any]) -> Any:
        """Hand it in; returns the handle."""
        common = {"name": self.name, "process_set": process_sets[self.set] if self.set >= 0 else hvd.global_process_set}
        tensor = self.sent(rank)
        if self.kind in ("sum", "average", "min", "max"):
            op = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}[self.kind]
            return hvd.allreduce_async(tensor, op=op, **common)
        if self.kind == "group":
            return hvd.grouped_allreduce_async([tensor, self.sent_beside(rank)], op=hvd.Sum, **common)
        if self.kind == "gather":
            return hvd.allgather_async(self.sent(rank, self.rows[rank]), **common)
        if self.kind == "broadcast":
            return hvd.broadcast_async(tensor, self.root, **common)
        if self.kind == "alltoall":
            splits = torch.tensor([self.rows[rank]] * len(self.members), dtype=torch.int32)
            return hvd.alltoall_async(self.sent(rank, int(splits.sum())), splits, **common)
        return hvd.reducescatter_async(self.sent(rank, 2 * len(self.members)), op=hvd.Sum, **common)

    def check(self, rank: int, result: Any) -> None:
        """Compare the result with what follows from everybody's tensors."""
        everybody = [self.sent(member) for member in self.members]
        if self.kind in ("sum", "average", "min", "max"):
            stacked = torch.stack(everybody).to(torch.float64)
            expected = {
                "sum": stacked.sum(0),
                "average": stacked.mean(0),
                "min": stacked.amin(0) if self.length else stacked[0],
                "max": stacked.amax(0) if self.length else stacked[0],
            }[self.kind]
            if self.kind == "average" and len(self.members) == 3 and self.dtype.is_floating_point:
                assert torch.allclose(result.to(torch.float64), expected, rtol=1e-2), self.name
                return
            expected = expected.trunc() if not self.dtype.is_floating_point else expected
        elif self.kind == "group":
            first, second = result
            assert first.dtype == self.dtype, self.name
            assert torch.equal(first, sum(everybody)), self.name
            result, expected = second, sum(self.sent_beside(member) for member in self.members)
        elif self.kind == "gather":
            expected = torch.cat([self.sent(member, self.rows[member]) for member in self.members])
        elif self.kind == "broadcast":
            expected = self.sent(self.root)
        elif self.kind == "alltoall":
            result, received = result
            assert received.tolist() == [self.rows[member] for member in self.members], self.name
            mine = self.members.index(rank)
            # A sender's tensor is cut into equal pieces, one for each member.
            pieces = [self.sent(m, self.rows[m] * len(self.members)).view(len(self.members), -1) for m in self.members]
            expected = torch.cat([piece[mine] for piece in pieces])
        else:
            mine = self.members.index(rank)
            expected = sum(self.sent(m, 2 * len(self.members)) for m in self.members)[2 * mine : 2 * mine + 2]
        dtype = self.second_dtype if self.kind == "group" else self.dtype
        assert result.dtype == dtype, self.name
        assert torch.equal(result, expected.to(dtype)), (self.name, result, expected)


def used() -> tuple[int, int, float]:
    """Threads, descriptors and resident MiB of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), pages * 4096 / 2**20


def soak(num_ops: int) -> tuple[int, float]:
    """Rounds of operations, each rank submitting and awaiting them in an order of its own.

    Returns how many there were, and by how many MiB this process has grown after the first tenth of them.
    """
    import hvd_cluster.torch as hvd

    process_sets = [hvd.ProcessSet(ranks) for ranks in SETS]
    hvd.init(process_sets=process_sets)
    rank = hvd.rank()
    shared, own = random.Random(1), random.Random(100 + rank)
    done, before = 0, 0.0
    for begin in range(0, num_ops, PER_ROUND):
        if done <= num_ops // 10:
            before = used()[2]
        ops = [Op(shared, number) for number in range(begin, begin + PER_ROUND)]
        mine = [op for op in ops if rank in op.members]
        own.shuffle(mine)
        handles = [(op, op.submit(hvd, rank, process_sets)) for op in mine]
        own.shuffle(handles)
        for op, handle in handles:
            op.check(rank, hvd.synchronize(handle))
        done += len(ops)
    grown = used()[2] - before
    hvd.barrier()
    hvd.shutdown()
    return done, grown
