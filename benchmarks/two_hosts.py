"""2 hosts x 2 ranks over a link of 1 Gbit/s: ours, whatever transport it picks, against flat Gloo and the link's limit.

The hosts are namespaces of this machine (benchmarks/hosts.py). A link of 10 Gbit/s is bound by the processor here.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts, missing
from benchmarks.measure import Table, compare, row, seconds
from benchmarks.report import Report, Reports

RATE_MBIT = 1000.0
RANKS = [2, 2]
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
    found["goodput"] = goodput(hvd.rank(), hvd.barrier)
    found["steps"] = steps()
    dist.destroy_process_group()
    hvd.shutdown()
    return found


def goodput(rank: int, barrier: Any) -> float:
    """Bytes per second that the first ranks of the two hosts move over plain TCP, both ways at once."""
    port = 29555
    begin_s = end_s = 0.0
    server = socket.create_server(("10.77.0.1", port)) if rank == 0 else None
    barrier()
    if rank in (0, RANKS[0]):
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
    """Training steps of a transformer of 10 million parameters: times, and what bounds them."""
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
    num_elements = sum(parameter.numel() for parameter in models["alone"].parameters())
    gradients = torch.ones(num_elements)
    busy: dict[str, list[float]] = {"alone": [], "transfer": []}
    for turn in range(8):
        hvd.barrier()
        before_s = busy_s()
        hvd.allreduce_(gradients, name="transfer")
        hvd.barrier()
        if turn:
            busy["transfer"].append(busy_s() - before_s)
        for name, model in models.items():
            hvd.barrier()
            before_s = busy_s()
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
                    hvd.barrier()
                    busy[name].append(busy_s() - before_s)
                    times.setdefault("forward", []).append(forward_s - start_s)
                    times.setdefault("backward", []).append(backward_s - forward_s)
    return {
        "num_bytes": num_elements * 4,
        "busy": {name: statistics.mean(values) for name, values in busy.items()},
        **{name: statistics.median(values) for name, values in times.items()},
    }


def busy_s() -> float:
    """Seconds that the cores of this machine have worked since it started, all together."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def step_report(found: dict[str, Any], bytes_per_s: float) -> Report:
    """Each step beside the least that it could take.

    The link's limit is what cannot overlap, and the longer of backward and transfer. The processors' share is what the
    step without communication and our transfer without a step keep the cores busy for, divided by their number.
    """
    times = found["steps"]
    busy = times["busy"]
    rest_s = times["alone"] - times["backward"]
    rows = [["no communication", seconds(times["alone"]), "", ""]]
    for name, share in (("plain", 1.0), ("bf16", 0.5)):
        # Each host sends and receives every gradient once: 2 (h - 1) / h of it, with h = 2 hosts.
        link_s = share * times["num_bytes"] / bytes_per_s
        limit_s = rest_s + max(times["backward"], link_s)
        label = "float32 on the wire" if name == "plain" else "bfloat16 on the wire"
        rows.append([label, seconds(times[name]), seconds(limit_s), f"{times[name] / limit_s:.2f}"])
    num_cores = os.cpu_count() or 1
    cores_s = (busy["alone"] + busy["transfer"]) / num_cores
    return Report(
        "Two hosts: a training step of a transformer of 10 million parameters",
        ("", "step", "the link's limit", "step / limit"),
        rows,
        [
            (
                f"Plain TCP moves {bytes_per_s * 8 / 1e6:.0f} Mbit/s each way at once. The limit is the "
                "step without communication, with its backward pass replaced by the transfer where that takes longer."
            ),
            (
                f"But four ranks share {num_cores} cores. Such a step keeps them busy for {busy['alone']:.2f} s, our "
                f"transfer of its gradients, alone and in float32, for {busy['transfer']:.2f} s. Divided by the cores "
                f"that is {seconds(cores_s)}: the step in float32 takes {times['plain'] / cores_s:.2f} times as long."
            ),
        ],
    )


def measure() -> Reports:
    if reason := missing():
        return Reports([Report("Two hosts", ("not measured",), [[reason]])])
    with Hosts(2, rate_mbit=RATE_MBIT) as hosts:
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        found = hosts.run(worker, ranks=RANKS, env=env)[0]
    what = "Two hosts of two ranks, 1 Gbit/s between them: allreduce"
    return Reports(
        [
            Table(what, "flat Gloo", [row(name, times) for name, times in found["plain"].items()]),
            Table(
                f"{what}, bfloat16 on the wire",
                "flat Gloo, float32",
                [row(name, times) for name, times in found["bf16"].items()],
            ),
            step_report(found, found["goodput"]),
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(measure().markdown())
