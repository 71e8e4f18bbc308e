"""Which tensors share a request, and which ready requests one collective. Pure.

The latter is tensor fusion (arXiv:1802.05799, section 3.2).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from hvd_cluster.engine.signature import Kind, SetId, Signature

T = TypeVar("T")

#: Each tensor starts at a multiple of this in a bucket, so that vectorised copies and additions stay aligned.
ALIGNMENT_BYTES = 64
#: The largest size of a request for tensors that need not share one.
REQUEST_BYTES = 64 * 1024 * 1024


def plan_buckets(
    requests: Sequence[tuple[SetId, Signature]], threshold_bytes: int, *, groups_apart: bool = False
) -> list[list[int]]:
    """Assign requests to buckets.

    Requests may share a bucket if one call can serve them: allreduces of one process set, element type, device,
    operation and factors; broadcasts of one process set, device and root, whatever their types, because they move
    bytes. A request larger than the threshold has its own bucket, as does every other kind. Buckets are in the order
    of their first request, and each keeps the order of its requests.

    Args:
        requests: process set id and signature of each ready request, in the order of readiness.
        threshold_bytes: the largest size of a bucket; 0 turns fusion off.
        groups_apart: a grouped request does not share its bucket with others.

    Returns:
        Indices into ``requests``, one list for each bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[object, ...], tuple[list[int], int]] = {}
    for index, (process_set_id, signature) in enumerate(requests):
        family = _family(process_set_id, signature)
        num_bytes = aligned(signature.num_bytes)
        is_apart = groups_apart and len(signature.tensors) > 1
        if family is None or is_apart or num_bytes >= threshold_bytes:
            buckets.append([index])
            continue
        bucket, filled_bytes = open_buckets.get(family, ([], 0))
        if not bucket or filled_bytes + num_bytes > threshold_bytes:
            bucket, filled_bytes = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[family] = (bucket, filled_bytes + num_bytes)
    return buckets


def aligned(num_bytes: int) -> int:
    """``num_bytes``, rounded up to the alignment of tensors in a bucket."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _family(process_set_id: SetId, signature: Signature) -> tuple[object, ...] | None:
    """Requests of equal family may share a bucket; None never shares."""
    devices = {tensor.device for tensor in signature.tensors}
    if signature.kind == Kind.ALLREDUCE:
        dtypes = {tensor.dtype for tensor in signature.tensors}
        if len(dtypes) == 1 and len(devices) == 1:
            factors = (signature.op, signature.prescale, signature.postscale, signature.wire)
            return (signature.kind, process_set_id, *dtypes, *devices, *factors)
    if signature.kind == Kind.BROADCAST and len(devices) == 1:
        return (signature.kind, process_set_id, *devices, signature.root)
    return None


def split_into_requests(
    num_bytes: Sequence[int], groups: Sequence[Sequence[int]], max_bytes: int = REQUEST_BYTES
) -> list[list[int]]:
    """The indices of tensors by request: first the groups, then the others in order.

    The others are in as few requests as possible.

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


def even_sizes(total: int, num_parts: int) -> list[int]:
    """The sizes of parts that are as equal as possible: the first ones get one more."""
    size, larger = divmod(total, num_parts)
    return [size + (index < larger) for index in range(num_parts)]


def split_evenly(items: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """Parts of a sequence, in its order, of :func:`even_sizes`."""
    ends = accumulate(even_sizes(len(items), num_parts), initial=0)
    return [items[start:end] for start, end in pairwise(ends)]


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
        return list(map(list, split_evenly(range(len(keys)), min(groups, len(keys)))))
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(f"groups should be a non-negative integer or a list of lists of variables, not {groups!r}")
    index_of = {key: index for index, key in enumerate(keys)}
    resolved = [[index_of[key] for key in group if key in index_of] for group in groups]
    if len({index for group in resolved for index in group}) < sum(map(len, resolved)):
        raise ValueError("a variable can only appear once in groups")
    return resolved
