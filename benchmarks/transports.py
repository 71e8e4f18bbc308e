"""Where each transport stops being the best: one tensor, 1 KB to 64 MB, by each transport that could carry it.

On one host that is shared memory or Gloo; between two hosts of two ranks it is the flat ring of Gloo, or shared memory
inside each host and Gloo between them, on a link of 1 Gbit/s. The defaults follow from it: shared memory wherever a
host is shared, at every size; and the hierarchy from 1 MB on (``engine/transports/hierarchical.py``).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.hosts import Hosts, missing
from benchmarks.measure import seconds
from benchmarks.report import Report, Reports
from hvd_cluster.launch import local

SIZES = {"1 KB": 1 << 8, "16 KB": 1 << 12, "128 KB": 1 << 15, "512 KB": 1 << 17, "1 MB": 1 << 18, "4 MB": 1 << 20}
SIZES |= {"16 MB": 1 << 22, "64 MB": 1 << 24}
TURNS = 5


def worker(contenders: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, list[float]]]:
    import torch

    import hvd_cluster.torch as hvd

    tensors = {name: torch.ones(length) for name, length in SIZES.items()}
    times: dict[str, dict[str, list[float]]] = {label: {name: [] for name in SIZES} for label in contenders}
    for _ in range(TURNS):
        for label, variables in contenders.items():
            os.environ.update(variables)
            hvd.init()
            for name, tensor in tensors.items():
                per_turn = max(1, min(50, int(4e6 / tensor.nbytes)))
                for _ in range(2):
                    hvd.allreduce_(tensor, op=hvd.Average, name=name)
                start_s = time.perf_counter()
                for _ in range(per_turn):
                    hvd.allreduce_(tensor, op=hvd.Average, name=name)
                times[label][name].append((time.perf_counter() - start_s) / per_turn)
            hvd.shutdown()
    return times


def report(title: str, times: dict[str, dict[str, list[float]]]) -> Report:
    """A row for each size, the best transport of each in bold."""
    rows = []
    for name in SIZES:
        medians = {label: statistics.median(found[name]) for label, found in times.items()}
        best = min(medians, key=lambda label: medians[label])
        cells = [f"**{seconds(value)}**" if label == best else seconds(value) for label, value in medians.items()]
        rows.append([name, *cells])
    return Report(title, ("size", *times), rows)


def measure() -> Reports:
    env: dict[str, Any] = {"OMP_NUM_THREADS": "1"}
    local_ones = {"shared memory": {"HOROVOD_SHARED_MEMORY": "1"}, "Gloo": {"HOROVOD_SHARED_MEMORY": "0"}}
    found = [
        report(f"Transports: {count} ranks on one host", local.run(worker, (local_ones,), num_proc=count, env=env)[0])
        for count in (2, 4)
    ]
    title = "Transports: two hosts of two ranks, 1 Gbit/s between them"
    if reason := missing():
        found.append(Report(title, ("not measured",), [[reason]]))
    else:
        switch = "HOROVOD_HIERARCHICAL_ALLREDUCE"
        kinds = {"flat ring of Gloo": {switch: "0"}, "shared memory within hosts": {switch: "1"}}
        with Hosts(2, rate_mbit=1000.0) as hosts:
            times = hosts.run(worker, (kinds,), ranks=[2, 2], env={**env, "GLOO_SOCKET_IFNAME": "eth0"})[0]
        found.append(report(title, times))
    return Reports(found)
