"""Every collective, eagerly, in a ``tf.function`` and in a v1 graph: the numbers, the gradients, and the errors."""

from __future__ import annotations

from typing import Any

import pytest


def test_allreduce_and_its_gradient(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        mine = tf.constant([1.0, 2.0]) + float(hvd.rank())
        scale = tf.constant([1.0, 10.0]) * (hvd.rank() + 1.0)
        return [
            hvd.allreduce(mine),
            hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
            hvd.allreduce(mine, op=hvd.Min),
            hvd.allreduce(mine, op=hvd.Max),
            hvd.allreduce(mine, op=hvd.Product),
            gradient_of(lambda x: tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) * scale), mine),
            gradient_of(lambda x: tf.reduce_sum(hvd.allreduce(x) * scale), mine),
        ]

    expected = [[1.5, 2.5], [3.0, 5.0], [1.0, 2.0], [2.0, 3.0], [2.0, 6.0], [3.0, 30.0], [1.5, 15.0]]
    assert ranks(build) == [expected] * 2


def test_grouped_allreduce_keeps_types_and_shapes_and_has_gradients(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        tensors = [tf.ones([2]), tf.constant([3, 4], tf.int64), tf.constant(2.0, tf.float64), tf.zeros([0, 3])]
        out = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        assert [t.dtype for t in out] == [t.dtype for t in tensors]
        assert [t.shape for t in out] == [t.shape for t in tensors]
        gradient = gradient_of(
            lambda x: tf.reduce_sum(hvd.grouped_allreduce([x, 2.0 * x], op=hvd.Sum)[1] * (1.0 + hvd.rank())), tensors[0]
        )
        assert hvd.grouped_allreduce([]) == []
        return [*out, gradient]

    assert ranks(build) == [[[2.0, 2.0], [6, 8], 4.0, [], [6.0, 6.0]]] * 2


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"])
def test_allreduce_takes_every_number(ranks: Any, dtype: str) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        result = hvd.allreduce(tf.cast([1, 2], dtype) + tf.cast(hvd.rank(), dtype), op=hvd.Sum)
        assert result.dtype == tf.as_dtype(dtype)
        return tf.cast(result, tf.float64)

    assert ranks(build) == [[3.0, 5.0]] * 2


def test_averages_of_large_halves_and_integers_do_not_overflow(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        half = tf.constant([50_000.0, 50_000.0], tf.float16)
        factors = {"prescale_factor": 0.25, "postscale_factor": 4.0}
        fp16 = {"compression": hvd.Compression.fp16, **factors}
        large = tf.constant([2**62 + 1, -(2**62) - 1], tf.int64)
        whole = hvd.allreduce(large)
        assert whole.dtype == tf.int64
        return [
            tf.cast(hvd.allreduce(half), tf.float64),
            tf.cast(hvd.allreduce(half, **factors), tf.float64),
            tf.cast(hvd.reducescatter(half, **factors), tf.float64),
            *[tf.cast(each, tf.float64) for each in hvd.grouped_allreduce([half, half], **factors)],
            hvd.allreduce(tf.cast(half, tf.float32), **fp16),
            whole,
        ]

    *halves, whole = zip(*ranks(build), strict=True)
    assert {number for both in halves for each in both for number in each} == {49_984.0}
    assert set(map(tuple, whole)) == {(2**62 + 1, -(2**62) - 1)}


def test_compression_restores_the_type(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        mine = tf.constant([1.0001, 2.0]) * (hvd.rank() + 1)
        halves = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16)
        brains = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.bf16)
        assert halves.dtype == brains.dtype == tf.float32
        return [halves, brains]

    assert ranks(build) == [[[3.0, 6.0]] * 2] * 2


def test_indexed_slices_are_gathered(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        r = hvd.rank()
        rows = [float(r + 1)] * (r + 1)
        mine = tf.IndexedSlices(tf.constant(rows)[:, None], tf.constant([2 * r] * (r + 1)), tf.constant([4, 1]))
        mixed = hvd.grouped_allreduce([tf.ones([1]), mine], op=hvd.Sum)
        average = hvd.allreduce(mine)
        return [mixed[0], tf.convert_to_tensor(mixed[1]), average.values, average.indices, average.dense_shape]

    summed = [[1.0], [0.0], [4.0], [0.0]]
    assert ranks(build) == [[[2.0], summed, [[0.5], [1.0], [1.0]], [0, 2, 2], [4, 1]]] * 2


def test_allgather_of_unequal_rows_and_its_gradient(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        mine = tf.fill([hvd.rank() + 1, 2], float(hvd.rank()))
        weights = tf.reshape(tf.range(6.0), [3, 2]) * (1.0 + hvd.rank())
        gathered = hvd.allgather(mine)
        assert gathered.shape[1:] == [2]
        return [gathered, gradient_of(lambda x: tf.reduce_sum(hvd.allgather(x) * weights), mine)]

    everything = [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    average = [[0.0, 1.5], [3.0, 4.5], [6.0, 7.5]]
    assert ranks(build) == [[everything, average[:1]], [everything, average[1:]]]


def test_grouped_allgather_and_types_that_are_only_moved(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        r = hvd.rank()
        return hvd.grouped_allgather([tf.constant([r], tf.uint16), tf.constant([r == 1]), tf.constant([r], tf.int16)])

    assert ranks(build) == [[[0, 1], [False, True], [0, 1]]] * 2


def test_broadcast_and_its_gradient(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        mine = tf.constant([1.0, 2.0]) + float(hvd.rank())
        scale = 1.0 + hvd.rank()
        return [hvd.broadcast(mine, 1), gradient_of(lambda x: tf.reduce_sum(hvd.broadcast(x, 1) * scale), mine)]

    assert ranks(build) == [[[2.0, 3.0], [0.0, 0.0]], [[2.0, 3.0], [1.5, 1.5]]]


def test_alltoall_with_and_without_splits_and_its_gradient(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        r = hvd.rank()
        mine = tf.range(4.0) + 10.0 * r
        output, received = hvd.alltoall(mine, splits=[1, 2] if r == 0 else [2, 1])
        splits = tf.constant([1, 2] if r == 0 else [2, 1])
        gradient = gradient_of(lambda x: tf.reduce_sum(hvd.alltoall(x, splits)[0] * (1.0 + r)), mine)
        return [hvd.alltoall(mine), output, received, gradient]

    assert ranks(build) == [
        [[0.0, 1.0, 10.0, 11.0], [0.0, 10.0, 11.0], [1, 2], [1.0, 2.0, 2.0, 0.0]],
        [[2.0, 3.0, 12.0, 13.0], [1.0, 2.0, 12.0], [2, 1], [1.0, 1.0, 2.0, 0.0]],
    ]


def test_reducescatter_and_its_gradient(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        mine = tf.range(3.0) * (hvd.rank() + 1)
        scale = 1.0 + hvd.rank()
        average, total = hvd.reducescatter(mine), hvd.grouped_reducescatter([mine], op=hvd.Sum)[0]
        return [
            average,
            total,
            gradient_of(lambda x: tf.reduce_sum(hvd.reducescatter(x) * scale), mine),
            gradient_of(lambda x: tf.reduce_sum(hvd.reducescatter(x, op=hvd.Sum) * scale), mine),
        ]

    gradients = [[1.0, 1.0, 2.0], [2.0, 2.0, 4.0]]
    assert ranks(build) == [[[0.0, 1.5], [0.0, 3.0], *gradients], [[3.0], [6.0], *gradients]]


def test_a_reducescatter_takes_no_other_reduction() -> None:
    """In this process, where AutoGraph finds the source: it keeps the types of few errors."""
    import tensorflow as tf

    import hvd_cluster.tensorflow as hvd

    def scattered(x: Any) -> Any:
        return hvd.reducescatter(x, op=hvd.Max)

    def grouped(x: Any) -> Any:
        return hvd.grouped_reducescatter([x], op=hvd.Max)

    for call in (scattered, grouped, tf.function(scattered), tf.function(grouped)):
        with pytest.raises(ValueError, match="op=hvd.Sum, not MAX"):
            call(tf.ones([2]))


def test_every_tensor_of_a_group_has_its_gradient(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        mine = tf.constant([1.0, 2.0]) + float(hvd.rank())
        scale = 1.0 + hvd.rank()

        def gathered(x: Any) -> Any:
            first, second = hvd.grouped_allgather([x, 3.0 * x])
            return tf.reduce_sum(first + second) * scale

        def scattered(x: Any) -> Any:
            first, second = hvd.grouped_reducescatter([x, 3.0 * x], op=hvd.Sum)
            return tf.reduce_sum(first + second) * scale

        return [gradient_of(gathered, mine), gradient_of(scattered, mine)]

    # Gathered: the mean of both ranks' scales, 1.5, times 1 + 3; scattered: the owner's scale times 4 times the ranks.
    assert ranks(build) == [[[6.0, 6.0], [8.0, 16.0]]] * 2


def test_minimum_maximum_and_product_pass_gradients_on_by_their_own_rule(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        scale = 1.0 + hvd.rank()
        ops = (hvd.Min, hvd.Max, hvd.Product)
        mine = tf.constant([2.0])
        return [gradient_of(lambda x, op=op: tf.reduce_sum(hvd.allreduce(x, op=op) * scale), mine) for op in ops]

    # As in Horovod: the gradient is reduced with the same op.
    assert ranks(build) == [[[1.0], [2.0], [2.0]]] * 2


def test_adasum_of_two_ranks_and_its_gradient(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        orthogonal = tf.constant([3.0, 0.0]) if hvd.rank() == 0 else tf.constant([0.0, 4.0])
        parallel = tf.constant([1.0, 1.0])
        return [
            hvd.allreduce(orthogonal, op=hvd.Adasum),
            hvd.allreduce(parallel, op=hvd.Adasum),
            gradient_of(lambda x: tf.reduce_sum(hvd.allreduce(x, op=hvd.Adasum)), parallel),
        ]

    # Orthogonal vectors add up, equal ones stay as they are: arXiv:2006.02924, section 3.
    assert ranks(build) == [[[3.0, 4.0], [1.0, 1.0], [1.0, 1.0]]] * 2


def test_rank_and_size_are_answered_when_the_graph_runs(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        return [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()]

    assert ranks(build) == [[0, 2, 0, 2, 1], [1, 2, 1, 2, 1]]


def test_join_and_barrier(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        hvd.barrier()
        if hvd.rank() == 0:
            one = hvd.allreduce(tf.constant([4.0]), name="while_joined")
            with tf.control_dependencies([one]):
                return [one, hvd.join()]
        return [tf.constant([0.0]), hvd.join()]

    assert ranks(build) == [[[2.0], 0], [[0.0], 0]]


def test_a_process_set_works_among_itself(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        import tensorflow as tf

        alone = hvd.add_process_set([1])
        result = None
        if alone.included():
            result = hvd.allreduce(tf.constant([3.0]), op=hvd.Sum, process_set=alone).numpy().tolist()
            result += (tf.function(lambda: hvd.size_op(alone.process_set_id))().numpy().tolist(),)
        else:
            try:
                hvd.allreduce(tf.constant([3.0]), process_set=alone)
            except tf.errors.InvalidArgumentError as error:
                result = "not a member" in str(error)
        hvd.remove_process_set(alone)
        return result

    assert two(fn) == [True, [3.0, 1]]


def test_eager_errors_are_those_of_tensorflow(two: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        import tensorflow as tf

        r = hvd.rank()
        found = []
        for act in (
            lambda: hvd.allreduce(tf.ones([2 + r]), name="shapes"),
            lambda: hvd.allreduce(tf.ones([2], tf.float32 if r else tf.float64), name="types"),
            lambda: hvd.allgather(tf.constant(1.0), name="scalar"),
            lambda: hvd.allreduce(tf.constant(["text"])),
            lambda: hvd.allreduce(tf.constant([True])),
            lambda: hvd.broadcast(tf.ones([1]), 7),
            lambda: hvd.alltoall(tf.ones([3]), splits=[1, 1, 1]),
        ):
            try:
                act()
            except tf.errors.OpError as error:
                found.append(f"{type(error).__mro__[1].__name__}: {error.message[:24]}")
        found.append(str(hvd.allreduce(tf.constant([2.0]), name="shapes").numpy().tolist()))
        return found

    assert two(fn) == [
        [
            "FailedPreconditionError: Mismatched ALLREDUCE ten",
            "FailedPreconditionError: Mismatched data types: O",
            f"FailedPreconditionError: Rank {rank} tried to ALLGATHE",
            "InvalidArgumentError: Tensor type string is no",
            "InvalidArgumentError: bool tensors cannot be a",
            "InvalidArgumentError: root_rank=7 is not among",
            "InvalidArgumentError: splits must hold the row",
            "[2.0]",
        ]
        for rank in range(2)
    ]


def test_errors_in_a_graph_carry_the_whole_text_and_the_engine_continues(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        @tf.function
        def mismatched():
            return hvd.allreduce(tf.ones([2 + hvd.rank()]), name="shapes")

        @tf.function
        def wrong():
            return hvd.allreduce(tf.constant([True]))

        found: list[Any] = []
        for function in (mismatched, wrong):
            try:
                function()
            except tf.errors.OpError as error:
                found.append((type(error).__name__, "Mismatched ALLREDUCE tensor shapes" in str(error)))
        return [*found, tf.function(lambda: hvd.allreduce(tf.ones([1])))().numpy().tolist()]

    assert two(fn) == [[("UnknownError", True), ("InvalidArgumentError", False), [1.0]]] * 2


@pytest.mark.parametrize("is_eager", [True, False])
def test_ranks_whose_slices_differ_in_op_or_dense_shape_are_an_error(two: Any, is_eager: bool) -> None:
    def fn(hvd: Any, is_eager: bool) -> list[str]:
        import tensorflow as tf

        r = hvd.rank()

        def slices(rows: int) -> tf.IndexedSlices:
            return tf.IndexedSlices(tf.ones([1, 1]), tf.constant([rows - 1]), tf.constant([rows, 1]))

        def gradient_of(table: tf.Variable, op: int) -> tf.IndexedSlices:
            with hvd.DistributedGradientTape(tf.GradientTape(), op=op) as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [0]))
            return tape.gradient(loss, table)

        op, table, other = [hvd.Sum, hvd.Average][r], tf.Variable(tf.ones([4, 1])), tf.Variable(tf.ones([4 + r, 1]))
        found = []
        for act in (
            lambda: hvd.allreduce(slices(4), op=op, name="ops"),
            lambda: hvd.allreduce(slices(4 + r), name="shapes"),
            lambda: gradient_of(table, op),
            lambda: gradient_of(other, hvd.Sum),
        ):
            try:
                act() if is_eager else tf.function(act)()
            except tf.errors.OpError as error:
                found.append(str(error).partition("Mismatched ")[2].partition(":")[0])
        found.append(str(hvd.allreduce(slices(4), op=hvd.Sum, name="ops").indices.numpy().tolist()))
        return found

    assert two(fn, is_eager) == [["reduction operation", "shapes of sparse tensors"] * 2 + ["[3, 3]"]] * 2


def test_xla_is_refused_when_the_function_is_traced(two: Any) -> None:
    def fn(hvd: Any) -> bool:
        import tensorflow as tf

        try:
            tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(tf.ones([1]))
        except ValueError as error:
            return "jit_compile=False" in str(error)
        return False

    assert two(fn) == [True, True]


def test_collectives_of_one_session_run_match_by_name_in_any_order(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import tensorflow as tf

        order = list(range(12))
        if hvd.rank():
            order.reverse()
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2, use_per_session_threads=True)
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            found = {i: hvd.allreduce(tf.fill([3], float(i)), op=hvd.Sum, name=f"many{i}") for i in order}
            return [float(session.run(found)[i][0]) for i in range(12)]

    assert two(fn) == [[2.0 * i for i in range(12)]] * 2


def test_names_do_not_depend_on_how_often_a_function_was_traced(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import tensorflow as tf

        @tf.function
        def total(x):
            return hvd.allreduce(tf.reduce_sum(x), op=hvd.Sum) + hvd.allreduce(tf.reduce_max(x), op=hvd.Sum)

        if hvd.rank():
            total.get_concrete_function(tf.TensorSpec([7]))  # one more tracing on this rank
        return [float(total(tf.ones([n]))) for n in (2, 3, 2)]

    assert two(fn) == [[6.0, 8.0, 6.0]] * 2


def test_a_collective_in_a_loop_of_a_function(two: Any) -> None:
    def fn(hvd: Any) -> float:
        import tensorflow as tf

        @tf.function
        def grown(x):
            for _ in tf.range(5):
                x = hvd.allreduce(x, op=hvd.Sum)
            return x

        return float(grown(tf.constant(1.0)))

    assert two(fn) == [32.0, 32.0]
