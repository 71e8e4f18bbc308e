"""Which ready requests share one collective call (tensor fusion, arXiv:1802.05799 section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_cluster.engine.signature import Kind, Signature

#: Each tensor starts at a multiple of this in a bucket, so that vectorised copies and additions stay aligned.
ALIGNMENT_BYTES = 64


def plan_buckets(
    requests: Sequence[tuple[int, Signature]], threshold_bytes: int, *, groups_apart: bool = False
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


def _family(process_set_id: int, signature: Signature) -> tuple[object, ...] | None:
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
