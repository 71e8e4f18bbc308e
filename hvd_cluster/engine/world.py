"""Assembly of a world: ranks meet in the store, and connect along the tree."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_cluster.engine import tree
from hvd_cluster.engine.interrupts import interrupts
from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.addresses import host_key, interface_addresses, pid_namespace
from hvd_cluster.rendezvous.bootstrap import join_store
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.link import Link
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.sockets import detect_dead_host
from hvd_cluster.settings import Settings
from hvd_cluster.topology import PLATFORMS, Topology, join_address

logger = logging.getLogger(__name__)

#: How many characters are shown of a value that ranks must agree on.
_MAX_TERM_CHARACTERS = 200
#: How many missing ranks are listed.
_MAX_MISSING = 20
#: How many connections may be unauthenticated; beyond that the oldest are closed.
_MAX_UNKNOWN = 64
#: Seconds until the next attempt after the parent has closed the connection.
_RECONNECT_S = 0.05


@dataclass
class World:
    """One agreed set of workers, seen from one of them."""

    topology: Topology
    tree_position: tree.TreePosition
    #: The connections to the parent and the children in the tree, by rank.
    links: dict[int, Link]
    #: For each rank, the name of its host, for messages.
    hosts: list[str]
    #: For each rank, a string that is equal for ranks that may share memory.
    host_keys: list[str]
    #: For each rank, its process id, or 0 for a rank that this one cannot look up: on another host or in a container.
    pids: list[int]
    #: For each rank, its local rank and local size.
    local_indices: list[tuple[int, int]]
    #: This rank's address that reaches the others.
    address: str
    #: The job's store; None in a world of one.
    client: KeyValueClient | None
    #: Keys of this world start with this.
    prefix: str
    #: The store's server, if the launcher is not ours and this rank serves it.
    server: KeyValueServer | None = None

    @property
    def is_homogeneous(self) -> bool:
        """True if every host has the same number of ranks."""
        return len({count for _, count in self.local_indices}) == 1

    def own_path(self, path: str) -> str:
        """Where this world writes the file ``path``, to keep that of an earlier world.

        In later worlds of an elastic job, ``run.json`` becomes ``run.generation-3.json``; "" stays "".
        """
        generation = self.topology.generation
        if not path or generation <= 0:
            return path
        file = Path(path)
        return str(file.with_name(f"{file.stem}.generation-{generation}{file.suffix}"))

    def close(self) -> None:
        """Close the connections, the store's client and its server."""
        for link in self.links.values():
            link.close()
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.close()


def assemble(topology: Topology, settings: Settings, attempt: int, terms: Mapping[str, object] | None = None) -> World:
    """Meet the other ranks, and connect to this one's parent and children.

    Args:
        topology: this rank's position.
        settings: the timeout and the network interface are read.
        attempt: how many worlds of this generation this process has assembled before; equal on all ranks.
        terms: what else must be equal on all ranks, by the name that users know.

    Raises:
        ConnectionError: the store or a linked rank could not be reached in time.
        ValueError: the ranks differ in their terms; raised on all of them.
    """
    if topology.size == 1:
        return World(
            topology,
            tree.tree_positions(["here"])[0],
            {},
            [topology.host],
            ["here"],
            [os.getpid()],
            [(0, 1)],
            "127.0.0.1",
            None,
            "",
        )
    timeout_s = settings.gloo_timeout_s
    joined = join_store(
        topology, attempt, timeout_s, folder=settings.rendezvous_folder, interface=settings.gloo_interface
    )
    topology = joined.topology
    prefix = f"world/{topology.generation}.{attempt}{topology.world}/"
    with ExitStack() as on_failure:
        if joined.server is not None:
            on_failure.callback(joined.server.close)
        client = KeyValueClient(topology.rendezvous, topology.secret, timeout_s)
        on_failure.callback(client.close)
        client.watch = interrupts.check
        address = interface_address(settings.gloo_interface) if settings.gloo_interface else client.local_host
        links: dict[int, Link] = {}
        with _listening(address) as listener:
            members = _meet(client, prefix, topology, address, listener.getsockname()[1], terms or {})
            _check_terms(members)
            host_keys = [member["host_key"] for member in members]
            local_indices = [(member["local_rank"], member["local_size"]) for member in members]
            # The launcher's local indices also count ranks that are not in this world; a platform gives none.
            if topology.world or topology.launcher in PLATFORMS:
                all_ranks = [
                    replace(topology, rank=rank).with_local_indices(host_keys) for rank in range(topology.size)
                ]
                local_indices = [(one.local_rank, one.local_size) for one in all_ranks]
                topology = all_ranks[topology.rank]
            elif topology.launcher != "hvd_cluster":  # other launchers may give a rank too little information
                topology = topology.with_cross_indices([local_rank for local_rank, _ in local_indices])
            tree_position = tree.tree_positions(host_keys)[topology.rank]
            if tree_position.parent is not None:
                parent = members[tree_position.parent]
                links[tree_position.parent] = _connect(parent["address"], parent["port"], topology, timeout_s)
                on_failure.callback(links[tree_position.parent].close)
            links |= _accept(listener, topology, set(tree_position.children), timeout_s, members)
        on_failure.pop_all()
    namespace = _pid_namespace()
    return World(
        topology=topology,
        tree_position=tree_position,
        links=links,
        hosts=[member["host"] for member in members],
        host_keys=host_keys,
        pids=[member["pid"] if member["pid_namespace"] == namespace != "" else 0 for member in members],
        local_indices=local_indices,
        address=address,
        client=client,
        prefix=prefix,
        server=joined.server,
    )


def interface_address(interface: str) -> str:
    """The address of a network interface, e.g. "eth0".

    Raises:
        ConnectionError: there is no such interface, or it has no address.
    """
    for address in interface_addresses(interface):
        return address
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise ConnectionError(
        f"HOROVOD_GLOO_IFACE={interface!r} does not name an interface with an address; this host has: {names}"
    )


@contextmanager
def _listening(address: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as listener:
        yield listener


def _meet(
    client: KeyValueClient, prefix: str, topology: Topology, address: str, port: int, terms: Mapping[str, object]
) -> list[dict[str, Any]]:
    """What every rank publishes, by rank. Rank 0 collects it: 2n messages, not n * n.

    Raises:
        ConnectionError: some ranks did not come in time; it names them, on every rank.
    """
    me = {
        "host_key": host_key(),
        "host": topology.host,
        "address": address,
        "port": port,
        "pid": os.getpid(),
        "pid_namespace": _pid_namespace(),
        "local_rank": topology.local_rank,
        "local_size": topology.local_size,
        "terms": {name: _short(str(value)) for name, value in terms.items()},
    }
    client.set(f"{prefix}member/{topology.rank}", json.dumps(me).encode())
    keys = [f"{prefix}member/{rank}" for rank in range(topology.size)]

    def missing() -> list[int]:
        return [rank for rank, key in enumerate(keys) if not client.check([key])]

    if topology.rank == 0:
        try:
            table = b"[" + b",".join(client.get_many(keys)) + b"]"
        except TimeoutError:
            if interrupts.has_come:  # raised by a signal handler: the other ranks wait on
                raise
            table = json.dumps({"missing": missing()}).encode()
        client.set(f"{prefix}members", table)
    try:
        members = json.loads(client.get(f"{prefix}members", client.timeout_s + 5))
    except TimeoutError:  # rank 0 is missing too, or came much later
        if interrupts.has_come:
            raise
        members = {"missing": missing()}
    if isinstance(members, dict):
        late = members["missing"]
        listed = ", ".join(map(str, late[:_MAX_MISSING])) + (", ..." if len(late) > _MAX_MISSING else "")
        raise ConnectionError(
            f"not all of the {topology.size} ranks called hvd.init() within {client.timeout_s:g} s. Missing: {listed}; "
            "such a rank still imports or loads data, or has ended. HOROVOD_GLOO_TIMEOUT_SECONDS sets how long to wait"
        )
    return list(members)


def _pid_namespace() -> str:
    """Name the namespace of process ids that this process is in; empty if unknown."""
    namespace = pid_namespace()
    return namespace and f"{host_key()} {namespace}"


def _short(text: str) -> str:
    """``text``, or its beginning and a hash: rank 0 sends all texts to all ranks."""
    if len(text) <= _MAX_TERM_CHARACTERS:
        return text
    return f"{text[:_MAX_TERM_CHARACTERS]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _check_terms(members: list[dict[str, Any]]) -> None:
    for rank, member in enumerate(members):
        for name, value in members[0]["terms"].items():
            if member["terms"].get(name) != value:
                raise ValueError(
                    f"{name} must be equal on all ranks, but is {value} on rank 0 ({members[0]['host']}) and "
                    f"{member['terms'].get(name)} on rank {rank} ({member['host']})"
                )


def _connect(address: str, port: int, topology: Topology, timeout_s: float) -> Link:
    """Connect to the parent and identify this rank; retry while its queue is full."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0.01, deadline_s - time.monotonic())
        try:
            sock = socket.create_connection((address, port), timeout=left_s)
        except OSError as error:
            raise ConnectionError(
                f"rank {topology.rank} cannot reach its leader at {join_address(address, port)} ({error}): the hosts "
                "need open ports among each other; HOROVOD_GLOO_IFACE names the interface to use"
            ) from error
        detect_dead_host(sock)
        link = Link(sock, topology.secret, accepts=False)
        try:
            link.send(json.dumps(topology.rank).encode())
            _await_welcome(link, left_s)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            link.close()
            if time.monotonic() >= deadline_s:
                raise ConnectionError(f"the parent closed the connection during start-up: {error}") from error
            time.sleep(_RECONNECT_S)
        except BaseException:  # raised again: the connection would leak
            link.close()
            raise
        else:
            return link


def _accept(
    listener: socket.socket, topology: Topology, expected: set[int], timeout_s: float, members: list[dict[str, Any]]
) -> dict[int, Link]:
    """Accept the connections of all children; others are dropped."""
    links: dict[int, Link] = {}
    unknown: list[Link] = []
    deadline_s = time.monotonic() + timeout_s
    listener.setblocking(False)
    while set(links) != expected:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            missing = sorted(expected - set(links))
            raise ConnectionError(
                f"rank {topology.rank} waited {timeout_s:g} s for "
                + ", ".join(f"rank {rank} ({members[rank]['host']})" for rank in missing)
                + " to connect; HOROVOD_GLOO_TIMEOUT_SECONDS sets how long to wait"
            )
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            for link in unknown:
                selector.register(link, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(left_s)]
        if listener in ready:
            with suppress(OSError):  # a connection that has ended already
                sock, _ = listener.accept()
                unknown.append(Link(sock, topology.secret, accepts=True))
                detect_dead_host(sock)
                unknown[-1].flush()
            while len(unknown) > _MAX_UNKNOWN + len(expected):
                unknown.pop(0).close()
        for link in [link for link in unknown if link in ready]:
            try:
                messages = link.receive()
            except (EOFError, AuthenticationError) as error:
                logger.info("rank %d dropped a connection during start-up: %s", topology.rank, error)
                messages = []
                unknown.remove(link)
                link.close()
            if messages:
                unknown.remove(link)
                links[int(json.loads(messages[0]))] = link
                link.kept += messages[1:]
                with suppress(OSError):  # the next read fails
                    link.send(b"welcome")
    for link in unknown:
        link.close()
    return links


def _await_welcome(link: Link, timeout_s: float) -> None:
    """Wait until the parent knows this rank and reads messages of the engine.

    Raises:
        ConnectionError: it did not answer in time.
        EOFError: it closed the connection.
    """
    deadline_s = time.monotonic() + timeout_s
    link.flush()
    while True:
        with selectors.DefaultSelector() as selector:
            selector.register(link, link.events)
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise ConnectionError(f"the parent did not answer within {timeout_s:g} s")
        if messages := link.receive():
            link.kept += messages[1:]
            return
