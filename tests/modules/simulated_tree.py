"""Ranks that negotiate over a tree of hosts, simulated: which link delivers next is up to the caller."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hvd_cluster.engine.messages import Bucket, Decision
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.signature import Key, Kind, Signature, TensorMeta
from hvd_cluster.engine.tree import tree_positions

SUM = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (4,), "cpu"),))
GATHER = Signature(Kind.ALLGATHER, (TensorMeta("float32", (-1,), "cpu"),))


@dataclass
class SimulatedRank:
    negotiator: Negotiator
    parent: int | None
    children: list[int]
    history: list[Decision] = field(default_factory=list)


class SimulatedWorld:
    """Ranks joined by first-in-first-out links; which link delivers next is up to the caller's random numbers."""

    def __init__(
        self, hosts: list[str], process_sets: dict[int, frozenset[int]] | None = None, cache_capacity: int = 1024
    ) -> None:
        everybody = {0: frozenset(range(len(hosts)))}
        self.process_sets = everybody | (process_sets or {})
        self.ranks = [
            SimulatedRank(
                Negotiator(position, self.process_sets, cache_capacity, lambda: 1 << 20),
                position.parent,
                list(position.children),
            )
            for position in tree_positions(hosts)
        ]
        self.links: dict[tuple[int, int], deque[Any]] = {}

    def submit(self, rank: int, name: str, signature: Signature = SUM, process_set: int = 0) -> None:
        self.ranks[rank].negotiator.submit((process_set, name), signature)
        self.settle(rank)

    def join(self, rank: int) -> None:
        self.ranks[rank].negotiator.join()
        self.settle(rank)

    def settle(self, rank: int) -> None:
        node = self.ranks[rank]
        if node.parent is None:
            while entries := node.negotiator.take_log():
                self.apply(rank, entries)
        else:
            message = node.negotiator.take_reports()
            if message is not None:
                self.links.setdefault((rank, node.parent), deque()).append(message)

    def apply(self, rank: int, entries: Any) -> None:
        node = self.ranks[rank]
        for child in node.children:
            self.links.setdefault((rank, child), deque()).append(entries)
        node.history += node.negotiator.apply(entries)

    def deliver_one(self, choose: random.Random) -> bool:
        loaded = sorted(link for link, queue in self.links.items() if queue)
        if not loaded:
            return False
        self.deliver(choose.choice(loaded))
        return True

    def deliver(self, link: tuple[int, int]) -> None:
        source, target = link
        message = self.links[link].popleft()
        if source == self.ranks[target].parent:
            self.apply(target, message)
        else:
            self.ranks[target].negotiator.receive(source, message)
        self.settle(target)

    def run(self, seed: int = 0) -> None:
        choose = random.Random(seed)
        for _ in range(1_000_000):
            if not self.deliver_one(choose):
                return
        raise AssertionError("the messages never end")


def decided(history: list[Decision]) -> list[Key]:
    return [key for decision in history if isinstance(decision, Bucket) for key, _ in decision.requests]


def all_histories_are_equal(world: SimulatedWorld) -> None:
    first, *others = [node.history for node in world.ranks]
    for other in others:
        assert other == first
