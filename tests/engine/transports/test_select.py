"""Which transport serves a process set, on real ranks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_cluster.engine.transports.alone import AloneTransport
from hvd_cluster.engine.transports.select import TransportTable
from hvd_cluster.launch import local


def job(limit_rank: int | None) -> tuple[str, float, int]:
    import resource

    import hvd_cluster.torch as hvd
    from hvd_cluster.engine import basics
    from hvd_cluster.topology import Topology

    if Topology.from_env().rank == limit_rank:
        # A memfd is a file: with this limit the segment cannot be allocated.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    hvd.init()
    name = basics.engine().transport_name(0, torch.device("cpu"))
    total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item()
    hvd.shutdown()
    segments = Path("/proc/self/maps").read_text().count("memfd:hvd_cluster")
    return name, total, segments


def run(num_proc: int, *args: Any, env: dict[str, str] | None = None) -> tuple[list[Any], str]:
    errors = io.StringIO()
    results = local.run(job, args, num_proc=num_proc, env={"OMP_NUM_THREADS": "1", **(env or {})}, stderr=errors)
    return results, errors.getvalue()


def test_ranks_of_one_host_share_memory_and_release_it() -> None:
    results, errors = run(3, None)
    assert results == [("SHM", 3.0, 0)] * 3
    assert errors == ""


@pytest.mark.slow
def test_it_can_be_switched_off() -> None:
    results, _ = run(2, None, env={"HOROVOD_SHARED_MEMORY": "0"})
    assert results == [("GLOO", 2.0, 0)] * 2


@pytest.mark.slow
def test_without_memory_to_share_gloo_serves_with_one_line_that_says_why() -> None:
    results, errors = run(2, 0, env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "3"})
    assert results == [("GLOO", 2.0, 0)] * 2
    assert errors.count("cannot share memory and use Gloo") == 1
    assert "rank 0: [Errno 27] File too large" in errors


def test_the_zeros_of_a_joined_rank_go_to_the_gpu_of_its_transport() -> None:
    settings: Any = None
    table = TransportTable(settings, settings, {}, lambda *_: None, None, -1)
    assert table.gpu(0, 5) == 5  # no operation on a GPU so far: the one that join() was given
    table._transports[0, "cuda"] = AloneTransport(torch.device("cuda", 3), 0)
    table._transports[1, "cuda"] = AloneTransport(torch.device("cpu"), 0)  # ranks that share a GPU
    assert [table.gpu(0, 5), table.gpu(1, 5)] == [3, 5]
