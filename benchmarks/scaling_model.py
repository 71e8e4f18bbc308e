"""How a step scales: a model of backward, buckets and rings, checked on real ranks, then asked about 512 GPUs.

The model is event-driven: it knows when each gradient is ready, how the engine gathers gradients into buckets, and what
one reduction costs. It is checked where all of that can be measured: 2 and 4 ranks on two hosts of this machine with a
slow link between them; it knows nothing of processors, and where four ranks compute on two cores all the time, a real
step takes longer. Then it is given the machines of the Horovod paper (arXiv:1802.05799, section 5): 128 servers of 4
Pascal GPUs, 25 Gbit/s. Nothing is fitted to the paper's figures, which hold more than the model does: input, jitter
between 512 processes, the software of 2017.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import networks
from benchmarks.hosts import Hosts, missing
from benchmarks.measure import seconds
from benchmarks.networks import Layer
from benchmarks.report import Report, Reports
from hvd_cluster.torch.buckets import FIRST_BYTES, MAX_BYTES

MIB = 1 << 20


@dataclass(frozen=True)
class Cluster:
    """Servers of GPUs on a network, and what a hierarchical ring reduction costs there."""

    num_hosts: int
    gpus_per_host: int = 4
    #: What a server sends and, at once, receives: 25 Gbit/s, of which 94% are left for data (measured for TCP here).
    link_bytes_per_s: float = 0.94 * 25e9 / 8
    #: One step of a ring between servers.
    hop_s: float = 10e-6
    #: Between the GPUs of a server: PCIe 3.0 x16, in use both ways at once.
    local_bytes_per_s: float = 10e9
    local_hop_s: float = 5e-6

    def allreduce_s(self, num_bytes: float) -> float:
        """Reduce-scatter in each server, a ring for each part over the servers, all-gather in each server."""
        g, h = self.gpus_per_host, self.num_hosts
        local_s = 2 * (g - 1) * (self.local_hop_s + num_bytes / g / self.local_bytes_per_s)
        # The g rings share the server's link, and each has a g-th of the bytes.
        between_s = 2 * (h - 1) * (self.hop_s + num_bytes / h / self.link_bytes_per_s)
        return local_s + between_s


@dataclass(frozen=True)
class Gathering:
    """How gradients become buckets: what was submitted within a cycle, or full buckets and the rest at the end."""

    #: Most bytes of one bucket.
    bucket_bytes: float = 128 * MIB
    #: Most bytes of the first one; each next one may hold twice as much, up to ``bucket_bytes``. None: all are alike.
    first_bytes: float | None = None
    #: How long the first of a bucket waits for company; None: until the bucket is full or backward is over.
    cycle_s: float | None = 1e-3
    #: From then until all ranks know.
    negotiation_s: float = 0.6e-3

    def most_bytes(self, index: int) -> float:
        """Most bytes of the bucket with this index."""
        growing = self.bucket_bytes if self.first_bytes is None else self.first_bytes * 2.0 ** min(index, 60)
        return min(growing, self.bucket_bytes)


@dataclass(frozen=True)
class Step:
    """A training step without communication."""

    #: Everything before backward.
    forward_s: float
    #: Seconds after the beginning of backward, and bytes, of each gradient, in their order.
    gradients: Sequence[tuple[float, int]]
    backward_s: float
    #: Everything after it.
    rest_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """The whole step of one rank alone."""
        return self.forward_s + self.backward_s + self.rest_s


def step_s(step: Step, gathering: Gathering, allreduce_s: Callable[[float], float], wire: float = 1.0) -> float:
    """Seconds of the step with communication.

    Args:
        step: what one rank does.
        gathering: how its gradients become buckets.
        allreduce_s: seconds that one reduction of that number of bytes takes.
        wire: bytes on the wire for each byte of a gradient; 0.5 for bfloat16.
    """
    order = iter(range(1 << 30))
    events: list[tuple[float, int, str, float]] = [
        (ready_s, next(order), "gradient", num_bytes * wire) for ready_s, num_bytes in step.gradients
    ]
    heapq.heapify(events)
    num_left = len(events)
    gathered: list[float] = []
    num_full = 0
    queue: list[float] = []
    is_busy, end_s = False, step.backward_s
    while events:
        now_s, _, kind, num_bytes = heapq.heappop(events)
        if kind == "gradient":
            num_left -= 1
            if gathering.cycle_s is not None:
                if not gathered:
                    heapq.heappush(events, (now_s + gathering.cycle_s, next(order), "cycle", 0.0))
                gathered.append(num_bytes)
            else:
                # Buckets are dealt by what gradients take in memory, whatever they take on the wire.
                if gathered and sum(gathered) + num_bytes > gathering.most_bytes(num_full) * wire:
                    heapq.heappush(events, (now_s, next(order), "bucket", sum(gathered)))
                    gathered = []
                    num_full += 1
                gathered.append(num_bytes)
                if num_left == 0:
                    heapq.heappush(events, (now_s, next(order), "bucket", sum(gathered)))
        elif kind == "cycle":
            for bucket in _buckets(gathered, gathering.bucket_bytes):
                heapq.heappush(events, (now_s, next(order), "bucket", bucket))
            gathered = []
        elif kind == "bucket":
            heapq.heappush(events, (now_s + gathering.negotiation_s, next(order), "decided", num_bytes))
        elif kind == "decided":
            queue.append(num_bytes)
        else:
            is_busy = False
        if queue and not is_busy:
            is_busy = True
            heapq.heappush(events, (now_s + allreduce_s(queue.pop(0)), next(order), "done", 0.0))
        if kind == "done":
            end_s = max(end_s, now_s)
    return step.forward_s + end_s + step.rest_s


def _buckets(gathered: Sequence[float], most_bytes: float) -> list[float]:
    buckets: list[float] = []
    for num_bytes in gathered:
        if buckets and buckets[-1] + num_bytes <= most_bytes:
            buckets[-1] += num_bytes
        else:
            buckets.append(num_bytes)
    return buckets


# ---- the networks of the paper --------------------------------------------------------------------------------------


def step_of(layers: Sequence[Layer], images_per_s: float, batch: int) -> Step:
    """A step of a network on one GPU: backward takes two thirds, dealt to the layers by their multiplications."""
    alone_s = batch / images_per_s
    backward_s = alone_s * 2 / 3
    total = sum(layer.multiplications for layer in layers)
    done, gradients = 0, []
    for layer in reversed(layers):
        done += layer.multiplications
        gradients += [(backward_s * done / total, 4 * elements) for elements in layer.tensors]
    return Step(alone_s - backward_s, gradients, backward_s)


#: Layers, images per second of one P100 at batch 64, the paper's efficiency on 512. The throughputs are TensorFlow's
#: published ones of May 2017 (tensorflow.org/performance/benchmarks, DGX-1, synthetic data). ResNet-101 is not among
#: them: its time lies midway between those of ResNet-50 (219) and ResNet-152 (91.8), as do its multiplications.
PAPER = {
    "Inception V3": (networks.inception_v3, 142.0, 0.90),
    "ResNet-101": (networks.resnet101, 2 / (1 / 219 + 1 / 91.8), 0.90),
    "VGG-16": (networks.vgg16, 154.0, 0.68),
}
BATCH = 64
#: As DistributedOptimizer does (hvd_cluster/torch/buckets.py).
BUCKETS = Gathering(bucket_bytes=MAX_BYTES, cycle_s=None, first_bytes=FIRST_BYTES)


def predictions() -> Report:
    """The efficiency on 512 GPUs."""
    cluster = Cluster(num_hosts=128)
    rows = []
    for name, (layers, images_per_s, paper) in PAPER.items():
        step = step_of(layers(), images_per_s, BATCH)
        cells = [name, f"{sum(size for _, size in step.gradients) / 1e6:.0f} MB", seconds(step.alone_s), f"{paper:.0%}"]
        cells += [
            f"{step.alone_s / step_s(step, gathering, cluster.allreduce_s, wire):.0%}"
            for gathering in (Gathering(64 * MIB, cycle_s=5e-3), BUCKETS)
            for wire in (1.0, 0.5)
        ]
        rows.append(cells)
    return Report(
        "Scaling: 512 GPUs, 4 a server, 25 Gbit/s between servers",
        (
            *("network", "gradients", "step alone", "Horovod paper"),
            *("model, cycles of 5 ms", "bf16 on the wire", "model, buckets of 1 to 25 MiB", "bf16 on the wire"),
        ),
        rows,
    )


def sensitivity() -> Report:
    """What the answer depends on: the bucket's size and the time of one hop."""
    rows = []
    for name, (layers, images_per_s, _) in PAPER.items():
        step = step_of(layers(), images_per_s, BATCH)
        for hop_s in (5e-6, 10e-6, 25e-6):
            cluster = Cluster(num_hosts=128, hop_s=hop_s)
            cells = [name, seconds(hop_s)]
            for size in (1, 5, 25, 50, 100):
                took_s = step_s(step, Gathering(size * MIB, cycle_s=None), cluster.allreduce_s)
                cells.append(f"{step.alone_s / took_s:.0%}")
            rows.append(cells)
    return Report(
        "Scaling: efficiency on 512 GPUs by the size of a bucket and the time of a hop",
        ("network", "hop", *(f"{size} MiB" for size in (1, 5, 25, 50, 100))),
        rows,
    )


# ---- the check on real ranks ----------------------------------------------------------------------------------------

#: Model, ranks on each host, Mbit/s between the hosts.
CHECKED = [
    ("MLP", [1, 1], 1000.0),
    ("MLP", [2, 2], 300.0),
    ("transformer", [1, 1], 300.0),
    ("transformer", [2, 2], 1000.0),
]


def worker(name: str) -> dict[str, Any]:
    """Measures a step alone, reductions alone, and both together."""
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    if name == "MLP":
        model: torch.nn.Module = torch.nn.Sequential(
            *(torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU()),
            torch.nn.Linear(2048, 10),
        )
        x = torch.randn(256, 784)
    else:
        layer = torch.nn.TransformerEncoderLayer(320, 8, 1280, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        x = torch.randn(4, 64, 320)
    found: dict[str, Any] = {"step": _alone(model, x, hvd.barrier), "costs": [], "together": []}
    for length in (1 << 10, 1 << 18, 1 << 20, 4 << 20):
        tensor = torch.ones(length)
        times = []
        for _ in range(6):
            hvd.barrier()
            begin_s = time.perf_counter()
            hvd.allreduce_(tensor, name=f"cost.{length}")
            times.append(time.perf_counter() - begin_s)
        found["costs"].append((4 * length, statistics.median(times[1:])))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    for _ in range(8):
        hvd.barrier()
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        found["together"].append(time.perf_counter() - begin_s)
    hvd.shutdown()
    found["together"] = statistics.median(found["together"][2:])
    return found


def _alone(model: Any, x: Any, barrier: Callable[[], Any]) -> Step:
    """The step without communication, all ranks at once; medians over its repetitions."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parameters = list(model.parameters())
    ready: dict[int, list[float]] = {index: [] for index in range(len(parameters))}
    begin_s = 0.0
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: ready[index].append(time.perf_counter() - begin_s)
        )
        for index, parameter in enumerate(parameters)
    ]
    times: list[tuple[float, float, float]] = []
    for _ in range(10):
        barrier()
        start_s = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        begin_s = time.perf_counter()
        loss.backward()
        over_s = time.perf_counter()
        optimizer.step()
        times.append((begin_s - start_s, over_s - begin_s, time.perf_counter() - over_s))
    for hook in hooks:
        hook.remove()
    forward, backward, rest = (statistics.median(column[2:]) for column in zip(*times, strict=True))
    gradients = [(statistics.median(ready[i][2:]), 4 * p.numel()) for i, p in enumerate(parameters)]
    return Step(forward, sorted(gradients), backward, rest)


def fitted(costs: Sequence[tuple[int, float]]) -> Callable[[float], float]:
    """Seconds of a reduction, by straight lines between those that were measured."""

    def cost(num_bytes: float) -> float:
        for (low, low_s), (high, high_s) in itertools.pairwise(costs):
            if num_bytes <= high or high == costs[-1][0]:
                return low_s + (high_s - low_s) * (max(num_bytes, costs[0][0]) - low) / (high - low)
        raise AssertionError("at least two costs are measured")

    return cost


def check() -> Report:
    """The model beside real ranks on two hosts with a slow link between them."""
    rows = []
    for name, ranks, rate_mbit in CHECKED:
        with Hosts(2, rate_mbit=rate_mbit) as hosts:
            found = hosts.run(worker, (name,), ranks=ranks, env={"OMP_NUM_THREADS": "1"})
        together_s = max(result["together"] for result in found)
        # All ranks wait for the slowest at each gradient.
        slowest = max((result["step"] for result in found), key=lambda step: step.alone_s)
        cost = fitted(found[0]["costs"])
        predicted_s = step_s(slowest, replace(BUCKETS, negotiation_s=cost(4096.0)), cost)
        rows.append(
            [
                f"{name}, {sum(ranks)} ranks, {rate_mbit:.0f} Mbit/s",
                seconds(slowest.alone_s),
                seconds(together_s),
                seconds(predicted_s),
                f"{predicted_s / together_s - 1:+.0%}",
            ]
        )
    return Report(
        "Scaling: the model beside real ranks on two hosts",
        ("", "step alone", "step, measured", "step, model", "error"),
        rows,
    )


def measure() -> Reports:
    if reason := missing():
        checked = Report("Scaling: the model beside real ranks", ("not measured",), [[reason]])
    else:
        checked = check()
    return Reports([checked, predictions(), sensitivity()])


if __name__ == "__main__":
    sys.stdout.write(measure().markdown())
