"""Agreement by votes in shared memory, on simulated ranks: any interleaving decides everything, alike on all ranks.

On one host, where the last vote decides, and on several, where it tells the leader.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_hosts import JOIN, ODD, SUM, SimulatedHosts, Step, host

from hvd_cluster.engine.messages import Close, Refuse
from hvd_cluster.engine.shared_memory import ballot as ballot_module
from hvd_cluster.engine.shared_memory.ballot import Ballot


def all_histories_are_equal(world: SimulatedHosts) -> None:
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


#: (who goes on, by how many steps), or a message that is delivered.
TURNS = st.tuples(st.integers(0, 7), st.integers(0, 3))
HOSTS = st.none() | st.lists(st.sampled_from("aab"), min_size=4, max_size=4)


@given(worlds(), HOSTS, st.sampled_from(["", "b"]), st.lists(TURNS, max_size=120))
@settings(max_examples=900, deadline=None)
def test_any_interleaving_decides_everything_in_one_order(
    world: Any, hosts: list[str] | None, without: str, turns: list[tuple[int, int]]
) -> None:
    programs, sets, cache = world
    with host(programs, sets, cache, hosts and hosts[: len(programs)], without) as simulated:
        for choice, count in turns:
            if choice < len(programs):
                simulated.ranks[choice].go_on(count)
            else:
                loaded = simulated.loaded()
                if loaded:
                    simulated.deliver(loaded[choice % len(loaded)])
        simulated.finish()
        all_histories_are_equal(simulated)


@given(worlds(), HOSTS, st.lists(TURNS, max_size=40))
@settings(max_examples=150, deadline=None)
@pytest.mark.usefixtures("small_ring")
def test_a_log_that_is_full_again_and_again_loses_nothing(
    world: Any, hosts: list[str] | None, turns: list[tuple[int, int]]
) -> None:
    inner = test_any_interleaving_decides_everything_in_one_order.hypothesis.inner_test  # type: ignore[attr-defined]
    inner(world, hosts, "", turns)


def test_in_the_steady_state_nothing_travels_to_the_root() -> None:
    program = [(0, f"t{i}", SUM) for i in range(3)]
    with host([program * 5, program * 5]) as world:
        world.finish()
        assert sum(len(decision.requests) for decision in world.ranks[0].history) == 15
        for _ in range(3):
            for node in world.ranks:
                node.program.extend(program)
                node.go_on(3)
            assert not world.loaded()
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
        world.ranks[1].agreement.settle()
        world.deliver((1, 0))
        assert world.ranks[1].ballot.is_closed
        world.finish()
        assert [node.history[-1] for node in world.ranks] == [Close(1)] * 2


def test_a_rank_that_died_with_the_lock_does_not_hang_the_others() -> None:
    def check() -> None:
        raise RuntimeError("rank 0 is gone")

    with two_ballots(check, timeout_s=60) as (first, second):
        first._acquire()  # and it dies here
        with pytest.raises(RuntimeError, match="rank 0 is gone"):
            second.cast([])


def test_a_rank_that_is_stopped_with_the_lock_is_not_waited_for_longer_than_the_limit() -> None:
    with two_ballots(lambda: None, timeout_s=0.2) as (first, second):
        first._acquire()
        first._give_back()
        assert second.may_sleep()
        first._acquire()  # and it is stopped here
        with pytest.raises(RuntimeError, match=r"rank 0 of this host did not finish its vote within 0\.2 s"):
            second.cast([])


def test_a_rank_that_is_stopped_before_it_says_who_has_the_lock_is_not_waited_for_either() -> None:
    with two_ballots(lambda: None, timeout_s=0.2) as (first, second):
        first._lock.wait(0, first._patience)
        with pytest.raises(RuntimeError, match="the other ranks of this host did not finish .* one of them is stopped"):
            second.may_sleep()


@contextmanager
def two_ballots(check: Callable[[], None], timeout_s: float) -> Iterator[list[Ballot]]:
    """Of the two ranks of a host."""
    memory = mmap.mmap(-1, Ballot.num_bytes(2))
    ballots = [
        Ballot(
            memory,
            0,
            ranks=[0, 1],
            index=index,
            bells=[-1, -1],
            plan=lambda ids: (),
            check=check,
            timeout_s=timeout_s,
            spins=False,
        )
        for index in range(2)
    ]
    try:
        yield ballots
    finally:
        for ballot in ballots:
            ballot.release()
        memory.close()
