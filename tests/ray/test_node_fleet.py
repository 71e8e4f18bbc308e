"""What an elastic job knows of its nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hvd_cluster.launch.hosts import Host
from hvd_cluster.ray import nodes
from hvd_cluster.ray.actor import ActorCall
from hvd_cluster.ray.node_fleet import NodeFleet
from hvd_cluster.ray.resources import WorkerResources
from hvd_cluster.rendezvous.secret import new_secret


def test_a_node_that_starts_again_at_its_address_is_another_one_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine nodes share their address, so what Ray lists is made up here."""
    first = nodes.Node("a" * 56, "10.0.0.1", "one", {"CPU": 4.0})
    second = dataclasses.replace(first, node_id="b" * 56)
    living = [first]
    monkeypatch.setattr(nodes, "living", lambda: list(living))
    fleet = NodeFleet(new_secret(), WorkerResources(), ActorCall("work", ()), lambda _: None)
    host = Host("10.0.0.1", 4)

    def target() -> Any:
        return fleet._nodes[host.name].options["scheduling_strategy"].node_id

    assert (fleet.add(host), target(), fleet.host_key(host.name)) == ("", first.node_id, first.node_id)
    living[:] = []
    assert fleet.add(host) == "Ray has no such node"
    living[:] = [second]
    assert (fleet.add(host), target(), fleet.host_key(host.name)) == ("", second.node_id, second.node_id)
