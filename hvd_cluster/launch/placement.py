"""Seats in, ranks out: who sits where in the world. Pure.

Ranks are contiguous on each host, and the host of seat 0 comes first, so that rank 0 is seat 0 wherever the launcher
put it. Hosts may offer different numbers of seats.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_cluster.topology import Topology


@dataclass(frozen=True)
class Seat:
    """A place for one worker, as a launcher found it."""

    #: The launcher's own index, e.g. a Spark partition; unique.
    index: int
    #: Equal for two seats if and only if they are on the same machine.
    host_key: str
    #: Name or address under which other hosts reach this one.
    address: str
    #: GPUs that the scheduler gave to this seat, as CUDA_VISIBLE_DEVICES spells them; the first is the worker's own.
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placement:
    """A seat and the indices of the worker on it; see :class:`hvd_cluster.topology.Topology` for each of them."""

    seat: Seat
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    #: The job's GPUs on this host: those that the workers own, in local_rank order, then further ones.
    visible_devices: tuple[str, ...] = ()

    def topology(
        self, *, rendezvous: str = "", secret: bytes = b"", master: str = "", job_id: str = "", generation: int = 0
    ) -> Topology:
        """The value that the worker on this seat is started with."""
        return Topology(
            rank=self.rank,
            size=self.size,
            local_rank=self.local_rank,
            local_size=self.local_size,
            cross_rank=self.cross_rank,
            cross_size=self.cross_size,
            host=self.seat.address,
            rendezvous=rendezvous,
            secret=secret,
            generation=generation,
            job_id=job_id,
            master=master,
            launcher="hvd_cluster",
        )

    def device_env(self) -> dict[str, str]:
        """What makes ``torch.cuda.set_device(local_rank)`` pick the worker's own GPU; empty without assigned GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.visible_devices)} if self.visible_devices else {}


def place(seats: Sequence[Seat]) -> list[Placement]:
    """Give every seat its indices.

    Returns:
        Placements in the order of their ranks.

    Raises:
        ValueError: no seats, an index twice, or GPUs of a host that do not come out as one per worker.
    """
    if not seats:
        raise ValueError("no seats: a job needs at least one worker")
    ordered = sorted(seats, key=lambda seat: seat.index)
    twice = {a.index for a, b in itertools.pairwise(ordered) if a.index == b.index}
    if twice:
        raise ValueError(f"seat indices are not unique: {sorted(twice)}")

    hosts: dict[str, list[Seat]] = {}  # in the order of each host's lowest index
    for seat in ordered:
        hosts.setdefault(seat.host_key, []).append(seat)

    placements: list[Placement] = []
    for host_index, on_host in enumerate(hosts.values()):
        devices = _visible_devices(on_host)
        for local_rank, seat in enumerate(on_host):
            peers = [index for index, others in enumerate(hosts.values()) if len(others) > local_rank]
            placements.append(
                Placement(
                    seat=seat,
                    rank=len(placements),
                    size=len(ordered),
                    local_rank=local_rank,
                    local_size=len(on_host),
                    cross_rank=peers.index(host_index),
                    cross_size=len(peers),
                    visible_devices=devices,
                )
            )
    return placements


def _visible_devices(on_host: Sequence[Seat]) -> tuple[str, ...]:
    """GPUs of one host, so that position ``local_rank`` holds the GPU which that worker owns."""
    without = [seat.index for seat in on_host if not seat.gpus]
    if len(without) == len(on_host):
        return ()
    address = on_host[0].address
    if without:
        raise ValueError(f"on host {address} seats {without} were assigned no GPU, but the others were")
    own = [seat.gpus[0] for seat in on_host]
    shared = sorted({gpu for gpu in own if own.count(gpu) > 1})
    if shared:
        owners = [seat.index for seat in on_host if seat.gpus[0] in shared]
        raise ValueError(
            f"on host {address} seats {owners} were assigned the same GPU ({', '.join(shared)}), but each worker needs "
            "one of its own: ask the scheduler for one whole GPU per worker"
        )
    further = [gpu for seat in on_host for gpu in seat.gpus[1:]]
    return tuple(dict.fromkeys(own + further))
