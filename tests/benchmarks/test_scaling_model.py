"""The scaling model where its answer is known, and the networks that it is asked about."""

from __future__ import annotations

import pytest

from benchmarks.networks import inception_v3, resnet101, vgg16
from benchmarks.scaling_model import Cluster, Gathering, Step, fitted, step_of, step_s

AT_ONCE = Gathering(bucket_bytes=1e9, cycle_s=0.0, negotiation_s=0.0)


@pytest.mark.parametrize(
    ("network", "num_parameters", "billions"),
    # As published with torchvision's models; Inception V3 without its auxiliary head (27,161,264 with it).
    [(vgg16, 138_357_544, 15.47), (resnet101, 44_549_160, 7.80), (inception_v3, 23_834_568, 5.71)],
)
def test_the_networks_have_as_many_parameters_and_multiplications_as_published(network, num_parameters, billions):
    layers = network()
    assert sum(layer.num_parameters for layer in layers) == num_parameters
    assert sum(layer.multiplications for layer in layers) / 1e9 == pytest.approx(billions, abs=0.01)


def test_communication_that_costs_nothing_leaves_the_step_as_it_is():
    step = step_of(vgg16(), 154.0, 64)
    assert step.alone_s == pytest.approx(64 / 154)
    assert step_s(step, AT_ONCE, lambda num_bytes: 0.0) == pytest.approx(step.alone_s)


def test_reductions_follow_each_other_and_run_beside_backward():
    step = Step(forward_s=1.0, gradients=[(0.5, 100), (1.0, 100), (2.0, 100)], backward_s=2.0, rest_s=0.25)
    # 0.5..1.1, 1.1..1.7, 2.0..2.6 after the beginning of backward
    assert step_s(step, AT_ONCE, lambda num_bytes: 0.6) == pytest.approx(1.0 + 2.6 + 0.25)
    # Two seconds each: one after the other from 0.5 on.
    assert step_s(step, AT_ONCE, lambda num_bytes: 2.0) == pytest.approx(1.0 + 6.5 + 0.25)
    # Half the bytes on the wire, a second for each hundred.
    assert step_s(step, AT_ONCE, lambda n: n / 100, wire=0.5) == pytest.approx(1.0 + 2.5 + 0.25)


def test_gradients_within_a_cycle_share_a_bucket_as_far_as_it_holds_them():
    step = Step(0.0, [(0.1, 60), (0.2, 60), (0.3, 60), (5.0, 60)], 5.0)
    sizes: list[float] = []

    def cost(num_bytes: float) -> float:
        sizes.append(num_bytes)
        return 0.01

    took_s = step_s(step, Gathering(bucket_bytes=130, cycle_s=0.5, negotiation_s=0.25), cost)
    assert sizes == [120, 60, 60]
    assert took_s == pytest.approx(5.0 + 0.5 + 0.25 + 0.01)
    sizes.clear()
    step_s(step, Gathering(bucket_bytes=200, cycle_s=None, negotiation_s=0.0), cost)
    assert sizes == [180, 60]
    sizes.clear()
    step_s(
        Step(0.0, [(0.1 * n, 60) for n in range(12)], 2.0), Gathering(300, cycle_s=None, first_bytes=60), cost, wire=0.5
    )
    assert sizes == [30, 60, 120, 150]


def test_a_ring_over_servers_is_bound_by_their_link_and_its_hops():
    free = Cluster(128, local_bytes_per_s=1e18, local_hop_s=0.0, hop_s=0.0, link_bytes_per_s=1e9)
    assert free.allreduce_s(1e9) == pytest.approx(2 * 127 / 128)
    slow = Cluster(128, local_bytes_per_s=1e18, local_hop_s=0.0, hop_s=1e-3, link_bytes_per_s=1e18)
    assert slow.allreduce_s(1e9) == pytest.approx(254e-3)
    alone = Cluster(1, local_bytes_per_s=1e9, local_hop_s=0.0)
    assert alone.allreduce_s(1e9) == pytest.approx(1.5)


def test_costs_between_the_measured_sizes_lie_on_straight_lines():
    cost = fitted([(100, 1.0), (200, 2.0), (400, 6.0)])
    assert [cost(n) for n in (50, 100, 150, 300, 600)] == [1.0, 1.0, 1.5, 4.0, 10.0]
