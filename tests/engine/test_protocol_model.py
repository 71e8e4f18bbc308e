"""The protocols of agreement, model-checked: every interleaving of small worlds, and not a sample of them.

A state is reached by replaying the actions that lead to it; states that are equal are explored once. In every state
the logs that the ranks have carried out are beginnings of one log, so a rank may die in any of them: the others go on,
or are told, with what they have in common. Where no action is left, everything is decided and nobody sleeps over
something to read.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import pytest
from simulated_host import JOIN, LEAVE, ODD, SUM, SimulatedHost, Step
from simulated_tree import SimulatedWorld, decided

from hvd_cluster.engine.messages import Bucket, Close, Decision, JoinDone, Refuse

Action = tuple[str, Hashable]
Programs = list[list[Step]]
X, Y, Z = (0, "x", SUM), (0, "y", SUM), (0, "z", SUM)
ODD_X = (0, "x", ODD)


class Model(Protocol):
    """A world whose every step is an action that can be chosen."""

    histories: list[list[Decision]]

    def actions(self) -> list[Action]:
        """What can happen next."""

    def do(self, action: Action) -> None:
        """Let it happen."""

    def key(self) -> Hashable:
        """Equal for states from which the same can happen."""

    def left(self) -> list[Any]:
        """What is undecided."""


def explore(make: Callable[[], AbstractContextManager[Model]]) -> int:
    """Visit every state; the number of them."""
    seen: set[Hashable] = set()
    paths: list[list[Action]] = [[]]
    while paths:
        path = paths.pop()
        with make() as model:
            for action in path:
                model.do(action)
            key = model.key()
            if key in seen:
                continue
            seen.add(key)
            longest = max(model.histories, key=len)
            for history in model.histories:
                assert history == longest[: len(history)], path
            actions = model.actions()
            paths += [[*path, action] for action in actions]
            if not actions:
                assert not model.left(), path
                assert all(history == longest for history in model.histories), path
    return len(seen)


def _memory_of(negotiator: Any) -> bytes:
    state = {name: value for name, value in vars(negotiator).items() if not callable(value) and name != "_place"}
    return pickle.dumps(state)


class HostModel:
    """One host. A rank does the next step of its program, reads what it was woken for, or goes to sleep."""

    def __init__(self, programs: Programs, cache: int) -> None:
        self.world = SimulatedHost(programs, {}, cache)
        self.awake = [True] * len(programs)
        self.histories = [node.history for node in self.world.ranks]

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for node in self.world.ranks:
            first = node.program[0] if node.program else None
            if first is not None and not node.has_joined and (isinstance(first, str) or first[:2] not in node.pending):
                found.append(("step", node.rank))
            if self.awake[node.rank]:
                found.append(("look", node.rank))
        return found + [("deliver", rank) for rank, link in self.world.links.items() if link]

    def do(self, action: Action) -> None:
        what, rank = action
        assert isinstance(rank, int)
        if what == "deliver":
            self.world.deliver(rank)
            self.awake[0] = True
        else:
            node = self.world.ranks[rank]
            if what == "step":
                node.go_on(1)
                self.awake[rank] = True
            elif node.ballot.has_news or node.agreement.is_held_up:
                node.agreement.settle(node.carry_out)
            else:
                node.agreement.settle(node.carry_out)
                self.awake[rank] = not node.ballot.may_sleep()
        for node in self.world.ranks:
            if _rang(node.bell):
                self.awake[node.rank] = True

    def key(self) -> Hashable:
        ranks = [
            (
                len(node.program),
                tuple((key, request.epoch) for key, request in sorted(node.pending.items())),
                node.has_joined,
                len(node.history),
                node.ballot._position,
                _memory_of(node.agreement._negotiator),
                node.agreement._joins_at,
            )
            for node in self.world.ranks
        ]
        links = pickle.dumps([list(link) for link in self.world.links.values()])
        ballot = self.world.ranks[0].ballot
        shared = (*ballot._header, *ballot._ranks, *ballot._table[:64], bytes(ballot._ring[: ballot._header[0]]))
        return (*ranks, links, shared, tuple(self.awake))

    def left(self) -> list[Any]:
        return [
            (node.rank, list(node.program), list(node.pending), node.has_joined, node.ballot.has_news)
            for node in self.world.ranks
            if node.program or node.pending or node.has_joined or node.ballot.has_news
        ]


def _rang(bell: int) -> bool:
    try:
        return os.eventfd_read(bell) > 0
    except BlockingIOError:
        return False


def on_a_host(programs: Programs, cache: int) -> Callable[[], AbstractContextManager[Model]]:
    @contextmanager
    def make() -> Iterator[Model]:
        model = HostModel(programs, cache)
        try:
            yield model
        finally:
            model.world.close()

    return make


class TreeModel:
    """Several hosts. A rank does the next step of its program, or a message arrives."""

    def __init__(self, hosts: list[str], programs: Programs, cache: int) -> None:
        self.world = SimulatedWorld(hosts, cache_capacity=cache)
        self.programs = [deque(program) for program in programs]
        self.has_joined = [False] * len(hosts)
        self.pending: list[set[Any]] = [set() for _ in hosts]
        self.seen = [0] * len(hosts)
        self.histories = [node.history for node in self.world.ranks]

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for rank, program in enumerate(self.programs):
            is_free = program and (isinstance(program[0], str) or program[0][:2] not in self.pending[rank])
            if is_free and not self.has_joined[rank]:
                found.append(("step", rank))
        return found + [("deliver", link) for link, queue in sorted(self.world.links.items()) if queue]

    def do(self, action: Action) -> None:
        what, where = action
        if what == "step":
            assert isinstance(where, int)
            self._step(where)
        else:
            assert isinstance(where, tuple)
            self.world.deliver(where)
        for rank in range(len(self.programs)):
            for decision in self.histories[rank][self.seen[rank] :]:
                self._take(rank, decision)
            self.seen[rank] = len(self.histories[rank])

    def _step(self, rank: int) -> None:
        step = self.programs[rank].popleft()
        if step == JOIN:
            self.has_joined[rank] = True
            self.world.join(rank)
        elif step == LEAVE:
            self.world.ranks[rank].negotiator.leave(rank)
            self.world.settle(rank)
        else:
            process_set, name, signature = step
            self.pending[rank].add((process_set, name))
            self.world.submit(rank, name, signature, process_set)

    def _take(self, rank: int, decision: Decision) -> None:
        if isinstance(decision, Bucket):
            for key in decided([decision]):
                assert key in self.pending[rank] or self.has_joined[rank]
                self.pending[rank].discard(key)
        elif isinstance(decision, Refuse):
            self.pending[rank].discard(decision.key)
        elif isinstance(decision, JoinDone):
            self.has_joined[rank] = False
        elif isinstance(decision, Close):
            self.pending[rank].clear()
            self.programs[rank].clear()
            self.has_joined[rank] = False

    def key(self) -> Hashable:
        nodes = tuple(_memory_of(node.negotiator) for node in self.world.ranks)
        links = pickle.dumps({link: list(queue) for link, queue in sorted(self.world.links.items()) if queue})
        ranks = tuple(
            (len(program), frozenset(pending), joined, seen)
            for program, pending, joined, seen in zip(
                self.programs, self.pending, self.has_joined, self.seen, strict=True
            )
        )
        return (nodes, links, ranks)

    def left(self) -> list[Any]:
        return [
            (rank, list(self.programs[rank]), self.pending[rank], self.has_joined[rank])
            for rank in range(len(self.programs))
            if self.programs[rank] or self.pending[rank] or self.has_joined[rank]
        ]


def on_a_tree(hosts: list[str], programs: Programs, cache: int) -> Callable[[], AbstractContextManager[Model]]:
    @contextmanager
    def make() -> Iterator[Model]:
        yield TreeModel(hosts, programs, cache)

    return make


#: What each rank does, by what it is about.
PAIRS: dict[str, Programs] = {
    "opposite orders": [[X, Y], [Y, X]],
    "again": [[X, X, X], [X, X, X]],
    "mismatch": [[X, Y], [ODD_X, Y]],
    "mismatch of what was voted for": [[X, X], [X, ODD_X]],
    "eviction": [[X, Y, X], [Y, X, X]],
    "uneven join": [[X, X, JOIN], [X, JOIN]],
    "join, then again": [[X, JOIN, X], [JOIN, X]],
    "shutdown with requests under way": [[X, X, Y], [X, LEAVE]],
    "both shut down": [[X, LEAVE], [X, LEAVE]],
}
TRIPLES: dict[str, Programs] = {
    "opposite orders": [[X, Y], [Y, X], [X, Y]],
    "mismatch": [[X], [ODD_X], [X]],
    "uneven join": [[X, JOIN], [JOIN], [X, JOIN]],
    "shutdown with requests under way": [[X, Y], [X, LEAVE], [Y, X]],
}


@pytest.mark.parametrize("cache", [64, 1])
@pytest.mark.parametrize("programs", PAIRS.values(), ids=PAIRS)
def test_two_ranks_of_a_host_in_every_order(programs: Programs, cache: int) -> None:
    assert explore(on_a_host(programs, cache)) > 10


@pytest.mark.parametrize("cache", [64, 1])
@pytest.mark.parametrize("programs", PAIRS.values(), ids=PAIRS)
def test_two_hosts_in_every_order(programs: Programs, cache: int) -> None:
    assert explore(on_a_tree(["a", "b"], programs, cache)) > 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("programs", TRIPLES.values(), ids=TRIPLES)
def test_three_ranks_of_a_host_in_every_order(programs: Programs) -> None:
    assert explore(on_a_host(programs, 1)) > 100


@pytest.mark.parametrize("programs", TRIPLES.values(), ids=TRIPLES)
@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "c"]], ids="".join)
def test_three_ranks_in_a_tree_in_every_order(programs: Programs, hosts: list[str]) -> None:
    assert explore(on_a_tree(hosts, programs, 1)) > 10
