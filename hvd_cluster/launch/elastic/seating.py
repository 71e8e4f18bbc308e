"""The indices of the members of a world of an elastic job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvd_cluster.launch.placement import Placement, Seat, place


def seat_members(seats: Sequence[Seat], slots: Sequence[int]) -> list[Placement]:
    """Placements for seats whose workers keep their slot on their host over many worlds.

    Ranks follow the order of the seats, as :func:`~hvd_cluster.launch.placement.place` says. Local ranks follow the
    slots: a worker that took its GPU by its local rank, and a new one in a free slot below it, are not to meet on one.
    GPUs that the launcher has assigned are visible in the order of local ranks.

    Args:
        seats: in the order of seniority, their indices rising.
        slots: the slot of each on its machine.

    Returns:
        Placements in the order of their ranks.
    """
    # A worker whose death is not known yet may seem to hold the GPU of the one in its place: that is no error.
    placements = place([replace(seat, gpus=()) for seat in seats])
    slot_of = {seat.index: slot for seat, slot in zip(seats, slots, strict=True)}
    gpus_of = {seat.index: seat.gpus for seat in seats}
    by_host: dict[str, list[Placement]] = {}
    for placement in placements:
        by_host.setdefault(placement.seat.host_key, []).append(placement)
    seated: dict[int, Placement] = {}
    for on_host in by_host.values():
        # on_host is in the order of local ranks: the n-th slot gets the indices of local rank n.
        order = sorted(on_host, key=lambda placement: slot_of[placement.seat.index])
        gpus = [gpus_of[placement.seat.index] for placement in order]
        devices = [gpu for own in gpus for gpu in own[:1]] + [gpu for own in gpus for gpu in own[1:]]
        for indices, placement in zip(on_host, order, strict=True):
            seated[placement.rank] = replace(
                placement,
                local_rank=indices.local_rank,
                cross_rank=indices.cross_rank,
                cross_size=indices.cross_size,
                visible_devices=tuple(dict.fromkeys(devices)),
            )
    return [seated[rank] for rank in sorted(seated)]
