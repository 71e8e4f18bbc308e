"""Which gradients travel together: runs of the order in which the backward pass finishes them, of bounded size."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

MIB = 1 << 20
#: The first bucket is small, so that communication begins early, and each is twice as long as the one before: while one
#: is on its way the next one fills, even where the network is half as fast as the backward pass.
FIRST_BYTES = MIB
#: No longer than this: long enough to hide what a request costs. As measured on one host, 8 and 25 MiB differ by 2% of
#: a step, in favour of fewer buckets.
MAX_BYTES = 25 * MIB


def plan_buckets(
    order: Sequence[int],
    sizes_bytes: Sequence[int],
    families: Sequence[Hashable],
    groups: Sequence[Sequence[int]],
    threshold_bytes: int,
) -> list[list[int]]:
    """Deal gradients into buckets.

    Args:
        order: the gradients that are to be dealt, by number, in the order in which they become ready.
        sizes_bytes: bytes of each gradient, by number.
        families: only gradients of equal family share a bucket, e.g. those of one element type and device.
        groups: gradients that the user wants to travel together, whatever their size, and without others.
        threshold_bytes: most bytes of one bucket (one larger gradient has its own); 0 gives every gradient its own.

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
