from __future__ import annotations

from hvd_cluster.launch.placement import Slot, place_keeping_local_slots


def slots(*hosts: str) -> list[Slot]:
    return [Slot(index, host, host) for index, host in enumerate(hosts)]


def test_members_keep_the_order_of_their_seniority_as_ranks() -> None:
    placed = place_keeping_local_slots(slots("a", "b", "b", "a"), [0, 0, 1, 1])
    assert [(p.rank, p.slot.host_key, p.local_rank, p.local_size) for p in placed] == [
        (0, "a", 0, 2),
        (1, "a", 1, 2),
        (2, "b", 0, 2),
        (3, "b", 1, 2),
    ]


def test_a_new_worker_in_a_lower_slot_takes_the_lower_local_rank_but_not_rank_0() -> None:
    placed = place_keeping_local_slots(slots("a", "a", "b"), [1, 0, 0])  # the first is an old worker in slot 1
    assert [(p.rank, p.slot.index, p.local_rank) for p in placed] == [(0, 0, 1), (1, 1, 0), (2, 2, 0)]
    assert [(p.cross_rank, p.cross_size) for p in placed] == [(0, 1), (0, 2), (1, 2)]


def test_a_worker_that_is_left_alone_is_the_first_of_its_host() -> None:
    (placed,) = place_keeping_local_slots(slots("a"), [3])
    assert (placed.local_rank, placed.local_size) == (0, 1)


def test_assigned_gpus_are_visible_in_the_order_of_local_ranks_whatever_the_order_of_ranks() -> None:
    gpus = [("3", "4"), ("0", "1"), ("7",)]
    on_hosts = [Slot(i, host, host, own) for i, (host, own) in enumerate(zip("aab", gpus, strict=True))]
    placed = place_keeping_local_slots(on_hosts, [1, 0, 0])
    assert [(p.rank, p.local_rank, p.visible_devices) for p in placed] == [
        (0, 1, ("0", "3", "1", "4")),
        (1, 0, ("0", "3", "1", "4")),
        (2, 0, ("7",)),
    ]
    for member in placed:
        assert member.visible_devices[member.local_rank] == gpus[member.slot.index][0]
