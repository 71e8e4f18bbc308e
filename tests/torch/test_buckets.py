"""Which gradients travel together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.torch.buckets import MIB, plan_buckets


def test_the_first_bucket_is_small_and_each_one_twice_as_long_as_the_one_before_up_to_a_bound() -> None:
    sizes = [MIB // 2] * 180
    buckets = plan_buckets(range(180), sizes, [0] * 180, [], 128 * MIB)
    assert [len(bucket) for bucket in buckets] == [2, 4, 8, 16, 32, 50, 50, 18]
    assert [number for bucket in buckets for number in bucket] == list(range(180))


def test_a_large_gradient_has_a_bucket_of_its_own() -> None:
    assert plan_buckets([2, 1, 0], [10, 64 * MIB, 10], [0, 0, 0], [], 128 * MIB) == [[2], [1], [0]]


def test_the_fusion_threshold_bounds_buckets_and_zero_turns_them_off() -> None:
    assert plan_buckets(range(4), [100] * 4, [0] * 4, [], 250) == [[0, 1], [2, 3]]
    assert plan_buckets(range(3), [100] * 3, [0] * 3, [], 0) == [[0], [1], [2]]


def test_families_do_not_mix_and_buckets_stand_in_the_order_of_their_last_gradient() -> None:
    buckets = plan_buckets(range(5), [10] * 5, ["half", "full", "half", "half", "full"], [], 128 * MIB)
    assert buckets == [[0, 2, 3], [1, 4]]
    assert plan_buckets([0, 1, 2], [10] * 3, [0, 1, 0], [], 128 * MIB) == [[1], [0, 2]]


def test_a_group_of_the_user_is_one_bucket_whatever_its_size() -> None:
    buckets = plan_buckets(range(5), [9 * MIB] * 5, [0] * 5, [[0, 3], [4, 1]], 128 * MIB)
    assert buckets == [[2], [0, 3], [1, 4]]


@given(
    gradients=st.lists(st.tuples(st.integers(1, 6 * MIB), st.sampled_from(["half", "full"])), min_size=1, max_size=60),
    num_grouped=st.integers(0, 4),
    threshold=st.integers(0, 128 * MIB),
)
def test_any_threshold_that_holds_the_largest_bucket_makes_the_same_buckets(
    gradients: list[tuple[int, str]], num_grouped: int, threshold: int
) -> None:
    # Autotune counts on it: what it has measured with these buckets is what a job gets that starts with its threshold.
    sizes, families = [size for size, _ in gradients], [family for _, family in gradients]
    order, groups = range(len(gradients)), [[*range(min(num_grouped, len(gradients)))]]
    buckets = plan_buckets(order, sizes, families, groups, threshold)
    packed = max((sum(sizes[number] for number in bucket) for bucket in buckets if len(bucket) > 1), default=0)
    for other in (min(packed, threshold), (packed + threshold) // 2 if packed < threshold else threshold):
        assert plan_buckets(order, sizes, families, groups, other) == buckets


def test_nothing_makes_no_bucket() -> None:
    assert plan_buckets([], [], [], [], 128 * MIB) == []
