"""Ranks of one host that agree by votes in shared memory, simulated: one thread plays them all, in any order."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hvd_cluster.engine.agreement import Agreement
from hvd_cluster.engine.messages import Bucket, Close, Decision, JoinDone, Refuse
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.request import Key, Kind, Signature, TensorMeta
from hvd_cluster.engine.shared_memory.ballot import Ballot
from hvd_cluster.engine.tree import plan

SUM = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (4,), "cpu"),))
ODD = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (5,), "cpu"),))
JOIN, LEAVE = "join", "leave"
#: What a rank's program is made of: (process set, name, signature), JOIN or LEAVE.
Step = Any


@dataclass
class Submitted:
    key: Key
    signature: Signature
    epoch: int = -1


def fail() -> None:
    raise AssertionError("the lock is free whenever another simulated rank has its turn")


@dataclass
class SimulatedRank:
    rank: int
    agreement: Agreement
    ballot: Ballot
    bell: int
    program: deque[Step]
    sets: dict[int, frozenset[int]]
    pending: dict[Key, Submitted] = field(default_factory=dict)
    has_joined: bool = False
    history: list[Decision] = field(default_factory=list)

    def carry_out(self, decision: Decision) -> None:
        self.history.append(decision)
        if isinstance(decision, Bucket):
            for key, _ in decision.requests:
                is_mine = self.pending.pop(key, None) is not None
                # Otherwise this rank would send zeros for what it has yet to submit.
                assert is_mine or self.has_joined or self.rank not in self.sets[key[0]]
        elif isinstance(decision, Refuse):
            self.pending.pop(decision.key, None)
        elif isinstance(decision, JoinDone):
            self.has_joined = False
        elif isinstance(decision, Close):  # what is left fails, and nothing more can be submitted
            self.pending.clear()
            self.program.clear()
            self.has_joined = False

    def go_on(self, num_steps: int) -> None:
        """Submit what the program says next, as far as it can be submitted now."""
        submitted = []
        while self.program and num_steps and not self.has_joined:
            if self.program[0] == JOIN:
                if submitted:
                    break
                self.program.popleft()
                self.has_joined = True
                self.agreement.join()
                break
            if self.program[0] == LEAVE:
                self.program.popleft()
                self.agreement.leave(self.rank)
                break
            process_set, name, signature = self.program[0]
            if (process_set, name) in self.pending:
                break
            self.program.popleft()
            request = Submitted((process_set, name), signature)
            self.pending[request.key] = request
            submitted.append(request)
            num_steps -= 1
        self.agreement.submit(submitted)
        self.agreement.settle(self.carry_out)


class SimulatedHost:
    """Ranks that share a ballot; reports travel to rank 0 through first-in-first-out queues."""

    def __init__(self, programs: list[list[Step]], sets: dict[int, frozenset[int]], cache_capacity: int) -> None:
        size = len(programs)
        self.sets = {0: frozenset(range(size))} | sets
        self.memory = mmap.mmap(-1, Ballot.num_bytes(size))
        self.links: dict[int, deque[Any]] = {rank: deque() for rank in range(1, size)}
        bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(size)]
        self.ranks = []
        for place in plan(["here"] * size):
            rank = place.rank
            negotiator = Negotiator(place, self.sets, cache_capacity, lambda: 1 << 20)
            ballot = Ballot(
                self.memory,
                0,
                index=rank,
                bells=bells,
                plan=negotiator.plan,
                check=fail,
                timeout_s=20,
                spins=False,
            )
            node = SimulatedRank(rank, None, ballot, bells[rank], deque(programs[rank]), self.sets)  # type: ignore[arg-type]
            node.agreement = Agreement(
                negotiator,
                ballot,
                is_root=rank == 0,
                quorum=lambda process_set: len(self.sets[process_set]),
                pending=node.pending.values,
                send_up=lambda message, rank=rank: self.links[rank].append(message),  # type: ignore[misc]
                send_down=lambda *_: fail(),
            )
            self.ranks.append(node)

    def deliver(self, rank: int) -> None:
        if self.links[rank]:
            self.ranks[0].agreement.hear(rank, self.links[rank].popleft())
            self.ranks[0].agreement.settle(self.ranks[0].carry_out)

    def finish(self) -> None:
        """Fair turns until nothing changes; a lost vote or wake-up leaves something pending."""
        for turn in range(500):
            for node in self.ranks[turn % 2 :]:  # rank 0 pauses every other time
                node.go_on(1 + turn % 3)
            for rank in self.links:
                self.deliver(rank)  # one at a time, so that messages of different ranks mix
            for node in self.ranks:
                # A rank that sleeps here must be woken by its bell if there is something to read.
                if node.ballot.may_sleep() and not node.agreement.is_held_up:
                    continue
                node.agreement.settle(node.carry_out)
            idle = not any(node.program or node.pending or node.has_joined for node in self.ranks)
            if idle and not any(self.links.values()) and not any(node.ballot.has_news for node in self.ranks):
                return
        raise AssertionError(
            f"left: {[(list(node.program)[:2], list(node.pending), node.has_joined) for node in self.ranks]}"
        )

    def close(self) -> None:
        for node in self.ranks:
            node.ballot.release()
            os.close(node.bell)
        self.memory.close()


@contextmanager
def host(programs: list[list[Step]], sets: dict[int, frozenset[int]] | None = None, cache: int = 64) -> Iterator[Any]:
    world = SimulatedHost(programs, sets or {}, cache)
    try:
        yield world
    finally:
        world.close()
