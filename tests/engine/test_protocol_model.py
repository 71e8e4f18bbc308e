"""The protocols of agreement, model-checked: every interleaving of small worlds, and random walks through larger ones.

A state is reached by replaying the actions that lead to it; states that are equal are explored once. In every state
the logs that the ranks have carried out are beginnings of one log. Where no action is left, everything is decided and
nobody sleeps over something to read.

One rank may die, at any time or at one of the moments of its next action that :data:`MOMENTS` names. The others hear of
it sooner or later, or find the lock that it held; what they have not decided then fails, as in ``Loop._abort``.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_hosts import JOIN, LEAVE, ODD, SUM, Numbers, SimulatedHosts, SimulatedRank, Step, was_woken
from simulated_tree import SimulatedWorld, decided

from hvd_cluster.engine.messages import Bucket, Close, Decision, JoinDone, Refuse, VotesComplete
from hvd_cluster.engine.shared_memory.ballot import Ballot

#: Each walks through hundreds of orders.
pytestmark = pytest.mark.long

Action = tuple[str, Hashable]
Programs = list[list[Step]]
Sets = dict[int, frozenset[int]]
X, Y, Z = (0, "x", SUM), (0, "y", SUM), (0, "z", SUM)
ODD_X = (0, "x", ODD)
UNNAMED = (0, None, SUM)
#: When a rank dies amid an action: it holds the lock; and is about to write the log, has written it and not said so, or
#: has written it; or it has given the lock back, and not woken the ranks that it wanted to wake.
IN_THE_LOCK = ("locked", "unwritten", "half written", "written")
MOMENTS = (*IN_THE_LOCK, "unrung")


class Model(Protocol):
    """A world whose every step is an action that can be chosen."""

    histories: list[list[Decision]]
    #: The rank that has died.
    dead: int | None

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
                assert model.dead is not None or all(history == longest for history in model.histories), path
    return len(seen)


def walk(model: Model, choose: Callable[[int], int]) -> None:
    """Go on by actions that are chosen until there are none; the invariants of :func:`explore` hold all the way."""
    for _ in range(10_000):
        longest = max(model.histories, key=len)
        for history in model.histories:
            assert history == longest[: len(history)]
        actions = model.actions()
        if not actions:
            assert not model.left()
            assert model.dead is not None or all(history == longest for history in model.histories)
            return
        model.do(actions[choose(len(actions))])
    raise AssertionError("it never ends")


def _memory_of(negotiator: Any) -> bytes:
    state = {name: value for name, value in vars(negotiator).items() if not callable(value) and name != "_position"}
    return pickle.dumps(state)


class Died(Exception):
    """The rank that acts is dead from here on."""


class FoundDead(Exception):
    """The rank that acts waits for a lock whose holder is dead, and notices."""


class HostsModel:
    """Hosts with ballots. A rank does the next step of its program, reads what it was woken for, or goes to sleep.

    Args:
        hosts: by rank. The only rank of a host has no ballot.
        programs: what each rank does.
        cache: how many requests keep an id.
        mortal: this rank may die.
        sets: the ranks of process sets.
    """

    def __init__(
        self, hosts: list[str], programs: Programs, cache: int, mortal: int | None = None, sets: Sets | None = None
    ) -> None:
        self.world = SimulatedHosts(programs, sets or {}, cache, hosts)
        self.awake = [node.ballot is not None for node in self.world.ranks]
        self.histories = [node.history for node in self.world.ranks]
        self.dead: int | None = None
        self._hosts = hosts
        self._mortal = mortal
        self._is_lock_lost = False
        #: These have noticed, and failed what they had not decided.
        self._ended: set[int] = set()
        for node in self.world.ranks:
            if node.ballot is not None:
                self._lose_the_lock_with_its_holder(node.rank, node.ballot)

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for node in self.world.ranks:
            if self._is_gone(node.rank):
                continue
            own = []
            first = node.numbers.named(node.program[0]) if node.program else None
            if first is not None and not node.has_joined and (isinstance(first, str) or first[:2] not in node.pending):
                own.append("step")
            if self.awake[node.rank]:
                own.append("look")
            found += [(what, node.rank) for what in own]
            if self.dead is not None:
                found.append(("hear of it", node.rank))
            elif node.rank == self._mortal:
                if node.ballot is not None:
                    found += [(f"{what}: {moment}", node.rank) for what in own for moment in MOMENTS]
                found.append(("die", node.rank))
        return found + [("deliver", link) for link in self.world.loaded() if not self._is_gone(link[1])]

    def do(self, action: Action) -> None:
        what, where = action
        what, _, moment = what.partition(": ")
        rank = where[1] if isinstance(where, tuple) else where
        assert isinstance(rank, int)
        node = self.world.ranks[rank]
        try:
            with nullcontext() if node.ballot is None else _dying(node.ballot, moment):
                if isinstance(where, tuple):
                    self.world.deliver(where)
                    self.awake[rank] = node.ballot is not None
                else:
                    self._do(what, node)
        except Died:
            self._is_lock_lost = moment in IN_THE_LOCK
            what = "die"
        except FoundDead:
            self._end(node.rank)
        if what == "die" or moment:
            self.dead = rank
        for each in self.world.ranks:
            if was_woken(each.wakeup):
                self.awake[each.rank] = True

    def _do(self, what: str, node: SimulatedRank) -> None:
        if what == "step":
            node.go_on(1)
            self.awake[node.rank] = node.ballot is not None
        elif what == "look":
            is_busy = node.has_unread or node.agreement.is_blocked
            node.agreement.settle()
            if not is_busy:
                self.awake[node.rank] = not node.may_sleep()
        elif what == "hear of it":
            with suppress(FoundDead):
                node.agreement.settle()  # the end may stand there
            self._end(node.rank)

    def _is_gone(self, rank: int) -> bool:
        return rank == self.dead or rank in self._ended

    def _end(self, rank: int) -> None:
        node = self.world.ranks[rank]
        node.pending.clear()
        node.program.clear()
        node.has_joined = False
        self._ended.add(rank)

    def _lose_the_lock_with_its_holder(self, rank: int, ballot: Ballot) -> None:
        acquire = ballot._acquire_lock

        def or_notice() -> None:
            if self._is_lock_lost and self.dead is not None and self._hosts[self.dead] == self._hosts[rank]:
                raise FoundDead
            acquire()

        ballot._acquire_lock = or_notice  # type: ignore[method-assign]

    def key(self) -> Hashable:
        ranks = [
            (
                len(node.program),
                (node.numbers.num_joins, *sorted(node.numbers.counts.items())),
                tuple((key, request.epoch) for key, request in sorted(node.pending.items())),
                node.has_joined,
                len(node.history),
                None if node.ballot is None else node.ballot._position,
                _memory_of(node.agreement._negotiator),
                node.agreement._joins_at,
                len(node.agreement._unappended),
                self._is_gone(node.rank),
            )
            for node in self.world.ranks
        ]
        links = pickle.dumps({link: list(self.world.links[link]) for link in self.world.loaded()})
        ballots = [node.ballot for node in self.world.ranks if node.ballot is not None and node.agreement._is_leader]
        shared = [
            (
                *ballot._header,
                *ballot._positions,
                *ballot._sleeps,
                *ballot._ids[:32],
                *ballot._counts[:32],
                bytes(ballot._ring[: ballot._header[0]]),
            )
            for ballot in ballots
        ]
        return (*ranks, links, *shared, tuple(self.awake), self.dead, self._is_lock_lost)

    def left(self) -> list[Any]:
        return [
            (node.rank, list(node.program), list(node.pending), node.has_joined, _overslept(node))
            for node in self.world.ranks
            if node.program or node.pending or node.has_joined or _overslept(node)
            if not self._is_gone(node.rank)
        ]


@contextmanager
def _dying(ballot: Ballot, moment: str) -> Iterator[None]:
    """The rank dies when it comes to ``moment``, with the memory that all share as it is then."""
    write, wake, acquire, release = ballot._write, ballot._wake, ballot._acquire_lock, ballot._release_lock
    is_dead = False

    def die() -> None:
        nonlocal is_dead
        is_dead = True
        raise Died

    def write_and_die(kind: int, payload: bytes) -> None:
        tail = ballot._header[0]
        if moment != "unwritten":
            write(kind, payload)
        if moment == "half written":
            ballot._header[0] = tail
        die()

    def lock_and_die() -> None:
        acquire()
        die()

    if moment in ("unwritten", "half written", "written"):
        ballot._write = write_and_die  # type: ignore[method-assign]
    elif moment == "locked":
        ballot._acquire_lock = lock_and_die  # type: ignore[method-assign]
    elif moment == "unrung":
        ballot._wake = lambda ranks: die() if ranks else None  # type: ignore[method-assign]
    ballot._release_lock = lambda: None if is_dead else release()  # type: ignore[method-assign]
    try:
        yield
    finally:
        ballot._write, ballot._wake = write, wake  # type: ignore[method-assign]
        ballot._acquire_lock, ballot._release_lock = acquire, release  # type: ignore[method-assign]


def _overslept(node: SimulatedRank) -> list[Any]:
    """What a rank that sleeps should have been woken for. That its host is ready is for the leader alone."""
    ballot = node.ballot
    if ballot is None or not ballot.has_unread:
        return []
    unread = ballot._ring[ballot._position : ballot._header[0]]  # no model writes more than fits
    messages = ballot._decoder.decode(bytes(unread))
    return [message for message in messages if node.agreement._is_leader or not isinstance(message, VotesComplete)]


def on_hosts(
    hosts: list[str], programs: Programs, cache: int, mortal: int | None = None, sets: Sets | None = None
) -> Callable[[], AbstractContextManager[Model]]:
    @contextmanager
    def make() -> Iterator[Model]:
        model = HostsModel(hosts, programs, cache, mortal, sets)
        try:
            yield model
        finally:
            model.world.close()

    return make


def on_a_host(programs: Programs, cache: int, mortal: int | None = None) -> Callable[[], AbstractContextManager[Model]]:
    return on_hosts(["here"] * len(programs), programs, cache, mortal)


class TreeModel:
    """Hosts that share no memory. A rank does the next step of its program, or a message arrives.

    Args:
        hosts: by rank.
        programs: what each rank does.
        cache: how many requests keep an id.
        mortal: this rank may die.
        sets: the ranks of process sets.
    """

    def __init__(
        self, hosts: list[str], programs: Programs, cache: int, mortal: int | None = None, sets: Sets | None = None
    ) -> None:
        self.dead: int | None = None
        self._mortal = mortal
        self._ended: set[int] = set()
        self.world = SimulatedWorld(hosts, sets, cache)
        self.programs = [deque(program) for program in programs]
        self.has_joined = [False] * len(hosts)
        self.numbers = [Numbers() for _ in hosts]
        self.pending: list[set[Any]] = [set() for _ in hosts]
        self.seen = [0] * len(hosts)
        self.histories = [node.history for node in self.world.ranks]

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for rank, program in enumerate(self.programs):
            if self._is_gone(rank):
                continue
            if self.dead is not None:
                found.append(("hear of it", rank))
            elif rank == self._mortal:
                found.append(("die", rank))
            first = self.numbers[rank].named(program[0]) if program else ""
            is_free = program and (isinstance(first, str) or first[:2] not in self.pending[rank])
            if is_free and not self.has_joined[rank]:
                found.append(("step", rank))
        links = [link for link, queue in sorted(self.world.links.items()) if queue]
        return found + [("deliver", link) for link in links if not self._is_gone(link[1])]

    def _is_gone(self, rank: int) -> bool:
        return rank == self.dead or rank in self._ended

    def do(self, action: Action) -> None:
        what, where = action
        if what == "step":
            assert isinstance(where, int)
            self._step(where)
        elif what == "die":
            assert isinstance(where, int)
            self.dead = where
        elif what == "hear of it":
            assert isinstance(where, int)
            self._end(where)
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
            process_set, name, signature = self.numbers[rank].named(step)
            self.numbers[rank].count(step)
            self.pending[rank].add((process_set, name))
            self.world.submit(rank, name, signature, process_set)

    def _end(self, rank: int) -> None:
        self.pending[rank].clear()
        self.programs[rank].clear()
        self.has_joined[rank] = False
        self._ended.add(rank)

    def _take(self, rank: int, decision: Decision) -> None:
        if isinstance(decision, Bucket):
            for key in decided([decision]):
                is_member = rank in self.world.process_sets[key[0]]
                assert key in self.pending[rank] or self.has_joined[rank] or not is_member
                self.pending[rank].discard(key)
        elif isinstance(decision, Refuse):
            self.pending[rank].discard(decision.key)
        elif isinstance(decision, JoinDone):
            self.has_joined[rank] = False
            self.numbers[rank].restart()
        elif isinstance(decision, Close):
            self.pending[rank].clear()
            self.programs[rank].clear()
            self.has_joined[rank] = False

    def key(self) -> Hashable:
        nodes = tuple(_memory_of(node.negotiator) for node in self.world.ranks)
        links = pickle.dumps({link: list(queue) for link, queue in sorted(self.world.links.items()) if queue})
        ranks = tuple(
            (len(program), frozenset(pending), joined, seen, numbers.num_joins, *sorted(numbers.counts.items()))
            for program, pending, joined, seen, numbers in zip(
                self.programs, self.pending, self.has_joined, self.seen, self.numbers, strict=True
            )
        )
        return (nodes, links, ranks, self.dead, frozenset(self._ended))

    def left(self) -> list[Any]:
        return [
            (rank, list(self.programs[rank]), self.pending[rank], self.has_joined[rank])
            for rank in range(len(self.programs))
            if self.programs[rank] or self.pending[rank] or self.has_joined[rank]
            if not self._is_gone(rank)
        ]


def on_a_tree(
    hosts: list[str], programs: Programs, cache: int, mortal: int | None = None, sets: Sets | None = None
) -> Callable[[], AbstractContextManager[Model]]:
    @contextmanager
    def make() -> Iterator[Model]:
        yield TreeModel(hosts, programs, cache, mortal, sets)

    return make


#: What each rank does, by what it is about.
PAIRS: dict[str, Programs] = {
    "opposite orders": [[X, Y], [Y, X]],
    "again": [[X, X, X], [X, X, X]],
    "mismatch": [[X, Y], [ODD_X, Y]],
    "mismatch of what was voted for": [[X, X], [X, ODD_X]],
    "mismatch after a vote": [[X, X, X], [X, X, ODD_X]],
    "eviction": [[X, Y, X], [Y, X, X]],
    "uneven join": [[X, X, JOIN], [X, JOIN]],
    "join, then again": [[X, JOIN, X], [JOIN, X]],
    "unnamed, in rounds of unequal length": [[UNNAMED, JOIN, UNNAMED, JOIN], [JOIN, UNNAMED, JOIN]],
    "shutdown with requests under way": [[X, X, Y], [X, LEAVE]],
    "both shut down": [[X, LEAVE], [X, LEAVE]],
}
TRIPLES: dict[str, Programs] = {
    "opposite orders": [[X, Y], [Y, X], [X, Y]],
    "mismatch": [[X], [ODD_X], [X]],
    "uneven join": [[X, JOIN], [JOIN], [X, JOIN]],
    "unnamed, in rounds of unequal length": [[JOIN, UNNAMED, JOIN], [JOIN, JOIN], [UNNAMED, JOIN, UNNAMED, JOIN]],
    "shutdown with requests under way": [[X, Y], [X, LEAVE], [Y, X]],
}


#: The second time of a name, ranks of one host vote.
VOTERS: dict[str, Programs] = {
    "again": [[X, X, X], [X, X, X], [X, X, X]],
    "mismatch of what was voted for": [[X, X], [X, ODD_X], [X, X]],
    "shutdown with requests under way": [[X, X], [X, LEAVE], [X, X]],
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


@pytest.mark.parametrize("programs", VOTERS.values(), ids=VOTERS)
@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "b"]], ids="".join)
def test_a_host_that_votes_beside_one_that_reports_in_every_order(hosts: list[str], programs: Programs) -> None:
    assert explore(on_hosts(hosts, programs, 1)) > 50


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "b"]], ids="".join)
@pytest.mark.parametrize(
    "programs", [[[X, Y, X]] * 3, [[X, X, JOIN], [X, JOIN], [X, X, JOIN]]], ids=["eviction", "uneven join"]
)
def test_a_host_that_votes_for_what_is_evicted_or_ended_by_a_join(hosts: list[str], programs: Programs) -> None:
    assert explore(on_hosts(hosts, programs, 1)) > 500


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("programs", [[[X, X]] * 4, [[X, X]] * 3 + [[X, ODD_X]]], ids=["again", "mismatch"])
def test_two_hosts_that_vote_in_every_order(programs: Programs) -> None:
    assert explore(on_hosts(["a", "a", "b", "b"], programs, 1)) > 500


def most(cases: dict[str, Any]) -> list[Any]:
    """All cases; the one with by far the most orders is slow."""
    slow = "unnamed, in rounds of unequal length"
    return [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name == slow else []) for name, case in cases.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mortal", [0, 1])
@pytest.mark.parametrize("programs", most(PAIRS))
def test_one_of_two_ranks_of_a_host_dies_at_any_moment(programs: Programs, mortal: int) -> None:
    assert explore(on_a_host(programs, 1, mortal)) > 50


@pytest.mark.parametrize("mortal", [0, 1, 2])
@pytest.mark.parametrize("programs", most(TRIPLES))
def test_one_of_three_hosts_dies_at_any_moment(programs: Programs, mortal: int) -> None:
    assert explore(on_a_tree(["a", "b", "c"], programs, 1, mortal)) > 50


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mortal", [0, 1, 2])
@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "b"]], ids="".join)
@pytest.mark.parametrize("programs", [[[X, X]] * 3, [[X, X], [X, ODD_X], [X, X]]], ids=["again", "mismatch"])
def test_one_of_three_ranks_on_two_hosts_dies_at_any_moment(hosts: list[str], programs: Programs, mortal: int) -> None:
    assert explore(on_hosts(hosts, programs, 1, mortal)) > 500


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Programs, int, int | None, Sets]:
    """Programs that come to an end, the size of the cache, who may die, and perhaps a process set.

    All ranks submit the same names in each round, in orders of their own; one may submit something else by a name that
    others use, some may run out of data, and one may shut down, or die.
    """
    num_ranks = draw(st.integers(2, 5))
    ranks = st.integers(0, num_ranks - 1)
    names = [(0, name, SUM) for name in "xyz"[: draw(st.integers(1, 3))]]
    sets: Sets = {}
    if draw(st.booleans()):
        sets[1] = draw(st.frozensets(ranks, min_size=1))
        names.append((1, "x", SUM))
    num_rounds = draw(st.integers(1, 3))
    programs: Programs = [
        [
            step
            for _ in range(num_rounds)
            for step in draw(st.permutations(names))
            if step[0] == 0 or rank in sets[step[0]]
        ]
        for rank in range(num_ranks)
    ]
    if draw(st.booleans()):
        program = programs[draw(ranks)]
        place = draw(st.integers(0, len(program) - 1))
        program[place] = (*program[place][:2], ODD)
    if draw(st.booleans()):
        programs = [[*program[: draw(st.integers(0, len(program)))], JOIN] for program in programs]
        for _ in range(draw(st.integers(0, 2))):  # then rounds of unnamed operations, of unequal length too
            programs = [[*program, *[UNNAMED] * draw(st.integers(0, 2)), JOIN] for program in programs]
    if draw(st.booleans()):
        programs[draw(ranks)].append(LEAVE)
    return programs, draw(st.sampled_from([0, 1, 64])), draw(st.none() | ranks), sets


def draw_hosts(data: st.DataObject, programs: Programs) -> list[str]:
    return data.draw(st.lists(st.sampled_from("abc"), min_size=len(programs), max_size=len(programs)))


@settings(max_examples=300, deadline=None)
@given(world=worlds(), data=st.data())
def test_a_host_of_any_size_ends_with_everything_decided_or_failed(
    world: tuple[Programs, int, int | None, Sets], data: st.DataObject
) -> None:
    with on_hosts(["a"] * len(world[0]), *world)() as model:
        walk(model, lambda num: data.draw(st.integers(0, num - 1)))


@settings(max_examples=300, deadline=None)
@given(world=worlds(), data=st.data())
def test_hosts_of_any_shape_end_with_everything_decided_or_failed(
    world: tuple[Programs, int, int | None, Sets], data: st.DataObject
) -> None:
    with on_hosts(draw_hosts(data, world[0]), *world)() as model:
        walk(model, lambda num: data.draw(st.integers(0, num - 1)))


@settings(max_examples=300, deadline=None)
@given(world=worlds(), data=st.data())
def test_a_tree_of_any_shape_ends_with_everything_decided_or_failed(
    world: tuple[Programs, int, int | None, Sets], data: st.DataObject
) -> None:
    with on_a_tree(draw_hosts(data, world[0]), *world)() as model:
        walk(model, lambda num: data.draw(st.integers(0, num - 1)))
