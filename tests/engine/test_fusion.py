"""Which requests share a bucket."""

from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.engine.fusion import aligned, plan_buckets
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
