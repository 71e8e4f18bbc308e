"""Gradients through what lies around a collective, and through those of a process set, in each way to run things."""

from __future__ import annotations

from typing import Any


def test_gradients_pass_through_compression_sparse_rows_and_equal_splits(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        scale = 1.0 + hvd.rank()
        mine = tf.constant([1.0, 2.0])

        def squeezed(x: Any) -> Any:
            halves = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
            (brains,) = hvd.grouped_reducescatter([x], op=hvd.Sum, compression=hvd.Compression.bf16)
            return tf.reduce_sum(halves) * scale + tf.reduce_sum(brains) * scale

        def sparse(x: Any, op: Any) -> Any:
            rows = tf.IndexedSlices(x, tf.constant([0, hvd.rank()]), tf.constant([2]))
            return tf.reduce_sum(hvd.allreduce(rows, op=op).values * scale)

        def exchanged(x: Any) -> Any:
            return tf.reduce_sum(hvd.alltoall(tf.reshape(x, [2, 1])) * scale)

        return [
            gradient_of(squeezed, mine),
            gradient_of(lambda x: sparse(x, hvd.Sum), mine),
            gradient_of(lambda x: sparse(x, hvd.Average), mine),
            gradient_of(exchanged, mine),
        ]

    # Reduced: both scales, and twice that of the row's owner; gathered: the mean of the scales; sent: the receiver's.
    assert ranks(build) == [[[5.0, 7.0], [1.5, 1.5], [0.75, 0.75], [1.0, 2.0]]] * 2


def test_a_group_has_gradients_where_some_of_it_can_have_none(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        mine = tf.constant([1.0, 2.0])
        others = [tf.constant([hvd.rank() == 1]), tf.constant([hvd.rank()], tf.uint16), tf.constant([hvd.rank()])]

        def gathered(x: Any) -> Any:
            *moved, last = hvd.grouped_allgather([*others, x])
            numbers = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in moved])
            return tf.reduce_sum(last) * (1.0 + hvd.rank()) * numbers

        return gradient_of(gathered, mine)

    # The mean of both scales, times the three ones of rank 1.
    assert ranks(build) == [[4.5, 4.5]] * 2


def test_the_gradient_of_sparse_rows_sends_no_indices(two: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        import tensorflow as tf

        from hvd_cluster.engine import basics

        values = tf.constant([[1.0], [2.0]])
        with tf.GradientTape() as tape:
            tape.watch(values)
            slices = tf.IndexedSlices(values, tf.constant([0, 1], tf.int64), tf.constant([2, 1], tf.int64))
            total = tf.reduce_sum(hvd.allreduce(slices, op=hvd.Sum).values)
        engine = basics.engine()
        sent: list[str] = []
        submit = engine.submit

        def noted(request: Any, **options: Any) -> Any:
            sent.extend(f"{request.signature.kind.name} {tensor.dtype}" for tensor in request.inputs)
            return submit(request, **options)

        engine.submit = noted
        try:
            tape.gradient(total, values)
        finally:
            del engine.submit
        return sent

    assert two(fn) == [["ALLREDUCE torch.float32", "ALLGATHER torch.int32"]] * 2  # the other is the numbers of rows


def test_process_sets_and_their_gradients(two: Any, mode: str, run_in: Any, gradient_of: Any) -> None:
    def fn(hvd: Any) -> Any:
        import tensorflow as tf

        sets = [hvd.add_process_set([rank]) for rank in range(2)]
        mine, others = sets[hvd.rank()], sets[1 - hvd.rank()]
        r = hvd.rank()

        def build() -> Any:
            x = tf.constant([1.0, 2.0]) * (r + 1.0)
            scale = tf.constant([1.0, 10.0])

            def everything(x: Any) -> Any:
                parts = [
                    hvd.allreduce(x, process_set=mine),
                    hvd.grouped_allreduce([x], op=hvd.Sum, process_set=mine)[0],
                    hvd.allgather(x, process_set=mine),
                    hvd.broadcast(x, r, process_set=mine),
                    hvd.alltoall(x, process_set=mine),
                    hvd.reducescatter(x, process_set=mine),
                ]
                return tf.add_n(parts)

            gradient = gradient_of(lambda x: tf.reduce_sum(everything(x) * scale), x)
            included = [hvd.process_set_included_op(each.process_set_id) for each in (mine, others)]
            return [everything(x), gradient, hvd.size_op(mine.process_set_id), *included]

        try:
            found = [value.tolist() for value in run_in(mode, build)]
            try:
                run_in(mode, lambda: hvd.allreduce(tf.ones([1]), process_set=others))
            except tf.errors.InvalidArgumentError as error:
                found.append("not a member" in str(error))
        finally:
            for each in sets:
                hvd.remove_process_set(each)
        return found

    expected = [[6.0 * (rank + 1), 12.0 * (rank + 1)] for rank in range(2)]
    assert two(fn) == [[values, [6.0, 60.0], 1, 1, 0, True] for values in expected]


def test_the_memory_that_crosses_is_tensorflows_own(two: Any) -> None:
    def fn(hvd: Any) -> list[bool]:
        import numpy as np
        import tensorflow as tf
        from tensorflow.experimental import dlpack

        from hvd_cluster.engine import basics

        engine = basics.engine()
        sent: list[int] = []
        given: list[int] = []
        submit = engine.submit

        def noted(request: Any, **options: Any) -> Any:
            (tensor,) = request.inputs
            sent.append(tensor.data_ptr())
            finish = request.finish

            def finished(results: Any) -> Any:
                given.append(results[0].data_ptr())
                return finish(results)

            request.finish = finished
            return submit(request, **options)

        def address_of(tensor: Any) -> int:
            import torch

            return torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(tensor)).data_ptr()

        x = tf.random.normal([4096])
        addresses: list[int] = []

        @tf.function
        def step(x):
            y = x * 2.0
            tf.numpy_function(lambda array: addresses.append(array.ctypes.data) or np.int64(0), [y], tf.int64)
            return hvd.allreduce(y)

        engine.submit = noted
        try:
            result = hvd.allreduce(x)
            step(x)
        finally:
            del engine.submit
        return [sent[0] == address_of(x), given[0] == address_of(result), sent[1] == addresses[0]]

    assert two(fn) == [[True] * 3] * 2


def test_the_rows_of_indexed_slices_travel_compressed(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        mine = tf.IndexedSlices(tf.constant([[1.0 + 2.0**-20]]), tf.constant([hvd.rank()]), tf.constant([2, 1]))
        halves = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16)
        table = tf.ones([2, 1]) * (1.0 + 2.0**-20)
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank()]) * (1.0 + 2.0**-20))
        wrapped = hvd.DistributedGradientTape(tape, op=hvd.Sum, compression=hvd.Compression.bf16)
        gradient = wrapped.gradient(loss, table)
        assert halves.values.dtype == gradient.values.dtype == tf.float32
        return [halves.values, gradient.values]

    assert ranks(build) == [[[[1.0], [1.0]]] * 2] * 2  # neither type has the last bits
