"""Which gradients share a bucket: neighbors in the order of their completion."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

MIB = 1 << 20
#: The first bucket is small, so that communication begins early, and each is twice as large as the previous one: while
#: one is in flight the next one fills, even if the network is half as fast as the backward pass.
FIRST_BYTES = MIB
#: The largest bucket: large enough to hide the cost of a request. On one host, 25 MiB were measured to be 2% of a step
#: faster than 8 MiB.
MAX_BYTES = 25 * MIB


def plan_buckets(
    order: Sequence[int],
    sizes_bytes: Sequence[int],
    families: Sequence[Hashable],
    groups: Sequence[Sequence[int]],
    threshold_bytes: int,
) -> list[list[int]]:
    """Assign gradients to buckets.

    Args:
        order: the gradients, by number, in the order in which they become ready.
        sizes_bytes: bytes of each gradient, by number.
        families: only gradients of equal family share a bucket, e.g. those of one element type and device.
        groups: gradients that share a bucket at the user's request, whatever their size, and without others.
        threshold_bytes: the largest bucket (a larger gradient has its own); 0 gives every gradient its own.

    Returns:
        The buckets, in the order in which they become ready.
    """
    group_of = {number: index for index, group in enumerate(groups) for number in group}
    buckets: list[list[int]] = []
    grouped: dict[int, list[int]] = {}
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for number in order:
        if number in group_of:
            bucket = grouped.setdefault(group_of[number], [])
            if not bucket:
                buckets.append(bucket)
            bucket.append(number)
            continue
        max_bytes = min(FIRST_BYTES << max(0, len(buckets) - 1), MAX_BYTES, threshold_bytes)
        bucket, filled_bytes = open_buckets.get(families[number], ([], 0))
        if not bucket or filled_bytes + sizes_bytes[number] > max_bytes:
            bucket, filled_bytes = [], 0
            buckets.append(bucket)
        bucket.append(number)
        open_buckets[families[number]] = (bucket, filled_bytes + sizes_bytes[number])
    position = {number: index for index, number in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])
