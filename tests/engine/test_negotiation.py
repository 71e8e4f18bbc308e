"""The negotiation on simulated ranks: any interleaving ends with every request decided, alike on all ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_tree import GATHER, SUM, SimulatedWorld, all_histories_are_equal, decided

from hvd_cluster.engine.messages import Close, JoinDone, Refuse
from hvd_cluster.engine.signature import Key, Kind, ReduceOp, Signature, TensorMeta


def test_requests_in_opposite_orders_are_decided_in_one_order() -> None:
    world = SimulatedWorld(["a", "a", "b"])
    for rank, order in enumerate(("xyz", "zyx", "yxz")):
        for name in order:
            world.submit(rank, name)
    world.run()
    all_histories_are_equal(world)
    assert sorted(decided(world.ranks[0].history)) == [(0, "x"), (0, "y"), (0, "z")]


def test_nothing_is_decided_before_the_last_rank_has_submitted() -> None:
    world = SimulatedWorld(["a"] * 4)
    for rank in range(3):
        world.submit(rank, "x")
    world.run()
    assert all(not node.history for node in world.ranks)
    world.submit(3, "x")
    world.run()
    assert [decided(node.history) for node in world.ranks] == [[(0, "x")]] * 4


def test_a_request_seen_before_travels_as_an_id() -> None:
    world = SimulatedWorld(["a", "a"])
    for _ in range(2):
        world.submit(1, "x")
        message = world.links[1, 0][-1] if world.links[1, 0] else None
        world.submit(0, "x")
        world.run()
    assert type(message.items[0]).__name__ == "CachedReport"


@pytest.mark.parametrize("disagreeing_rank", [0, 1, 4])
def test_a_mismatch_reaches_every_rank_and_names_two_that_differ(disagreeing_rank: int) -> None:
    world = SimulatedWorld(["a", "a", "b", "b", "c"])
    odd = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (5,), "cpu"),))
    for rank in range(5):
        world.submit(rank, "x", odd if rank == disagreeing_rank else SUM)
    world.run()
    all_histories_are_equal(world)
    (refusal,) = world.ranks[0].history
    assert isinstance(refusal, Refuse)
    assert refusal.text.startswith("Mismatched ALLREDUCE tensor shapes")
    assert str(disagreeing_rank) in refusal.text.rpartition("ranks")[2]
    for rank in range(5):
        world.submit(rank, "x")
    world.run()
    assert decided(world.ranks[3].history) == [(0, "x")]


@pytest.mark.parametrize(
    ("other", "beginning"),
    [
        (GATHER, "Mismatched operations: One rank did an ALLREDUCE, but another rank did an ALLGATHER."),
        (Signature(Kind.ALLREDUCE, (TensorMeta("int64", (4,), "cpu"),)), "Mismatched data types: One rank had type"),
        (Signature(Kind.ALLREDUCE, SUM.tensors, op=ReduceOp.MAX), "Mismatched reduction operation"),
        (Signature(Kind.ALLREDUCE, SUM.tensors, prescale=2.0), "Mismatched prescale/postscale factors"),
        (Signature(Kind.ALLREDUCE, (TensorMeta("float32", (4,), "cuda"),)), "Mismatched ALLREDUCE CPU/GPU device"),
        (Signature(Kind.ALLREDUCE, SUM.tensors * 2), "Mismatched group sizes"),
        (SUM._replace(sparse_shapes=((4, -1),)), "Mismatched shapes of sparse tensors: One rank has none, but another"),
    ],
)
def test_each_kind_of_mismatch_has_its_text(other: Signature, beginning: str) -> None:
    world = SimulatedWorld(["a", "a"])
    world.submit(0, "x", SUM)
    world.submit(1, "x", other)
    world.run()
    (refusal,) = world.ranks[1].history
    assert isinstance(refusal, Refuse)
    assert refusal.text.startswith(beginning)


def test_joined_ranks_take_part_in_allreduces_only() -> None:
    world = SimulatedWorld(["a", "a", "b"])
    world.join(1)
    for rank in (0, 2):
        world.submit(rank, "sum")
        world.submit(rank, "gather", GATHER)
    world.run()
    all_histories_are_equal(world)
    assert decided(world.ranks[1].history) == [(0, "sum")]
    (refusal,) = [d for d in world.ranks[1].history if isinstance(d, Refuse)]
    assert refusal.text.startswith("Allgather is not supported with Join at this time.")


def test_join_ends_when_all_have_joined_and_names_the_last() -> None:
    world = SimulatedWorld(["a", "a", "b"])
    for rank in (1, 0, 2):
        world.join(rank)
        world.run()
    assert [node.history for node in world.ranks] == [[JoinDone(2)]] * 3
    for rank in range(3):
        world.submit(rank, "after", GATHER)
    world.run()
    assert decided(world.ranks[2].history) == [(0, "after")]


def test_a_rank_that_leaves_closes_the_world_for_all() -> None:
    world = SimulatedWorld(["a", "b", "c"])
    world.ranks[2].negotiator.leave(2)
    world.settle(2)
    world.run()
    assert [node.history for node in world.ranks] == [[Close(2)]] * 3


def test_overlapping_process_sets_do_not_block_each_other() -> None:
    sets = {1: frozenset({0, 1}), 2: frozenset({1, 2}), 3: frozenset({0, 2})}
    world = SimulatedWorld(["a", "b", "c"], sets)
    # Each rank begins with another one of its two sets: an order per set would wait in a circle.
    for rank, order in enumerate(((1, 3), (2, 1), (3, 2))):
        for process_set in order:
            world.submit(rank, "x", process_set=process_set)
    world.run()
    all_histories_are_equal(world)
    assert sorted(decided(world.ranks[0].history)) == [(1, "x"), (2, "x"), (3, "x")]


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_more_names_than_the_cache_holds_are_only_slower(capacity: int) -> None:
    world = SimulatedWorld(["a", "a", "b"], cache_capacity=capacity)
    for turn in range(4):
        for name in "abcdefg":
            for rank in range(3):
                world.submit((rank + turn) % 3, name)
        world.run(seed=turn)
    all_histories_are_equal(world)
    assert sorted(decided(world.ranks[0].history)) == sorted([(0, name) for name in "abcdefg"] * 4)
    assert all(len(node.negotiator._ids) <= max(capacity, 0) for node in world.ranks)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_interleaving_decides_everything_once_and_alike(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 7))
    hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=num_ranks, max_size=num_ranks))
    subsets = st.frozensets(st.integers(0, num_ranks - 1), min_size=1)
    sets = {1: data.draw(subsets), 2: data.draw(subsets)}
    world = SimulatedWorld(hosts, sets, cache_capacity=data.draw(st.sampled_from([0, 2, 1024])))
    names = data.draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("pqrs")), max_size=6, unique=True))
    rounds = data.draw(st.integers(1, 3))
    choose = random.Random(data.draw(st.integers(0, 2**32)))

    # A rank submits a name again only after its last round was decided here; otherwise in any order it likes.
    todo = [{key: rounds for key in names if rank in world.process_sets[key[0]]} for rank in range(num_ranks)]
    pending: list[set[Key]] = [set() for _ in range(num_ranks)]
    seen = [0] * num_ranks
    while True:
        for rank, node in enumerate(world.ranks):
            for key in decided(node.history[seen[rank] :]):
                pending[rank].discard(key)
            seen[rank] = len(node.history)
        moves = [
            (rank, key)
            for rank in range(num_ranks)
            for key, left in sorted(todo[rank].items())
            if left and key not in pending[rank]
        ]
        if moves and choose.random() < 0.5:
            rank, key = choose.choice(moves)
            todo[rank][key] -= 1
            pending[rank].add(key)
            world.submit(rank, key[1], process_set=key[0])
        elif not world.deliver_one(choose) and not moves:
            break
    all_histories_are_equal(world)
    assert sorted(decided(world.ranks[0].history)) == sorted(key for key in names for _ in range(rounds))
    assert all(not node.negotiator._states for node in world.ranks)
    assert all(len(node.negotiator._ids._readable) <= 2 * len(names) * rounds for node in world.ranks)


def test_a_rank_that_has_joined_stands_in_for_in_a_process_set_whose_other_ranks_have_not() -> None:
    """Its host has other ranks, which are not in the set and go on."""
    world = SimulatedWorld(["a", "b", "b"], {1: frozenset({0, 2})})
    world.join(2)
    world.run()
    world.submit(0, "x", process_set=1)
    world.run()
    assert [decided(node.history) for node in world.ranks] == [[(1, "x")]] * 3


def test_a_gather_among_ranks_that_have_not_joined_is_not_a_mistake() -> None:
    world = SimulatedWorld(["a", "a", "a"], {1: frozenset({1, 2})})
    world.join(0)
    for rank in (1, 2):
        world.submit(rank, "x", GATHER, process_set=1)
    world.run()
    assert [decided(node.history) for node in world.ranks] == [[(1, "x")]] * 3
