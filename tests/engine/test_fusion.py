"""Which requests share a bucket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.engine.fusion import aligned, group_indices, plan_buckets, split_into_requests
from hvd_cluster.engine.signature import Kind, ReduceOp, Signature, TensorMeta


def allreduce_of(num_elements: int, dtype: str = "float32", device: str = "cpu", **rest: object) -> Signature:
    return Signature(Kind.ALLREDUCE, (TensorMeta(dtype, (num_elements,), device),), **rest)  # type: ignore[arg-type]


def test_equal_small_allreduces_share_a_bucket_until_it_is_full() -> None:
    requests = [(0, allreduce_of(16))] * 5  # 64 bytes each
    assert plan_buckets(requests, 192) == [[0, 1, 2], [3, 4]]


def test_what_one_call_cannot_serve_stays_apart() -> None:
    requests = [
        (0, allreduce_of(4)),
        (0, allreduce_of(4, dtype="float64")),
        (0, allreduce_of(4, op=ReduceOp.MAX)),
        (0, allreduce_of(4, prescale=0.5)),
        (0, allreduce_of(4, device="cuda")),
        (1, allreduce_of(4)),
        (0, allreduce_of(4)),
    ]
    assert plan_buckets(requests, 1 << 20) == [[0, 6], [1], [2], [3], [4], [5]]


def test_broadcasts_of_one_root_share_a_bucket_whatever_their_types() -> None:
    def broadcast(dtype: str, root: int) -> Signature:
        return Signature(Kind.BROADCAST, (TensorMeta(dtype, (3,), "cpu"),), root=root)

    requests = [(0, broadcast("int8", 0)), (0, broadcast("float64", 0)), (0, broadcast("int8", 1))]
    assert plan_buckets(requests, 1 << 20) == [[0, 1], [2]]


def test_a_threshold_of_zero_turns_fusion_off() -> None:
    assert plan_buckets([(0, allreduce_of(1))] * 3, 0) == [[0], [1], [2]]


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(0, 2000))
def test_no_bucket_is_larger_than_the_threshold_and_nothing_is_lost(lengths: list[int], threshold: int) -> None:
    requests = [(0, allreduce_of(length)) for length in lengths]
    buckets = plan_buckets(requests, threshold)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len(bucket) == 1 or sum(aligned(lengths[index] * 4) for index in bucket) <= threshold


def test_the_rest_fills_requests_in_its_order_and_a_large_tensor_travels_alone() -> None:
    assert split_into_requests([4, 4, 4, 20, 4, 0], [], max_bytes=10) == [[0, 1], [2], [3], [4, 5]]


def test_groups_come_first_whatever_their_size() -> None:
    assert split_into_requests([4, 40, 4, 40], [[3, 1], []], max_bytes=10) == [[3, 1], [0, 2]]
    assert split_into_requests([], []) == []


def test_a_number_of_groups_are_runs_of_about_equal_length() -> None:
    assert group_indices(2, list("abcde")) == [[0, 1, 2], [3, 4]]
    assert group_indices(9, list("ab")) == [[0], [1]]
    assert group_indices(None, list("ab")) == group_indices(0, list("ab")) == group_indices(3, []) == []


def test_groups_of_keys_leave_out_what_is_not_there() -> None:
    assert group_indices([["c", "a"], ["x"]], list("abc")) == [[2, 0], []]


@pytest.mark.parametrize("groups", [-1, "ab", [1, 2], [["a"], ["a"]]])
def test_groups_that_mean_nothing_are_refused(groups: object) -> None:
    with pytest.raises(ValueError, match="group"):
        group_indices(groups, list("ab"))  # type: ignore[arg-type]
