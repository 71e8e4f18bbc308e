"""Which tensors of one step share a request. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

#: The largest size of a request for tensors that need not share one.
REQUEST_BYTES = 64 * 1024 * 1024


def split_into_requests(
    num_bytes: Sequence[int], groups: Sequence[Sequence[int]], max_bytes: int = REQUEST_BYTES
) -> list[list[int]]:
    """The indices of tensors by request: first the groups, then the others in order, in as few requests as possible.

    Args:
        num_bytes: bytes of each tensor.
        groups: indices of tensors that share a request, whatever their size.
        max_bytes: the largest size of the other requests; a larger tensor has its own.
    """
    grouped = {index for group in groups for index in group}
    result = [list(group) for group in groups if group]
    room_bytes = -1
    for index, size_bytes in enumerate(num_bytes):
        if index in grouped:
            continue
        if room_bytes < size_bytes:
            result.append([])
            room_bytes = max(max_bytes, size_bytes)
        result[-1].append(index)
        room_bytes -= size_bytes
    return result


def group_indices(groups: int | Sequence[Sequence[Any]] | None, keys: Sequence[Hashable]) -> list[list[int]]:
    """The ``groups`` of a user as lists of indices.

    Args:
        groups: the number of groups of about equal length, or lists of keys; None or 0 for none.
        keys: the identity of each tensor; other members of a list are ignored.

    Raises:
        ValueError: ``groups`` is something else, or holds a key twice.
    """
    if groups is None or (isinstance(groups, int) and groups == 0) or not keys:
        return []
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups={groups} must be >= 0, or a list of lists of variables")
        count = min(groups, len(keys))
        length, longer = divmod(len(keys), count)
        bounds = [index * length + min(index, longer) for index in range(count + 1)]
        return [list(range(start, end)) for start, end in pairwise(bounds)]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(f"groups should be a non-negative integer or a list of lists of variables, not {groups!r}")
    index_of = {key: index for index, key in enumerate(keys)}
    resolved = [[index_of[key] for key in group if key in index_of] for group in groups]
    if len({index for group in resolved for index in group}) < sum(map(len, resolved)):
        raise ValueError("a variable can only appear once in groups")
    return resolved
