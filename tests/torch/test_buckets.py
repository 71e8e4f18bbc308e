"""Which gradients travel together."""

from __future__ import annotations

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


def test_nothing_makes_no_bucket() -> None:
    assert plan_buckets([], [], [], [], 128 * MIB) == []
