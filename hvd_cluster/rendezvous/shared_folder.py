"""Bootstrap through a folder that all hosts share, such as the home folder on most Slurm and MPI clusters.

Rank 0 writes a file with its addresses, the port and the secret of the store. Only this user may read the file, which
keeps the secret. Rank 0 removes it when all ranks have connected.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

from hvd_cluster.rendezvous.addresses import first_reachable, host_key, interface_addresses
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.communicator import own_address
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import JoinedStore, KeyValueServer
from hvd_cluster.rendezvous.sockets import ANY
from hvd_cluster.topology import Topology, join_address

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
    wanted = interface_addresses(interface.split(",")) if interface else []
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
                address = first_reachable(addresses, port, secret, min(5.0, deadline_s - time.monotonic()))
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
