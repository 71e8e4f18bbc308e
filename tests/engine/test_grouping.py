"""Which tensors of one step travel in one request."""

from __future__ import annotations

import pytest

from hvd_cluster.engine.grouping import group_indices, split_into_requests


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
