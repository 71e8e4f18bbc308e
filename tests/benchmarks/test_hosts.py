"""Hosts made of namespaces: they share no memory, and the link between them is as slow as it says."""

from __future__ import annotations

import time

import pytest

from benchmarks.hosts import Hosts, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing"),
]


def where(num_bytes: int) -> tuple[str, str, list[int], float, float]:
    import socket
    from pathlib import Path

    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    mark = Path("/dev/shm", f"mark-of-{hvd.rank()}")
    mark.write_text("")
    hvd.barrier()
    seen = sorted(int(path.name.removeprefix("mark-of-")) for path in Path("/dev/shm").glob("mark-of-*"))
    tensor = torch.ones(num_bytes // 4)
    hvd.allreduce_(tensor, op=hvd.Sum, name="warm")
    begin_s = time.monotonic()
    hvd.allreduce_(tensor, op=hvd.Sum, name="timed")
    took_s = time.monotonic() - begin_s
    place = f"{hvd.local_rank()} of {hvd.local_size()}, {hvd.cross_rank()} of {hvd.cross_size()}"
    hvd.shutdown()
    return socket.gethostname(), place, seen, tensor[0].item(), took_s


def test_ranks_on_two_hosts_form_one_world_over_a_slow_link() -> None:
    num_bytes = 4 << 20
    with Hosts(2, rate_mbit=200) as hosts:
        found = hosts.run(where, (num_bytes,), ranks=[2, 1], env={"OMP_NUM_THREADS": "1"})
        assert "eth0" in hosts.shell(1, "ip -br link")
        python = hosts.shell(0, f"{hosts.python(1)} -c 'import socket; print(socket.gethostname())'")
        assert python.strip() == "host1"
    assert [name for name, *_ in found] == ["host0", "host0", "host1"]
    assert [place for _, place, *_ in found] == ["0 of 2, 0 of 2", "1 of 2, 0 of 1", "0 of 1, 1 of 2"]
    assert [seen for _, _, seen, *_ in found] == [[0, 1], [0, 1], [2]]
    assert {total for _, _, _, total, _ in found} == {9.0}
    # Each host has to send and to receive at least the tensor once; the bucket of tbf lets 64 KiB through at once.
    assert all(took_s > 0.8 * num_bytes * 8 / 200e6 for *_, took_s in found)


def test_without_a_limit_the_link_is_fast() -> None:
    num_bytes = 4 << 20
    with Hosts(2, rate_mbit=None) as hosts:
        found = hosts.run(where, (num_bytes,), ranks=[1, 1], env={"OMP_NUM_THREADS": "1"})
    assert all(took_s < 0.5 * num_bytes * 8 / 200e6 for *_, took_s in found)
