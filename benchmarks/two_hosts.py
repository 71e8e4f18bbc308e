"""Two hosts and a link of 1 Gbit/s: ours, whatever transport it picks, against flat Gloo and the link's limit.

The hosts are namespaces of this machine (benchmarks/hosts.py). A link of 10 Gbit/s is bound by the processor here.

A step's limit is the forward pass of the slowest rank, before which nothing can be reduced, then the backward pass or
the transfer, whichever is longer, then the optimizer. With one rank a host each has a core of this machine; with two
they share one, run by turns, and the last of them has its first gradients long after the first.
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time
from typing import Any

from benchmarks.hosts import Hosts, missing
from benchmarks.measure import Table, compare, row, seconds
from benchmarks.report import Report, Reports

RATE_MBIT = 1000.0
SIZES = {"64 KB": 16 << 10, "1 MB": 256 << 10, "16 MB": 4 << 20, "64 MB": 16 << 20}
PROBE_BYTES = 32 << 20


def worker() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import hvd_cluster.torch as hvd

    hvd.init()
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"plain": {}, "bf16": {}}
    for name, length in SIZES.items():
        mine, theirs = torch.ones(length), torch.ones(length)
        per_turn = max(1, min(20, int(8e6 / length)))

        def flat(theirs: torch.Tensor = theirs) -> None:
            dist.all_reduce(theirs)

        def ours(mine: torch.Tensor = mine, name: str = name) -> None:
            hvd.allreduce_(mine, op=hvd.Average, name=name)

        def narrow(mine: torch.Tensor = mine, name: str = name) -> None:
            hvd.allreduce(mine, op=hvd.Average, name=f"{name}.bf16", compression=hvd.Compression.bf16)

        found["plain"][name] = compare(ours, flat, turns=7, per_turn=per_turn)
        found["bf16"][name] = compare(narrow, flat, turns=7, per_turn=per_turn)
    found["goodput"] = goodput(hvd.rank(), hvd.local_size(), hvd.barrier)
    found["steps"] = steps()
    dist.destroy_process_group()
    hvd.shutdown()
    return found


def step_worker() -> dict[str, Any]:
    import hvd_cluster.torch as hvd

    hvd.init()
    found = steps()
    hvd.shutdown()
    return found


def goodput(rank: int, ranks_a_host: int, barrier: Any) -> float:
    """Bytes per second that the first ranks of the two hosts move over plain TCP, both ways at once."""
    port = 29555
    begin_s = end_s = 0.0
    server = socket.create_server(("10.77.0.1", port)) if rank == 0 else None
    barrier()
    if rank in (0, ranks_a_host):
        if server is not None:
            peer, _ = server.accept()
        else:
            peer = socket.create_connection(("10.77.0.1", port))
        data = bytes(PROBE_BYTES)
        begin_s = time.monotonic()
        sender = threading.Thread(target=peer.sendall, args=(data,))
        sender.start()
        left = PROBE_BYTES
        while left:
            left -= len(peer.recv(1 << 20))
        sender.join()
        end_s = time.monotonic()
        peer.close()
    if server is not None:
        server.close()
    barrier()
    return PROBE_BYTES / (end_s - begin_s) if end_s else 0.0


def steps() -> dict[str, Any]:
    """Training steps of a transformer of 10 million parameters: their times, and those of the parts of one alone."""
    import torch

    import hvd_cluster.torch as hvd

    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(320, 8, 1280, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)

    x = torch.randn(4, 64, 320)
    times: dict[str, list[float]] = {}
    models = {name: net() for name in ("alone", "plain", "bf16")}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, model in models.items():
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if name != "alone":
            compression = hvd.Compression.bf16 if name == "bf16" else hvd.Compression.none
            named = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
            optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression)
        optimizers[name] = optimizer
    for turn in range(8):
        for name, model in models.items():
            hvd.barrier()
            start_s = time.perf_counter()
            optimizers[name].zero_grad()
            loss = model(x).square().mean()
            forward_s = time.perf_counter()
            loss.backward()
            backward_s = time.perf_counter()
            optimizers[name].step()
            if turn:
                times.setdefault(name, []).append(time.perf_counter() - start_s)
                if name == "alone":
                    times.setdefault("forward", []).append(forward_s - start_s)
                    times.setdefault("backward", []).append(backward_s - forward_s)
    forwards = hvd.allgather_object(times["forward"])
    return {
        "num_bytes": 4 * sum(parameter.numel() for parameter in models["alone"].parameters()),
        "slowest forward": statistics.median(map(max, zip(*forwards, strict=True))),
        **{name: statistics.median(values) for name, values in times.items()},
    }


def step_rows(ranks_a_host: int, times: dict[str, Any], bytes_per_s: float) -> list[list[str]]:
    """Each step beside the least that it could take."""
    ranks = f"2 x {ranks_a_host}"
    rows = [[ranks, "no communication", seconds(times["alone"]), "", ""]]
    optimizer_s = times["alone"] - times["forward"] - times["backward"]
    for name, on_the_wire, share in (("plain", "float32", 1.0), ("bf16", "bfloat16", 0.5)):
        # Each host sends and receives every gradient once: 2 (h - 1) / h of it, with h = 2 hosts.
        link_s = share * times["num_bytes"] / bytes_per_s
        limit_s = times["slowest forward"] + max(times["backward"], link_s) + optimizer_s
        rows.append([ranks, on_the_wire, seconds(times[name]), seconds(limit_s), f"{times[name] / limit_s:.2f}"])
    return rows


def measure() -> Reports:
    if reason := missing():
        return Reports([Report("Two hosts", ("not measured",), [[reason]])])
    with Hosts(2, rate_mbit=RATE_MBIT) as hosts:
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        found = hosts.run(worker, ranks=[2, 2], env=env)[0]
        alone_on_a_core = hosts.run(step_worker, ranks=[1, 1], env=env)[0]
    what = "Two hosts of two ranks, 1 Gbit/s between them: allreduce"
    bytes_per_s = found["goodput"]
    return Reports(
        [
            Table(what, "flat Gloo", [row(name, times) for name, times in found["plain"].items()]),
            Table(
                f"{what}, bfloat16 on the wire",
                "flat Gloo, float32",
                [row(name, times) for name, times in found["bf16"].items()],
            ),
            Report(
                "Two hosts: a training step of a transformer of 10 million parameters",
                ("hosts x ranks", "on the wire", "step", "limit", "step / limit"),
                [*step_rows(1, alone_on_a_core, bytes_per_s), *step_rows(2, found["steps"], bytes_per_s)],
                [f"Plain TCP moves {bytes_per_s * 8 / 1e6:.0f} Mbit/s each way at once."],
            ),
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(measure().markdown())
