"""The negotiation of 8 to 4096 simulated ranks over a simulated network: 25 us a hop, 10 Gbit/s at each host.

Every rank runs the real Agreement, with the real Ballot of its host, and the real TreeLinks encode and sign what it
says; only sockets, wake-ups and clock are simulated. "Network" counts hops, wake-ups and bytes alone; "with CPU" adds
what the code took on this machine (processor time of the thread) and what the system calls of one message cost here. A
cycle begins when all ranks submit at once and ends when the last of them has read the decision.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import mmap
import os
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import Report, Reports
from hvd_cluster.engine import tree
from hvd_cluster.engine.agreement import Agreement
from hvd_cluster.engine.messages import Bucket, Decision, LogMessage, ReportBatch
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.shared_memory.ballot import Ballot
from hvd_cluster.engine.signature import Key, Kind, Signature, TensorMeta
from hvd_cluster.engine.tree_links import TreeLinks
from hvd_cluster.engine.world import World
from hvd_cluster.rendezvous.session import SignedSession
from hvd_cluster.topology import Topology

HOP_S = 25e-6
BITS_PER_S = 10e9
#: One hop between processes of a host: a Unix socket took 13 us.
LOCAL_HOP_S = 13e-6
#: From the wakeup of a rank that sleeps to its first instruction: an eventfd.
WAKE_S = 6.5e-6
#: TCP, IP and Ethernet headers with preamble and gap.
HEADER_BYTES = 78
#: Ranks and requests for which fan-outs are compared.
SHAPES = ((512, 1), (512, 64), (4096, 1))
#: Cycles that are measured, after the one in which the requests become known.
CYCLES = 3


@dataclass
class Costs:
    """Processor time of one message's system calls."""

    send_s: float
    receive_s: float
    #: That of waking a rank of this host.
    ring_s: float = 0.0

    @classmethod
    def measured(cls) -> Costs:
        """On a TCP connection of this host."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        with ours, theirs, selectors.DefaultSelector() as selector:
            selector.register(theirs, selectors.EVENT_READ)
            times: dict[str, list[float]] = {"send": [], "receive": []}
            for _ in range(500):
                begin_s = time.thread_time()
                ours.send(b"x" * 200)
                sent_s = time.thread_time()
                selector.select()
                theirs.recv(1 << 18)
                times["send"].append(sent_s - begin_s)
                times["receive"].append(time.thread_time() - sent_s)
        wakeup = os.eventfd(0, os.EFD_NONBLOCK)
        begin_s = time.thread_time()
        for _ in range(500):
            os.eventfd_write(wakeup, 1)
        ring_s = (time.thread_time() - begin_s) / 500
        os.close(wakeup)
        return cls(statistics.median(times["send"]), statistics.median(times["receive"]), ring_s)


class SimulatedLink:
    """One end of a connection: real signatures, no socket."""

    events = selectors.EVENT_READ
    _descriptors = itertools.count(1000)

    def __init__(self, *, accepts: bool) -> None:
        self._descriptor = next(self._descriptors)
        self.session = SignedSession(b"secret of the simulation", accepts=accepts)
        self.kept: list[bytes] = []
        self.arrived = bytearray()
        self.on_send: Callable[[bytes], None] = lambda data: None

    def fileno(self) -> int:
        return self._descriptor

    def send(self, message: bytes) -> None:
        self.session.seal(message)
        data = bytes(self.session.outgoing)
        self.session.outgoing.clear()
        self.on_send(data)

    def receive(self) -> list[bytes]:
        data = bytes(self.arrived)
        self.arrived.clear()
        return self.session.feed(data)


class NoPoll:
    """What the TreeLinks register with; the simulation knows what has arrived."""

    def register(self, *_: Any) -> None:
        pass


class SimulatedBallot(Ballot):
    """The real ballot of a host, whose wake-ups the simulation delivers."""

    on_wake: Callable[[list[int]], None]

    def _wake(self, ranks: list[int]) -> None:
        if ranks:
            self.on_wake(ranks)


@dataclass
class Request:
    """What a rank has submitted."""

    key: Key
    signature: Signature
    epoch: int = -1


@dataclass
class Node:
    """One rank."""

    rank: int
    host: int
    tree_links: TreeLinks
    links: dict[int, SimulatedLink]
    ballot: SimulatedBallot | None
    agreement: Agreement = field(init=False)
    pending: dict[Key, Request] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    busy_until_s: float = 0.0
    is_awake: bool = False
    num_messages: int = 0
    num_bytes: int = 0
    done_s: float = 0.0


class Simulation:
    """Ranks of a job on a network.

    Args:
        hosts: the host of each rank.
        costs: what system calls cost.
        counts_cpu: whether the processor takes time at all.
        votes: the ranks of a host vote in shared memory; else each of them reports to its leader.
    """

    def __init__(self, hosts: list[int], costs: Costs, *, counts_cpu: bool, votes: bool = True) -> None:
        self.costs = costs if counts_cpu else Costs(0.0, 0.0)
        self.scale = float(counts_cpu)
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.transmit_free_s = dict.fromkeys(hosts, 0.0)
        self.receive_free_s = dict.fromkeys(hosts, 0.0)
        positions = tree.tree_positions([str(host) for host in hosts])
        ends: dict[tuple[int, int], SimulatedLink] = {}
        for position in positions:
            for child in position.children:
                up, down = SimulatedLink(accepts=False), SimulatedLink(accepts=True)
                _shake_hands(up.session, down.session)
                ends[child, position.rank], ends[position.rank, child] = up, down
        self.members = {0: frozenset(range(len(hosts)))}
        self.memories: dict[int, mmap.mmap] = {}
        self.nodes: list[Node] = []
        for position in positions:
            parent = [] if position.parent is None else [position.parent]
            links = {other: ends[position.rank, other] for other in [*parent, *position.children]}
            topology = Topology(rank=position.rank, size=len(hosts))
            world = World(topology, position, links, [], [], [], [], "", None, "")  # type: ignore[arg-type]
            negotiator = Negotiator(position, self.members, 1024, lambda: 128 << 20)
            ballot = (
                self.ballot(position, hosts[position.rank], negotiator)
                if votes and len(position.host_ranks) > 1
                else None
            )
            node = Node(position.rank, hosts[position.rank], TreeLinks(world, NoPoll()), links, ballot)  # type: ignore[arg-type]
            node.agreement = self.agreement(position, node, negotiator)
            for other, link in links.items():
                link.on_send = lambda data, node=node, other=other: self.send(node, other, data)
            self.nodes.append(node)

    def ballot(self, position: tree.TreePosition, host: int, negotiator: Negotiator) -> SimulatedBallot:
        here = position.host_ranks
        if host not in self.memories:
            self.memories[host] = mmap.mmap(-1, Ballot.num_bytes(len(here)))
        ballot = SimulatedBallot(
            self.memories[host],
            0,
            ranks=here,
            index=here.index(position.rank),
            wakeups=[-1] * len(here),
            plan=negotiator.plan if len(here) == len(self.members[0]) else None,
            check=lambda wait=None: None,
            timeout_s=60.0,
            spins=False,
        )
        ballot.on_wake = lambda indices: self.wake([here[index] for index in indices])
        return ballot

    def agreement(self, position: tree.TreePosition, node: Node, negotiator: Negotiator) -> Agreement:
        readers = list(position.children) if node.ballot is None else position.remote_children

        def execute(decision: Decision) -> None:
            assert isinstance(decision, Bucket)
            for key, _ in decision.requests:
                del node.pending[key]

        return Agreement(
            negotiator,
            node.ballot,
            position=position,
            quorum=lambda _: len(position.host_ranks),
            pending=lambda: node.pending,
            send_up=node.tree_links.send_up,
            send_down=lambda entries: node.tree_links.send_down(LogMessage(entries), readers),
            execute=execute,
        )

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), action))

    def run(self) -> None:
        # A collection walks over the objects of all simulated ranks, and would be charged to one of them.
        gc.collect()
        gc.disable()
        try:
            while self.events:
                self.now_s, _, action = heapq.heappop(self.events)
                action()
        finally:
            gc.enable()

    def cycle(self, requests: Iterable[tuple[str, Signature]]) -> float:
        """All ranks submit ``requests`` now; returns seconds until the last has read the decision."""
        begin_s = self.now_s
        requests = list(requests)
        for node in self.nodes:
            node.num_messages = node.num_bytes = 0
            self.at(begin_s, lambda node=node: self.work(node, requests))
        self.run()
        assert not any(node.pending for node in self.nodes)
        self.now_s = max(node.done_s for node in self.nodes)
        return self.now_s - begin_s

    def close(self) -> None:
        """Give the memory back."""
        for node in self.nodes:
            if node.ballot is not None:
                node.ballot.release()
        for memory in self.memories.values():
            memory.close()

    def send(self, node: Node, other: int, data: bytes) -> None:
        self.sent_costs_s += self.costs.send_s
        leaves_s = self.work_begin_s + self.elapsed()
        num_bytes = len(data) + HEADER_BYTES * math.ceil(len(data) / 1448)
        node.num_messages += 1
        node.num_bytes += num_bytes
        peer = self.nodes[other]
        if peer.host == node.host:
            arrives_s = leaves_s + LOCAL_HOP_S
        else:
            wire_s = num_bytes * 8 / BITS_PER_S
            begin_s = max(leaves_s, self.transmit_free_s[node.host])
            self.transmit_free_s[node.host] = begin_s + wire_s
            # The first bit arrives after the hop; a busy receiver lets it wait.
            arrives_s = max(begin_s + HOP_S, self.receive_free_s[peer.host]) + wire_s
            self.receive_free_s[peer.host] = arrives_s
        self.at(arrives_s, lambda: self.arrive(peer, node.rank, data))

    def arrive(self, node: Node, source: int, data: bytes) -> None:
        node.links[source].arrived += data
        node.waiting.add(source)
        self.rouse(node)

    def wake(self, ranks: list[int]) -> None:
        """Ring for ranks of this host."""
        self.sent_costs_s += self.costs.ring_s * len(ranks)
        for rank in ranks:
            node = self.nodes[rank]
            self.at(self.work_begin_s + self.elapsed() + WAKE_S, lambda node=node: self.rouse(node))

    def rouse(self, node: Node) -> None:
        if not node.is_awake:
            node.is_awake = True
            self.at(max(self.now_s, node.busy_until_s), lambda: self.work(node, []))

    def elapsed(self) -> float:
        return self.scale * (time.thread_time() - self.cpu_begin_s) + self.sent_costs_s

    def work(self, node: Node, requests: list[tuple[str, Signature]]) -> None:
        """One turn of the rank's engine: what has arrived, what was submitted, what goes out."""
        if node.busy_until_s > self.now_s:
            self.at(node.busy_until_s, lambda: self.work(node, requests))
            return
        node.is_awake = False
        self.work_begin_s, self.sent_costs_s = self.now_s, self.costs.receive_s * len(node.waiting)
        self.cpu_begin_s = time.thread_time()
        for source in sorted(node.waiting):
            node.tree_links.receive(source)
        node.waiting.clear()
        submitted = [Request((0, name), signature) for name, signature in requests]
        node.pending |= {request.key: request for request in submitted}
        was_pending = bool(node.pending)
        node.agreement.submit(submitted)
        for source, message in node.tree_links.take():
            if isinstance(message, ReportBatch):
                node.agreement.receive(source, message)
            elif isinstance(message, LogMessage):
                node.agreement.receive_log(message.entries)
        node.agreement.settle()
        while node.ballot is not None and not node.ballot.may_sleep():
            node.agreement.settle()
        node.busy_until_s = self.now_s + self.elapsed()
        if was_pending:
            node.done_s = node.busy_until_s


def _shake_hands(first: SignedSession, second: SignedSession) -> None:
    while not (first.established and second.established):
        for here, there in ((first, second), (second, first)):
            data = bytes(here.outgoing)
            here.outgoing.clear()
            there.feed(data)


@dataclass(frozen=True)
class Result:
    """A cycle in numbers."""

    network_s: float
    cpu_s: float
    first_s: float
    most_messages: int
    mean_messages: float
    max_bytes: int


def simulate(hosts: list[int], num_requests: int, costs: Costs, *, votes: bool = True) -> Result:
    """Cycles of requests that the ranks know already, and the one before, in which they learn them."""
    signature = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (1024, 1024), "cpu"),))
    requests = [(f"allreduce.encoder.layers.{i}.attention.weight", signature) for i in range(num_requests)]
    with closing(Simulation(hosts, costs, counts_cpu=False, votes=votes)) as network:
        network.cycle(requests)
        network_s = statistics.median(network.cycle(requests) for _ in range(2))
    with closing(Simulation(hosts, costs, counts_cpu=True, votes=votes)) as real:
        first_s = real.cycle(requests)
        cpu_s = statistics.median(real.cycle(requests) for _ in range(CYCLES))
    messages = [node.num_messages for node in real.nodes]
    return Result(
        network_s,
        cpu_s,
        first_s,
        max(messages),
        statistics.fmean(messages),
        max(node.num_bytes for node in real.nodes),
    )


def microseconds(value_s: float) -> str:
    return f"{value_s * 1e6:,.0f} us"


def row(name: str, num_ranks: int, num_requests: int, result: Result) -> list[str]:
    times = [microseconds(value) for value in (result.network_s, result.cpu_s, result.first_s)]
    return [
        name,
        f"{num_ranks}",
        f"{num_requests}",
        *times,
        f"{result.most_messages} ({result.mean_messages:.1f})",
        f"{result.max_bytes:,}",
    ]


def sizes(costs: Costs, ranks_per_host: int = 8) -> Report:
    """How the cycle grows with the job."""
    rows = []
    for name, votes in (("hosts that vote", True), ("no shared memory", False)):
        for num_ranks in (8, 64, 512, 4096):
            hosts = [rank // ranks_per_host for rank in range(num_ranks)]
            for num_requests in (1, 64):
                if votes or (num_ranks, num_requests) != (4096, 64):  # a minute, for a shape that no job has
                    result = simulate(hosts, num_requests, costs, votes=votes)
                    rows.append(row(name, num_ranks, num_requests, result))
    return Report(
        f"Control plane: one cycle of negotiation, {ranks_per_host} ranks a host",
        ("", "ranks", "requests", "network", "with CPU", "first time", "messages a rank, most (mean)", "bytes, most"),
        rows,
        [
            (
                '"Hosts that vote" is the default: the ranks of each host vote in shared memory, and their leaders '
                'report to each other. With "no shared memory" (HOROVOD_SHARED_MEMORY=0, or where it cannot be had), '
                "every rank reports to the leader of its host over a connection. The first time of a request it is "
                "reported in either case."
            ),
            (
                f"System calls of one message here: {microseconds(costs.send_s)} to send, "
                f"{microseconds(costs.receive_s)} to receive."
            ),
        ],
    )


def fan_outs(costs: Costs, ranks_per_host: int = 8) -> Report:
    """Which fan-out of the tree over hosts is best for 512 and 4096 ranks."""
    rows = []
    before = tree.FANOUT
    try:
        for fan_out in (2, 4, 6, 8, 12, 16, 64):
            tree.FANOUT = fan_out
            cells = [str(fan_out) + (" (the tree's)" if fan_out == before else "")]
            for num_ranks, num_requests in SHAPES:
                hosts = [rank // ranks_per_host for rank in range(num_ranks)]
                cells.append(microseconds(simulate(hosts, num_requests, costs).cpu_s))
            rows.append(cells)
    finally:
        tree.FANOUT = before
    return Report(
        "Control plane: the fan-out of the tree over hosts, with CPU",
        ("fan-out", *(f"{num_ranks} ranks, requests: {num_requests}" for num_ranks, num_requests in SHAPES)),
        rows,
    )


def measure() -> Reports:
    costs = Costs.measured()
    return Reports([sizes(costs), fan_outs(costs)])


if __name__ == "__main__":
    sys.stdout.write(measure().markdown())
