"""Agreement by votes in shared memory, on simulated ranks: any interleaving decides everything, alike on all ranks."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_cluster.engine.agreement import Agreement
from hvd_cluster.engine.messages import Bucket, Close, Decision, JoinDone, Refuse
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.request import Key, Kind, Signature, TensorMeta
from hvd_cluster.engine.shared_memory import ballot as ballot_module
from hvd_cluster.engine.shared_memory.ballot import Ballot
from hvd_cluster.engine.tree import plan

SUM = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (4,), "cpu"),))
ODD = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (5,), "cpu"),))
JOIN = "join"
#: What a rank's program is made of: (process set, name, signature), or JOIN.
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
            ballot = Ballot(self.memory, 0, index=rank, bells=bells, plan=negotiator.plan, check=fail, spins=False)
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


def all_histories_are_equal(world: SimulatedHost) -> None:
    first, *others = [node.history for node in world.ranks]
    for other in others:
        assert other == first


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is full again and again."""
    monkeypatch.setattr(ballot_module, "_RING_BYTES", 2048)
    monkeypatch.setattr(ballot_module, "_MOST_BYTES", 256)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[Step]], dict[int, frozenset[int]], int]:
    size = draw(st.integers(2, 4))
    sets = {1: frozenset({0, 1}), 2: frozenset({size - 1, 1})} if size > 2 else {}
    names = [(process_set, f"t{i}") for process_set in (0, *sets) for i in range(draw(st.integers(1, 3)))]
    rounds = draw(st.integers(1, 4))
    joins_after = draw(st.lists(st.integers(1, rounds), min_size=size, max_size=size)) if draw(st.booleans()) else None
    programs: list[list[Step]] = [[] for _ in range(size)]
    members = {0: frozenset(range(size))} | sets
    for phase in range(2):
        for number in range(rounds):
            # Now and then everybody changes a shape, or one rank alone does.
            changed = {name: draw(st.sampled_from(["same"] * 4 + ["all", "one"])) for name in names}
            for rank in range(size):
                if phase == 0 and joins_after and number >= joins_after[rank]:
                    continue
                for process_set, name in draw(st.permutations(names)):
                    if rank not in members[process_set]:
                        continue
                    how = changed[process_set, name]
                    is_odd = how == "all" or (how == "one" and rank == 1)
                    programs[rank].append((process_set, name, ODD if is_odd else SUM))
        if phase == 0 and joins_after:
            for program in programs:
                program.append(JOIN)
    return programs, sets, draw(st.sampled_from([1, 2, 64]))


@given(worlds(), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=120))
@settings(max_examples=600, deadline=None)
def test_any_interleaving_decides_everything_in_one_order(world: Any, turns: list[tuple[int, int]]) -> None:
    programs, sets, cache = world
    with host(programs, sets, cache) as simulated:
        for choice, count in turns:
            if choice < len(programs):
                simulated.ranks[choice].go_on(count)
            else:
                simulated.deliver(1 + choice % (len(programs) - 1))
        simulated.finish()
        all_histories_are_equal(simulated)


@given(worlds(), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=40))
@settings(max_examples=100, deadline=None)
@pytest.mark.usefixtures("small_ring")
def test_a_log_that_is_full_again_and_again_loses_nothing(world: Any, turns: list[tuple[int, int]]) -> None:
    test_any_interleaving_decides_everything_in_one_order.hypothesis.inner_test(world, turns)  # type: ignore[attr-defined]


def test_in_the_steady_state_nothing_travels_to_the_root() -> None:
    program = [(0, f"t{i}", SUM) for i in range(3)]
    with host([program * 5, program * 5]) as world:
        world.finish()
        assert sum(len(decision.requests) for decision in world.ranks[0].history) == 15
        for _ in range(3):
            for node in world.ranks:
                node.program.extend(program)
                node.go_on(3)
            assert not world.links[1]
        world.finish()
        all_histories_are_equal(world)


def test_requests_that_become_ready_together_share_a_bucket() -> None:
    program = [(0, f"t{i}", SUM) for i in range(8)]
    with host([program, program]) as world:
        world.finish()
        for node in world.ranks:
            node.history.clear()
            node.program.extend(program)
            node.go_on(8)
        world.finish()
        (bucket,) = world.ranks[0].history
        assert [key[1] for key, _ in bucket.requests] == [f"t{i}" for i in range(8)]


def test_a_rank_that_differs_from_what_others_voted_for_is_named() -> None:
    with host([[(0, "x", SUM)] * 2, [(0, "x", SUM), (0, "x", ODD)], [(0, "x", SUM)] * 2]) as world:
        world.finish()
        all_histories_are_equal(world)
        refusal = world.ranks[2].history[-1]
        assert isinstance(refusal, Refuse)
        assert "Mismatched ALLREDUCE tensor shapes" in refusal.text
        assert "1" in refusal.text.rpartition("ranks")[2]


def test_the_end_of_the_world_stands_in_the_log() -> None:
    with host([[(0, "x", SUM)], [(0, "x", SUM)]]) as world:
        world.finish()
        world.ranks[1].agreement.leave(1)
        world.ranks[1].agreement.settle(world.ranks[1].carry_out)
        world.deliver(1)
        assert world.ranks[1].ballot.is_closed
        world.finish()
        assert [node.history[-1] for node in world.ranks] == [Close(1)] * 2


def test_a_rank_that_died_with_the_lock_does_not_hang_the_others() -> None:
    memory = mmap.mmap(-1, Ballot.num_bytes(2))

    def check() -> None:
        raise RuntimeError("rank 0 is gone")

    ballots = [
        Ballot(memory, 0, index=index, bells=[-1, -1], plan=lambda ids: (), check=check, spins=False)
        for index in range(2)
    ]
    ballots[0]._lock.wait(0, fail, 1.0)  # and it dies here
    with pytest.raises(RuntimeError, match="rank 0 is gone"):
        ballots[1].cast([])
    for ballot in ballots:
        ballot.release()
    memory.close()
