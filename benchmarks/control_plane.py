"""The negotiation of 8 to 4096 simulated ranks over a simulated network: 25 us a hop, 10 Gbit/s at each host.

Every rank runs the real Negotiator, and the real Neighbours encode and sign what it says; only sockets and clock are
simulated. "Network" counts hops and bytes alone; "with CPU" adds what the code took on this machine (processor time of
the thread) and what the system calls of one message cost here. A cycle begins when all ranks submit at once and ends
when the last of them has read the decision.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import Report, Reports
from hvd_cluster.engine import tree
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.neighbours import Neighbours
from hvd_cluster.engine.request import Kind, Signature, TensorMeta
from hvd_cluster.engine.world import World
from hvd_cluster.rendezvous.session import Session
from hvd_cluster.topology import Topology

HOP_S = 25e-6
BITS_PER_S = 10e9
#: One hop between processes of a host: a Unix socket took 13 us (ENGINE-FACTS, "Waiting").
LOCAL_HOP_S = 13e-6
#: Ranks of a host that agree through shared memory: a barrier of 4 ranks on semaphores, twice (the same table).
SHARED_MEMORY_S = 2 * 25e-6
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
        return cls(statistics.median(times["send"]), statistics.median(times["receive"]))


class SimulatedLink:
    """One end of a connection: real signatures, no socket."""

    events = selectors.EVENT_READ
    _descriptors = itertools.count(1000)

    def __init__(self, *, accepts: bool) -> None:
        self._descriptor = next(self._descriptors)
        self.session = Session(b"secret of the simulation", accepts=accepts)
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
    """What the Neighbours register with; the simulation knows what has arrived."""

    def register(self, *_: Any) -> None:
        pass


@dataclass
class Node:
    """One rank."""

    rank: int
    host: int
    negotiator: Negotiator
    neighbours: Neighbours
    links: dict[int, SimulatedLink]
    is_root: bool
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
    """

    def __init__(self, hosts: list[int], costs: Costs, *, counts_cpu: bool) -> None:
        self.costs = costs if counts_cpu else Costs(0.0, 0.0)
        self.scale = float(counts_cpu)
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.transmit_free_s = dict.fromkeys(hosts, 0.0)
        self.receive_free_s = dict.fromkeys(hosts, 0.0)
        places = tree.plan([str(host) for host in hosts])
        ends: dict[tuple[int, int], SimulatedLink] = {}
        for place in places:
            for child in place.children:
                up, down = SimulatedLink(accepts=False), SimulatedLink(accepts=True)
                _shake_hands(up.session, down.session)
                ends[child, place.rank], ends[place.rank, child] = up, down
        members = {0: frozenset(range(len(hosts)))}
        self.nodes: list[Node] = []
        for place in places:
            links = {other: ends[place.rank, other] for other in place.neighbours}
            topology = Topology(rank=place.rank, size=len(hosts))
            world = World(topology, place, links, [], [], [], "", None, "")  # type: ignore[arg-type]
            node = Node(
                place.rank,
                hosts[place.rank],
                Negotiator(place, members, 1024, lambda: 128 << 20),
                Neighbours(world, NoPoll()),  # type: ignore[arg-type]
                links,
                place.parent is None,
            )
            for other, link in links.items():
                link.on_send = lambda data, node=node, other=other: self.send(node, other, data)  # type: ignore[misc]
            self.nodes.append(node)

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
            self.at(begin_s, lambda node=node: self.work(node, requests))  # type: ignore[misc]
        self.run()
        self.now_s = max(node.done_s for node in self.nodes)
        return self.now_s - begin_s

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
            node.neighbours.receive(source)
        node.waiting.clear()
        for name, signature in requests:
            node.negotiator.submit((0, name), signature)
        for source, (kind, content) in node.neighbours.take():
            if kind == "up":
                node.negotiator.hear(source, content)
            else:
                self.apply(node, content)
        if node.is_root:
            while entries := node.negotiator.take_log():
                self.apply(node, entries)
        elif (message := node.negotiator.take_up()) is not None:
            node.neighbours.send_up(("up", message))
        node.done_s = node.busy_until_s = self.now_s + self.elapsed()

    def apply(self, node: Node, entries: Any) -> None:
        node.neighbours.send_down(("log", entries))
        node.negotiator.apply(entries)


def _shake_hands(first: Session, second: Session) -> None:
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
    most_bytes: int


def simulate(hosts: list[int], num_requests: int, costs: Costs) -> Result:
    """Cycles of requests that the ranks know already, and the one before, in which they learn them."""
    signature = Signature(Kind.ALLREDUCE, (TensorMeta("float32", (1024, 1024), "cpu"),))
    requests = [(f"allreduce.encoder.layers.{i}.attention.weight", signature) for i in range(num_requests)]
    network = Simulation(hosts, costs, counts_cpu=False)
    network.cycle(requests)
    network_s = statistics.median(network.cycle(requests) for _ in range(2))
    real = Simulation(hosts, costs, counts_cpu=True)
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


def row(name: str, num_ranks: int, num_requests: int, result: Result, extra_s: float = 0.0) -> list[str]:
    times = [microseconds(value + extra_s) for value in (result.network_s, result.cpu_s, result.first_s)]
    return [
        name,
        f"{num_ranks}",
        f"{num_requests}",
        *times,
        f"{result.most_messages} ({result.mean_messages:.1f})",
        f"{result.most_bytes:,}",
    ]


def sizes(costs: Costs, ranks_per_host: int = 8) -> Report:
    """How the cycle grows with the job."""
    rows = []
    for num_ranks in (8, 64, 512, 4096):
        hosts = [rank // ranks_per_host for rank in range(num_ranks)]
        for num_requests in (1, 64):
            if (num_ranks, num_requests) != (4096, 64):  # a minute for a shape that nobody would choose
                result = simulate(hosts, num_requests, costs)
                rows.append(row("every rank in the tree", num_ranks, num_requests, result))
    for num_ranks in (8, 64, 512, 4096):
        hosts = list(range(num_ranks // ranks_per_host))
        for num_requests in (1, 64):
            result = simulate(hosts, num_requests, costs)
            rows.append(row("hosts in the tree (not built)", num_ranks, num_requests, result, SHARED_MEMORY_S))
    return Report(
        f"Control plane: one cycle of negotiation, {ranks_per_host} ranks a host",
        ("", "ranks", "requests", "network", "with CPU", "first time", "messages a rank, most (mean)", "bytes, most"),
        rows,
        [
            (
                '"Every rank in the tree" is what runs on several hosts. "Hosts in the tree" is what would be gained '
                f"if the ranks of each host agreed through shared memory ({microseconds(SHARED_MEMORY_S)} are added "
                "for it), as those of a job on one host do, and its leader alone spoke to other hosts."
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
            tree.FANOUT = fan_out  # type: ignore[misc]
            cells = [str(fan_out) + (" (the tree's)" if fan_out == before else "")]
            for num_ranks, num_requests in SHAPES:
                hosts = [rank // ranks_per_host for rank in range(num_ranks)]
                cells.append(microseconds(simulate(hosts, num_requests, costs).cpu_s))
            rows.append(cells)
    finally:
        tree.FANOUT = before  # type: ignore[misc]
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
