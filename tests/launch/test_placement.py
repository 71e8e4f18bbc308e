from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.launch.placement import Placement, Slot, place


def slots(*host_keys: str) -> list[Slot]:
    return [Slot(index, key, f"{key}.example") for index, key in enumerate(host_keys)]


def indices(placement: Placement) -> tuple[int, ...]:
    p = placement
    return (p.rank, p.size, p.local_rank, p.local_size, p.cross_rank, p.cross_size)


def test_ranks_are_contiguous_per_host_and_the_host_of_slot_zero_comes_first() -> None:
    placed = place(slots("z", "a", "z", "a", "m"))
    assert [(p.slot.index, p.slot.host_key) for p in placed] == [(0, "z"), (2, "z"), (1, "a"), (3, "a"), (4, "m")]
    assert [indices(p) for p in placed] == [
        (0, 5, 0, 2, 0, 3),
        (1, 5, 1, 2, 0, 2),
        (2, 5, 0, 2, 1, 3),
        (3, 5, 1, 2, 1, 2),
        (4, 5, 0, 1, 2, 3),
    ]


def test_a_host_with_more_slots_than_the_others_has_local_ranks_of_its_own() -> None:
    placed = place(slots("a", "b", "b", "b"))
    assert [indices(p)[4:] for p in placed] == [(0, 2), (1, 2), (0, 1), (0, 1)]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20), st.randoms())
def test_placement_depends_on_the_slots_and_not_on_their_order(keys: list[str], random: object) -> None:
    ordered = slots(*keys)
    shuffled = ordered.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    placed = place(shuffled)
    assert placed == place(ordered)
    assert [p.rank for p in placed] == list(range(len(keys)))
    assert placed[0].slot.index == 0
    for p in placed:
        assert p.local_size == keys.count(p.slot.host_key)
        topology = p.topology(secret=b"s")  # checks that every index is below its count
        assert topology.host == p.slot.address


def test_every_local_rank_finds_its_own_gpu_at_its_own_position() -> None:
    placed = place(
        [Slot(0, "a", "a", ("3", "7")), Slot(1, "b", "b", ("0",)), Slot(2, "a", "a", ("1",)), Slot(3, "a", "a", ("0",))]
    )
    for p in placed:
        assert p.visible_devices[p.local_rank] == p.slot.gpus[0]
    assert placed[0].device_env() == {"CUDA_VISIBLE_DEVICES": "3,1,0,7"}
    assert placed[3].device_env() == {"CUDA_VISIBLE_DEVICES": "0"}


def test_without_assigned_gpus_the_environment_is_left_alone() -> None:
    assert place(slots("a", "a"))[1].device_env() == {}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([], "no slots"),
        ([Slot(0, "a", "a"), Slot(0, "b", "b")], "not unique"),
        ([Slot(0, "a", "a", ("0",)), Slot(1, "a", "a")], r"slots \[1\] were assigned no GPU"),
        ([Slot(0, "a", "a", ("0",)), Slot(1, "a", "a", ("0",))], "one whole GPU per worker"),
    ],
)
def test_slots_that_make_no_world_are_refused(bad: list[Slot], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        place(bad)
