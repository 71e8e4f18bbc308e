"""Hosts whose ranks agree by votes in shared memory, simulated: one thread plays them all, in any order."""

from __future__ import annotations

import mmap
import os
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hvd_cluster.engine.agreement import Agreement
from hvd_cluster.engine.messages import Bucket, Close, Decision, JoinDone, Refuse, ReportBatch
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.shared_memory.ballot import Ballot
from hvd_cluster.engine.signature import Key, Kind, Signature, TensorMeta
from hvd_cluster.engine.submission_queue import SerialNumber
from hvd_cluster.engine.tree import tree_positions

SUM = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (4,), "cpu"),))
ODD = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (5,), "cpu"),))
JOIN, LEAVE = "join", "leave"
#: What a rank's program is made of: (process set, name, signature), JOIN or LEAVE. The name None stands for the next
#: number, as in the engine.
Step = Any


class Numbers:
    """How one rank names unnamed operations."""

    def __init__(self) -> None:
        self.num_joins = 0
        self.counts: Counter[int] = Counter()

    def named(self, step: Step) -> Step:
        """``step`` as it is if it were submitted now."""
        if isinstance(step, str) or step[1] is not None:
            return step
        return (step[0], str(SerialNumber(self.num_joins, self.counts[step[0]])), step[2])

    def count(self, step: Step) -> None:
        """``step`` was submitted."""
        self.counts[step[0]] += step[1] is None

    def restart(self) -> None:
        """All ranks have joined."""
        self.num_joins += 1
        self.counts.clear()


@dataclass
class Submitted:
    key: Key
    signature: Signature
    epoch: int = -1


def was_woken(wakeup: int) -> bool:
    """The rank was woken since this was last called."""
    try:
        return os.eventfd_read(wakeup) > 0
    except BlockingIOError:
        return False


def fail(_: object = None) -> None:
    raise AssertionError("the lock is free whenever another simulated rank has its turn")


@dataclass
class SimulatedRank:
    rank: int
    agreement: Agreement
    #: None where this rank shares no memory.
    ballot: Ballot | None
    wakeup: int
    program: deque[Step]
    sets: dict[int, frozenset[int]]
    pending: dict[Key, Submitted] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=Numbers)
    has_joined: bool = False
    history: list[Decision] = field(default_factory=list)
    is_asleep: bool = False

    def execute(self, decision: Decision) -> None:
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
            self.numbers.restart()
        elif isinstance(decision, Close):  # what is left fails, and nothing more can be submitted
            self.pending.clear()
            self.program.clear()
            self.has_joined = False

    @property
    def has_unread(self) -> bool:
        """There is something to read in the ballot."""
        return self.ballot is not None and self.ballot.has_unread

    def may_sleep(self) -> bool:
        """This rank has nothing to read, and will be woken when it has."""
        return self.ballot is None or self.ballot.may_sleep()

    def look(self) -> None:
        """Do what there is to do, and go to sleep; a rank that sleeps looks when it was woken."""
        if was_woken(self.wakeup):
            self.is_asleep = False
        if not self.is_asleep:
            self.agreement.settle()
            self.is_asleep = self.may_sleep() and not self.agreement.is_blocked

    def go_on(self, num_steps: int) -> None:
        """Submit what the program says next, as far as it can be submitted now."""
        if not self.program or self.has_joined:
            return
        self.is_asleep = False
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
            process_set, name, signature = self.numbers.named(self.program[0])
            if (process_set, name) in self.pending:
                break
            self.numbers.count(self.program.popleft())
            request = Submitted((process_set, name), signature)
            self.pending[request.key] = request
            submitted.append(request)
            num_steps -= 1
        self.agreement.submit(submitted)
        self.agreement.settle()


class SimulatedHosts:
    """The ranks of each host share a ballot; messages in the tree travel through first-in-first-out queues.

    Args:
        programs: what each rank does.
        sets: the ranks of process sets.
        cache_capacity: how many requests keep an id.
        hosts: the host of each rank; one for all where this is left out.
        without: hosts whose ranks share no memory.
    """

    def __init__(
        self,
        programs: list[list[Step]],
        sets: dict[int, frozenset[int]],
        cache_capacity: int,
        hosts: list[str] | None = None,
        without: str = "",
    ) -> None:
        size = len(programs)
        hosts = hosts or ["here"] * size
        self.sets = {0: frozenset(range(size))} | sets
        #: By (sender, receiver).
        self.links: dict[tuple[int, int], deque[Any]] = {}
        self.memories: dict[str, mmap.mmap] = {}
        wakeups = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(size)]
        self.ranks = []
        for position in tree_positions(hosts):
            rank, here = position.rank, position.host_ranks
            negotiator = Negotiator(position, self.sets, cache_capacity, lambda: 1 << 20)
            ballot = None
            if len(here) > 1 and hosts[rank] not in without:
                if hosts[rank] not in self.memories:
                    self.memories[hosts[rank]] = mmap.mmap(-1, Ballot.num_bytes(len(here)))
                ballot = Ballot(
                    self.memories[hosts[rank]],
                    0,
                    ranks=here,
                    index=here.index(rank),
                    wakeups=[wakeups[other] for other in here],
                    plan=negotiator.plan if len(here) == size else None,
                    check=fail,
                    timeout_s=20,
                    spins=False,
                )
            node = SimulatedRank(rank, None, ballot, wakeups[rank], deque(programs[rank]), self.sets)  # type: ignore[arg-type]
            children = list(position.children) if ballot is None else position.remote_children
            node.agreement = Agreement(
                negotiator,
                ballot,
                position=position,
                quorum=lambda process_set, here=here: len(self.sets[process_set].intersection(here)),  # type: ignore[misc]
                pending=lambda node=node: node.pending,  # type: ignore[misc]
                send_up=partial(self.send, rank, [] if position.parent is None else [position.parent]),
                send_down=partial(self.send, rank, children),
                execute=node.execute,
            )
            self.ranks.append(node)

    def send(self, source: int, targets: list[int], message: Any) -> None:
        for target in targets:
            self.links.setdefault((source, target), deque()).append(message)

    def loaded(self) -> list[tuple[int, int]]:
        """The links on which something is on its way."""
        return sorted(link for link, queue in self.links.items() if queue)

    def deliver(self, link: tuple[int, int]) -> None:
        source, target = link
        self.ranks[target].is_asleep = False
        agreement, message = self.ranks[target].agreement, self.links[link].popleft()
        if isinstance(message, ReportBatch):
            agreement.receive(source, message)
        else:
            agreement.receive_log(message)
        agreement.settle()

    def finish(self) -> None:
        """Fair turns until nothing changes; a lost vote or wake-up leaves something pending."""
        for turn in range(500):
            for node in self.ranks[turn % 2 :]:  # rank 0 pauses every other time
                node.go_on(1 + turn % 3)
            for link in self.loaded():
                self.deliver(link)  # one at a time, so that messages of different ranks mix
            for node in self.ranks:
                node.look()
            idle = not any(node.program or node.pending or node.has_joined for node in self.ranks)
            if idle and not self.loaded() and all(node.is_asleep for node in self.ranks):
                return
        raise AssertionError(
            f"left: {[(list(node.program)[:2], list(node.pending), node.has_joined) for node in self.ranks]}"
        )

    def close(self) -> None:
        for node in self.ranks:
            if node.ballot is not None:
                node.ballot.release()
            os.close(node.wakeup)
        for memory in self.memories.values():
            memory.close()


@contextmanager
def host(
    programs: list[list[Step]],
    sets: dict[int, frozenset[int]] | None = None,
    cache: int = 64,
    hosts: list[str] | None = None,
    without: str = "",
) -> Iterator[SimulatedHosts]:
    world = SimulatedHosts(programs, sets or {}, cache, hosts, without)
    try:
        yield world
    finally:
        world.close()
