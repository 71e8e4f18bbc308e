"""Assigns ranks to slots: a computation only, without input or output.

Ranks are contiguous on each host, and the host of slot 0 comes first, so rank 0 is always on slot 0. Hosts may have
different numbers of slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_cluster.topology import Topology


@dataclass(frozen=True)
class Slot:
    """A place for one worker on a host."""

    #: A unique number, assigned by the launcher (for example, the Spark partition).
    index: int
    #: Equal for two slots if and only if they are on the same machine.
    host_key: str
    #: Name or address by which other hosts reach this one.
    address: str
    #: GPUs that the scheduler assigned to this slot, as in CUDA_VISIBLE_DEVICES; the worker owns the first.
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placement:
    """A slot and the indices of its worker.

    :class:`hvd_cluster.topology.Topology` describes each of them.
    """

    slot: Slot
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
        """The topology that the worker on this slot starts with."""
        return Topology(
            rank=self.rank,
            size=self.size,
            local_rank=self.local_rank,
            local_size=self.local_size,
            cross_rank=self.cross_rank,
            cross_size=self.cross_size,
            host=self.slot.address,
            rendezvous=rendezvous,
            secret=secret,
            generation=generation,
            job_id=job_id,
            master=master,
            launcher="hvd_cluster",
        )

    def device_env(self) -> dict[str, str]:
        """Variables that make ``torch.cuda.set_device(local_rank)`` select its GPU.

        The GPU is the worker's own; empty without GPUs.
        """
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.visible_devices)} if self.visible_devices else {}


def place(slots: Sequence[Slot]) -> list[Placement]:
    """Assign the indices of every slot.

    Returns:
        Placements in the order of their ranks.

    Raises:
        ValueError: there are no slots, two have the same index, or a host does not have one GPU for each worker.
    """
    if not slots:
        raise ValueError("no slots: a job needs at least one worker")
    ordered = sorted(slots, key=lambda slot: slot.index)
    twice = {a.index for a, b in itertools.pairwise(ordered) if a.index == b.index}
    if twice:
        raise ValueError(f"slot indices are not unique: {sorted(twice)}")

    hosts: dict[str, list[Slot]] = {}  # in the order of each host's lowest index
    for slot in ordered:
        hosts.setdefault(slot.host_key, []).append(slot)

    placements: list[Placement] = []
    for host_index, on_host in enumerate(hosts.values()):
        devices = _visible_devices(on_host)
        for local_rank, slot in enumerate(on_host):
            peers = [index for index, others in enumerate(hosts.values()) if len(others) > local_rank]
            placements.append(
                Placement(
                    slot=slot,
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


def place_keeping_local_slots(slots: Sequence[Slot], local_slots: Sequence[int]) -> list[Placement]:
    """Placements for an elastic job, whose workers keep their local slots.

    They keep them over many worlds. Ranks follow the order of the slots, as in :func:`place`. Local ranks follow the
    local slots: a worker that chose its GPU by its local rank must not share it with a new worker in a lower slot. GPUs
    that the launcher has assigned are visible in the order of local ranks.

    Args:
        slots: in order of seniority, with increasing indices.
        local_slots: the number of each slot on its machine.

    Returns:
        Placements in the order of their ranks.
    """
    # A worker whose death is not known yet may still hold the GPU of its successor; that is not an error.
    placements = place([replace(slot, gpus=()) for slot in slots])
    local_slot_of = {slot.index: number for slot, number in zip(slots, local_slots, strict=True)}
    gpus_of = {slot.index: slot.gpus for slot in slots}
    by_host: dict[str, list[Placement]] = {}
    for placement in placements:
        by_host.setdefault(placement.slot.host_key, []).append(placement)
    placed: dict[int, Placement] = {}
    for on_host in by_host.values():
        # on_host is in the order of local ranks: the n-th local slot gets the indices of local rank n.
        order = sorted(on_host, key=lambda placement: local_slot_of[placement.slot.index])
        gpus = [gpus_of[placement.slot.index] for placement in order]
        devices = [gpu for own in gpus for gpu in own[:1]] + [gpu for own in gpus for gpu in own[1:]]
        for indices, placement in zip(on_host, order, strict=True):
            placed[placement.rank] = replace(
                placement,
                local_rank=indices.local_rank,
                cross_rank=indices.cross_rank,
                cross_size=indices.cross_size,
                visible_devices=tuple(dict.fromkeys(devices)),
            )
    return [placed[rank] for rank in sorted(placed)]


def _visible_devices(on_host: Sequence[Slot]) -> tuple[str, ...]:
    """The GPUs of one host; position ``local_rank`` holds that worker's own."""
    without = [slot.index for slot in on_host if not slot.gpus]
    if len(without) == len(on_host):
        return ()
    address = on_host[0].address
    if without:
        raise ValueError(f"on host {address} slots {without} were assigned no GPU, but the others were")
    own = [slot.gpus[0] for slot in on_host]
    shared = sorted({gpu for gpu in own if own.count(gpu) > 1})
    if shared:
        owners = [slot.index for slot in on_host if slot.gpus[0] in shared]
        raise ValueError(
            f"on host {address} slots {owners} were assigned the same GPU ({', '.join(shared)}), but each worker needs "
            "one of its own: ask the scheduler for one whole GPU per worker"
        )
    further = [gpu for slot in on_host for gpu in slot.gpus[1:]]
    return tuple(dict.fromkeys(own + further))
