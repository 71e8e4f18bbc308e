"""Agreement by votes in shared memory, on simulated ranks: any interleaving decides everything, alike on all ranks.

On one host, where the last vote decides, and on several, where it tells the leader.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_hosts import JOIN, ODD, SUM, SimulatedHosts, Step, host

from hvd_cluster.engine.messages import Close, Forget, JoinDone, Refuse, Run
from hvd_cluster.engine.shared_memory import ballot as ballot_module
from hvd_cluster.engine.shared_memory.ballot import Ballot, Vote
from hvd_cluster.engine.signature import Kind, Signature, TensorMeta


def all_histories_are_equal(world: SimulatedHosts) -> None:
    first, *others = [node.history for node in world.ranks]
    for other in others:
        assert other == first


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is full again and again."""
    monkeypatch.setattr(ballot_module, "_RING_BYTES", 2048)
    monkeypatch.setattr(ballot_module, "_MAX_BYTES", 256)


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


@pytest.mark.long
@given(worlds(), HOSTS, st.sampled_from(["", "b"]), st.lists(TURNS, max_size=120))
@settings(max_examples=200, deadline=None)
def test_any_interleaving_decides_everything_in_one_order(
    world: Any, hosts: list[str] | None, without: str, turns: list[tuple[int, int]]
) -> None:
    programs, sets, cache = world
    with host(programs, sets, cache, hosts and hosts[: len(programs)], without) as simulated:
        for choice, count in turns:
            if choice < len(programs):
                node = simulated.ranks[choice]
                node.go_on(count) if count else node.look()
            else:
                loaded = simulated.loaded()
                if loaded:
                    simulated.deliver(loaded[choice % len(loaded)])
        simulated.finish()
        all_histories_are_equal(simulated)


@pytest.mark.slow
@given(worlds(), HOSTS, st.sampled_from(["", "b"]), st.lists(TURNS, max_size=120))
@settings(max_examples=900, deadline=None)
def test_many_more_interleavings_do(world: Any, hosts: list[str] | None, without: str, turns: Any) -> None:
    inner = test_any_interleaving_decides_everything_in_one_order.hypothesis.inner_test  # type: ignore[attr-defined]
    inner(world, hosts, without, turns)


@pytest.mark.long
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


def test_in_the_steady_state_of_several_hosts_the_leaders_alone_send() -> None:
    program = [(0, f"t{i}", SUM) for i in range(3)]
    with host([program * 2] * 5, hosts=["a", "a", "b", "b", "c"]) as world:
        world.finish()
        sent: set[tuple[int, int]] = set()
        for node in world.ranks:
            node.program.extend(program * 3)
        for turn in range(200):
            world.ranks[turn % 5].go_on(3)
            sent.update(loaded := world.loaded())
            for link in loaded:
                world.deliver(link)
        world.finish()
        assert [len(node.history) for node in world.ranks] == [len(world.ranks[0].history)] * 5
        assert sum(len(decision.requests) for decision in world.ranks[1].history) == 15
        assert sent == {(2, 0), (4, 0), (0, 2), (0, 4)}


def test_a_new_shape_that_all_ranks_have_costs_no_recall() -> None:
    shapes = [Signature(Kind.ALLREDUCE, (TensorMeta("float32", (n,), "cpu"),)) for n in range(1, 20)]
    with host([[(0, "x", shape) for shape in shapes]] * 4, hosts=["a", "a", "b", "b"]) as world:
        for _ in range(200):
            for node in world.ranks:
                node.go_on(1)
            for link in world.loaded():
                world.deliver(link)
        world.finish()
        assert len(world.ranks[3].history) == len(shapes)
        assert all(node.ballot._header[ballot_module._EPOCH] == 0 for node in world.ranks)


@pytest.mark.usefixtures("small_ring")
@pytest.mark.parametrize("names", [["x"] * 60, [f"x{i // 2}" for i in range(60)]], ids=["one name", "new names"])
def test_a_leader_whose_ring_is_full_does_not_let_other_hosts_run_ahead_of_it(names: list[str]) -> None:
    """What they report then would be of an id that it does not know, or of the next request of a name."""
    pair = [(1, name, SUM) for name in names]
    with host([[], [], pair, pair], {1: frozenset({2, 3})}, hosts=["a", "a", "b", "c"]) as world:
        for _ in range(50):  # rank 1 reads nothing
            for link in world.loaded():
                world.deliver(link)
            for rank in (0, 2, 3):
                world.ranks[rank].go_on(3)
        assert world.ranks[0].agreement.is_blocked
        world.finish()
        all_histories_are_equal(world)
        assert sum(len(bucket.requests) for bucket in world.ranks[1].history) == len(names)


@pytest.mark.usefixtures("small_ring")
def test_a_rank_that_joins_while_its_vote_waits_for_room_reports_before_it_says_so() -> None:
    x, fill = (0, "x", SUM), (1, "fill", SUM)
    with host([[x, fill], [x], [x, fill]], {1: frozenset({0, 2})}) as world:
        world.finish()
        root, _, joining = world.ranks
        ballot = joining.ballot

        def room_bytes() -> int:
            used = ballot._header[ballot_module._TAIL] - min(ballot._positions)
            return ballot_module._RING_BYTES - 16 - used

        while room_bytes() >= 32:  # rank 1 reads nothing
            for node in (root, joining):
                node.program.append(fill)
                node.go_on(1)
            for link in world.loaded():
                world.deliver(link)
            root.agreement.settle()
            joining.agreement.settle()
        assert room_bytes() >= 16  # enough to join, and not to vote
        for step in (x, JOIN):
            joining.program.append(step)
            joining.go_on(1)
        for step in (x, JOIN):  # the others go on as soon as they have heard of it
            for link in world.loaded():
                world.deliver(link)
            for node in world.ranks[:2]:
                node.program.append(step)
                node.go_on(1)
        world.finish()
        for node in world.ranks:
            node.program.append((0, "x", ODD))
        world.finish()  # with what was left of x this would be a mismatch
        all_histories_are_equal(world)
        assert not any(isinstance(decision, Refuse) for decision in root.history)


@pytest.mark.long
@pytest.mark.usefixtures("small_ring")
def test_ranks_that_stand_still_for_a_while_lose_nothing() -> None:
    for seed in range(60):
        choose = random.Random(seed)
        size = choose.choice([3, 4, 5])
        hosts = ["a", "a", *(choose.choice("abbc") for _ in range(size - 2))]
        sets = {number: frozenset(choose.sample(range(size), 2)) for number in (1, 2)}
        names = [(process_set, f"t{i}") for process_set in (0, 1, 2) for i in range(2)]
        programs: list[list[Step]] = [[] for _ in range(size)]
        for _ in range(6):
            odd = {name for name in names if choose.random() < 0.2}
            for rank, program in enumerate(programs):
                mine = [name for name in names if name[0] == 0 or rank in sets[name[0]]]
                program += [(*name, ODD if name in odd else SUM) for name in choose.sample(mine, len(mine))]
            if choose.random() < 0.2:
                for program in programs:
                    program.append(JOIN)
        with host(programs, sets, choose.choice([0, 1, 64]), hosts, choose.choice(["", "b"])) as world:
            still: set[int] = set()
            for _ in range(500):
                if choose.random() < 0.05:
                    still = {choose.randrange(size)} if choose.random() < 0.7 else set()
                rank = choose.randrange(size)
                if rank not in still:
                    world.ranks[rank].go_on(choose.randrange(4))
                    world.ranks[rank].look()
                loaded = [link for link in world.loaded() if link[1] not in still]
                if loaded:
                    world.deliver(choose.choice(loaded))
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
    def check(_: object = None) -> None:
        raise RuntimeError("rank 0 is gone")

    with two_ballots(check, timeout_s=60) as (first, second):
        first._acquire_lock()  # and it dies here
        with pytest.raises(RuntimeError, match="rank 0 is gone"):
            second.cast([])


def test_a_rank_that_is_stopped_with_the_lock_is_not_waited_for_longer_than_the_limit() -> None:
    with two_ballots(lambda *_: None, timeout_s=0.2) as (first, second):
        first._acquire_lock()
        first._release_lock()
        assert second.may_sleep()
        first._acquire_lock()  # and it is stopped here
        with pytest.raises(RuntimeError, match=r"rank 0 of this host did not finish its vote within 0\.2 s"):
            second.cast([])


def test_a_rank_that_is_stopped_before_it_says_who_has_the_lock_is_not_waited_for_either() -> None:
    with two_ballots(lambda *_: None, timeout_s=0.2) as (first, second):
        first._lock.wait(0, first._deadline)
        with pytest.raises(RuntimeError, match="the other ranks of this host did not finish .* one of them is stopped"):
            second.may_sleep()


#: Two of them share a slot of the table.
IDS = (0, 1, 2, ballot_module._NUM_SLOTS + 1)
ballot_steps = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.sampled_from(IDS)),
        st.tuples(st.just("forget"), st.sampled_from(IDS)),
        st.tuples(st.just("recall"), st.sets(st.sampled_from(IDS)), st.booleans()),
        st.tuples(st.just("join"), st.just(0)),
        st.tuples(st.just("vote"), st.integers(0, 1), st.lists(st.sampled_from(IDS), max_size=3)),
    ),
    max_size=40,
)


@given(steps=ballot_steps)
@settings(max_examples=300, deadline=None)
def test_the_number_of_open_requests_stays_that_of_the_counts(steps: list[Any]) -> None:
    with two_ballots(lambda: None, timeout_s=5.0) as ballots:
        for what, first, *rest in steps:
            if what == "run":
                ballots[0].append((Run((first,)),))
            elif what == "forget":
                ballots[0].append((Forget(first),))
            elif what == "recall":
                ballots[1].recall(first, suspend=rest[0])
            elif what == "join":
                ballots[0].append((JoinDone(0),))
            else:
                ballots[first].cast([Vote(id, 2) for id in rest[0]])
            for ballot in ballots:
                ballot.read()
            counts = ballots[0]._counts.tolist()
            assert [ballot.num_open for ballot in ballots] == [sum(count > 0 for count in counts)] * 2


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
            wakeups=[-1, -1],
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
