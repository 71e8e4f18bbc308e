"""Bootstrap under other launchers: rank 0 serves the key-value store.

Under torchrun it publishes the address in the agent's store, and on a platform that gives only MASTER_ADDR and
MASTER_PORT in a store that it opens there. Ranks on one host that MPI or Slurm started read it from an abstract Unix
socket, for which the kernel reports the user of the other end. Ranks on several hosts use MPI if the program has
imported mpi4py, otherwise a folder that all hosts share, such as the home folder on most clusters. There rank 0 writes
a file that only this user may read, and removes it when all ranks have connected.

The secret is published together with the address. Every client that reaches torch's store can read it there: on a
network that others share, use hvdrun.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import struct
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hvd_cluster.rendezvous.addresses import first_reachable, host_key, interface_addresses, pid_namespace
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.communicator import Communicator, join_store_over_mpi, own_address
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import JoinedStore, KeyValueServer
from hvd_cluster.rendezvous.sockets import ANY
from hvd_cluster.topology import PLATFORMS, Topology, join_address, split_address

#: How long a server may take to answer.
_ANSWER_S = 2.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


def join_store(
    topology: Topology, attempt: int, timeout_s: float, *, folder: str = "~/.hvd_cluster", interface: str = ""
) -> JoinedStore:
    """Agree on a key-value store with the other ranks.

    Args:
        topology: this rank's topology; returned unchanged if its launcher provides a store.
        attempt: how many times this process has called this function before.
        folder: shared by the hosts, for launchers that provide no other way.
        interface: rank 0's network interface to use then; by default any that the others reach.

    Raises:
        ConnectionError: the launcher provides no way to find the others, or rank 0 did not call this in time.
    """
    if topology.rendezvous:
        return JoinedStore(topology)
    label = f"hvd_cluster/{topology.job_id or _unnamed_job()}/{topology.generation}.{attempt}/{topology.world}"
    if topology.launcher == "torchrun" and topology.master:
        return _through_torch_store(topology, label, timeout_s, is_agents=True)
    if topology.launcher in PLATFORMS and not topology.world:
        return _through_torch_store(topology, label, timeout_s, is_agents=False)
    if topology.local_size == topology.size:
        return _through_kernel(topology, label, timeout_s)
    if not topology.world and (world := _mpi_world(topology)) is not None:
        joined = join_store_over_mpi(world, timeout_s, interface)
        # The local indices are the launcher's; MPI's name of the world is another one at each attempt.
        found = joined.topology
        return replace(joined, topology=replace(topology, rendezvous=found.rendezvous, secret=found.secret))
    if topology.job_id and topology.launcher != "torchrun":
        return join_store_in_folder(topology, label, folder, timeout_s, interface)
    launcher = topology.launcher or "an unknown launcher"
    raise ConnectionError(
        f"rank {topology.rank} of {topology.size} was started by {launcher}, which says nothing about how to reach the "
        "other hosts: start the job with hvdrun, torchrun or a launcher of hvd_cluster, or call "
        "hvd.init(comm=mpi4py.MPI.COMM_WORLD)"
    )


def _unnamed_job() -> str:
    """Name the job of a launcher that gives no name, by its parent process.

    All processes of the job on this host have the same parent.
    """
    parent = os.getppid()
    # Containers with the host's network share its abstract sockets, but may count processes for themselves. In a
    # container that was started for one rank, the launcher is not visible: the parent is 0 or the container's init.
    return f"parent-{parent}" if parent <= 1 else f"parent-{parent}-{pid_namespace()}"


def _mpi_world(topology: Topology) -> Communicator | None:
    """MPI's own world if the program already uses MPI; it is not initialised here."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    world: Communicator = mpi.COMM_WORLD
    return world if (world.Get_rank(), world.Get_size()) == (topology.rank, topology.size) else None


def _through_torch_store(topology: Topology, label: str, timeout_s: float, *, is_agents: bool) -> JoinedStore:
    """Meet in the TCPStore of torchrun's agent, or in one that rank 0 opens.

    Rank 0 closes its own when all ranks have read it.
    """
    host, port = split_address(topology.master)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(
            host,
            int(port),
            is_master=topology.rank == 0 and not is_agents,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # as of init_process_group(): before or after hvd.init(), at the same port
        )
    except RuntimeError as error:  # torch's DistNetworkError
        raise ConnectionError(
            f"rank {topology.rank} of {topology.size} (launcher: {topology.launcher}) cannot meet the others at "
            f"{topology.master}: {error}"
        ) from error
    if topology.rank == 0:
        joined, server = _serve(topology, _address_towards(host, int(port)))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(server.close)
            store.set(label, _described(joined.topology).decode())
            if not is_agents:
                try:
                    store.wait([f"{label}/read"], timeout)
                except RuntimeError as error:
                    count = store.add(f"{label}/readers", 0) + 1
                    raise ConnectionError(
                        f"only {count} of {topology.size} ranks called hvd.init() within {timeout_s:g} s"
                    ) from error
            on_failure.pop_all()
        return joined
    deadline_s = time.monotonic() + timeout_s
    try:
        described = store.get(label)
        # An agent keeps its store when the number of nodes changes, and does not count that as a restart: the entry may
        # still be that of the round before.
        while is_agents and not _is_served(_completed(topology, described)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            described = store.get(label)
        if not is_agents and store.add(f"{label}/readers", 1) == topology.size - 1:
            store.set(f"{label}/read", "")
    except RuntimeError as error:  # torch's DistStoreError
        raise ConnectionError(f"rank {topology.rank}: rank 0 did not call hvd.init() within {timeout_s:g} s") from error
    return JoinedStore(_completed(topology, described))


def _is_served(topology: Topology) -> bool:
    host, port = split_address(topology.rendezvous)
    try:
        first_reachable([host], int(port), topology.secret, _ANSWER_S)
    except ConnectionError:
        return False
    return True


def _through_kernel(topology: Topology, label: str, timeout_s: float) -> JoinedStore:
    address = f"\0{label}/{os.getuid()}".encode()
    deadline_s = time.monotonic() + timeout_s
    if topology.rank == 0:
        joined, server = _serve(topology, "127.0.0.1")
        with (
            contextlib.ExitStack() as on_failure,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            on_failure.callback(server.close)
            try:
                listener.bind(address)
            except OSError as error:
                raise ConnectionError(f"rank 0 cannot listen at the Unix socket {label}: {error}") from error
            listener.listen(topology.size)
            num_answered = 0
            while num_answered < topology.size - 1:
                listener.settimeout(max(0.01, deadline_s - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise ConnectionError(
                        f"only {num_answered + 1} of {topology.size} ranks called hvd.init() within {timeout_s:g} s"
                    ) from None
                with connection:
                    if _is_ours(connection):
                        connection.sendall(_described(joined.topology))
                        num_answered += 1
            on_failure.pop_all()
        return joined
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(address)
            except ConnectionRefusedError:
                if time.monotonic() > deadline_s:
                    raise ConnectionError(
                        f"rank {topology.rank}: rank 0 did not call hvd.init() within {timeout_s:g} s"
                    ) from None
                time.sleep(0.02)
                continue
            if not _is_ours(connection):
                raise ConnectionError(
                    f"rank {topology.rank}: the Unix socket {label} belongs to another user's process"
                )
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            described = b"".join(iter(lambda: connection.recv(4096), b""))
        return JoinedStore(_completed(topology, described))


def _serve(topology: Topology, host: str) -> tuple[JoinedStore, KeyValueServer]:
    secret = new_secret()
    server = KeyValueServer(secret, host)
    return JoinedStore(replace(topology, rendezvous=join_address(host, server.port), secret=secret), server), server


def _described(topology: Topology) -> bytes:
    return json.dumps([topology.rendezvous, topology.secret.hex()]).encode()


def _completed(topology: Topology, described: bytes) -> Topology:
    address, secret = json.loads(described)
    return replace(topology, rendezvous=address, secret=bytes.fromhex(secret))


def _is_ours(connection: socket.socket) -> bool:
    """Whether the kernel says that the peer is a process of this user or of root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid in (os.getuid(), 0)


def _address_towards(host: str, port: int) -> str:
    """The address of this host on its route to ``host``.

    The other ranks can probably reach it too.
    """
    with socket.create_connection((host, port), timeout=10) as probe:
        found = str(probe.getsockname()[0])
    if found.startswith("127.") and host not in ("localhost", found):
        # /etc/hosts of Debian gives this host's own name a loopback address.
        return interface_addresses()[0]
    return found


_POLL_S = 0.1


def join_store_in_folder(
    topology: Topology, label: str, folder: str, timeout_s: float, interface: str = ""
) -> JoinedStore:
    """Agree on a store with ranks on other hosts.

    Args:
        label: identifies this call; equal on all ranks, and never used before by this user.
        folder: on a file system that all hosts share.
        interface: rank 0's network interface to use; by default any that the others reach.

    Raises:
        ConnectionError: the folder cannot be used, or the others did not call this in time.
    """
    note = Path(folder).expanduser() / f"meeting-{hashlib.sha256(label.encode()).hexdigest()[:24]}.json"
    try:
        if topology.rank == 0:
            return _publish(topology, note, timeout_s, interface)
        return _connect(topology, note, timeout_s)
    except (OSError, TimeoutError) as error:
        raise ConnectionError(
            f"rank {topology.rank} of {topology.size} on {topology.host} did not meet the others in {timeout_s:g} s "
            f"in {note.parent}: {error}. Set HOROVOD_RENDEZVOUS_FOLDER to a folder that all hosts share; or start the "
            "job with hvdrun or torchrun, or call hvd.init(comm=mpi4py.MPI.COMM_WORLD)"
        ) from error


def _publish(topology: Topology, note: Path, timeout_s: float, interface: str) -> JoinedStore:
    secret = new_secret()
    note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = interface_addresses(interface) if interface else []
    server = KeyValueServer(secret, wanted or ANY)
    try:
        content = {
            "addresses": wanted if interface else interface_addresses(),
            "port": server.port,
            "secret": secret.hex(),
        }
        draft = note.with_suffix(f".{os.getpid()}")
        with open(draft, "w", encoding="ascii", opener=_private) as file:
            json.dump(content, file)
        draft.replace(note)  # atomic; also replaces the file of a job that died
        client = KeyValueClient(join_address(wanted[0] if wanted else "127.0.0.1", server.port), secret, timeout_s)
        try:
            keys = [f"connected/{rank}" for rank in range(1, topology.size)]
            answers = [json.loads(answer) for answer in client.get_many(keys, timeout_s)]
        finally:
            client.close()
            note.unlink(missing_ok=True)
    except BaseException:  # re-raised; the server must not keep running
        server.close()
        raise
    address = own_address([host_key(), *(key for key, _ in answers)], ["", *(address for _, address in answers)])
    return JoinedStore(replace(topology, rendezvous=join_address(address, server.port), secret=secret), server)


def _connect(topology: Topology, note: Path, timeout_s: float) -> JoinedStore:
    deadline_s = time.monotonic() + timeout_s
    reason = "rank 0 has written no file there"
    while time.monotonic() < deadline_s:
        content = _read(note)
        if content is not None:
            addresses, port, secret = content
            try:
                address = first_reachable(addresses, port, secret, min(_ANSWER_S, deadline_s - time.monotonic()))
            except ConnectionError as error:  # the file may be that of a job that died
                reason = str(error)
            else:
                rendezvous = join_address(address, port)
                client = KeyValueClient(rendezvous, secret, timeout_s)
                client.set(f"connected/{topology.rank}", json.dumps([host_key(), address]).encode())
                client.close()
                return JoinedStore(replace(topology, rendezvous=rendezvous, secret=secret))
        time.sleep(_POLL_S)
    raise TimeoutError(reason)


def _read(note: Path) -> tuple[list[str], int, bytes] | None:
    """What rank 0 has written, or None if it has not yet."""
    # Listing the folder makes NFS refresh its cache; a lookup of the file alone may be answered from the cache.
    if not note.parent.is_dir() or note not in note.parent.iterdir():
        return None
    try:
        with note.open(encoding="ascii") as file:
            status = os.fstat(file.fileno())
            content = json.load(file)
    except FileNotFoundError:
        return None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise OSError(f"{note} belongs to another user, or other users may read it")
    return content["addresses"], int(content["port"]), bytes.fromhex(content["secret"])


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
