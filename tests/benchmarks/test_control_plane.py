"""The simulated control plane: every rank reads every decision, and no rank is flooded."""

from __future__ import annotations

import math

import pytest

from benchmarks.control_plane import HOP_S, Costs, Simulation, simulate
from hvd_cluster.engine import tree
from hvd_cluster.engine.signature import Kind, Signature, TensorMeta

SIGNATURE = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (4,), "cpu"),))


@pytest.mark.long
@pytest.mark.parametrize("num_hosts", [1, 9, 64, 300])
def test_the_time_on_the_network_is_that_of_the_hops_and_the_bytes(num_hosts: int) -> None:
    simulation = Simulation(list(range(num_hosts)), Costs(0.0, 0.0), counts_cpu=False)
    depth = 0
    while sum(tree.FANOUT**level for level in range(depth + 1)) < num_hosts:
        depth += 1
    for _ in range(2):
        cycle_s = simulation.cycle([("allreduce.x", SIGNATURE)])
        assert 2 * depth * HOP_S <= cycle_s < 2 * depth * (HOP_S + 10e-6) + 1e-9


@pytest.mark.long
def test_512_ranks_agree_within_a_millisecond_of_network_and_logarithmic_messages() -> None:
    result = simulate([rank // 8 for rank in range(512)], 1, Costs(0.0, 0.0))
    assert result.network_s <= 1e-3
    assert result.most_messages <= 4 * math.log2(512)
    assert result.mean_messages <= 0.25  # the leaders alone speak: one rank of eight, up and down
    assert result.max_bytes < 10_000
    assert result.cpu_s > result.network_s


@pytest.mark.long
def test_without_shared_memory_every_rank_reports_to_its_leader() -> None:
    result = simulate([rank // 8 for rank in range(64)], 1, Costs(0.0, 0.0), votes=False)
    assert 1.9 < result.mean_messages <= 2.0
