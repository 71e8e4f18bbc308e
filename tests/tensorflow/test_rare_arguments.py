"""Arguments and functions of Horovod's that few programs use: factors, old spellings, graphs of TensorFlow 1."""

from __future__ import annotations

from typing import Any


def test_factors_scale_the_numbers_and_the_gradients(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        factors = {"prescale_factor": 2.0, "postscale_factor": 3.0}
        mine = tf.constant([1.0, 2.0]) * (hvd.rank() + 1.0)
        scale = 1.0 + hvd.rank()

        def scattered(x: Any) -> Any:
            return hvd.reducescatter(x, op=hvd.Sum, **factors)

        return [
            scattered(mine),
            hvd.reducescatter(mine, **factors),
            hvd.grouped_reducescatter([mine], op=hvd.Sum, **factors)[0],
            gradient_of(lambda x: tf.reduce_sum(scattered(x) * scale), mine),
            gradient_of(lambda x: tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, **factors) * scale), mine),
            gradient_of(lambda x: tf.reduce_sum(hvd.grouped_allreduce([x], **factors)[0] * scale), mine),
        ]

    # The gradient of a scattered sum is the owner's, times the ranks and the factors, as in Horovod.
    gradients = [[12.0, 24.0], [18.0, 18.0], [9.0, 9.0]]
    assert ranks(build) == [[[18.0], [9.0], [18.0], *gradients], [[36.0], [18.0], [36.0], *gradients]]


def test_a_name_without_its_scope_matches_across_scopes(ranks: Any) -> None:
    def build(hvd: Any, tf: Any, gradient_of: Any) -> Any:
        mine = tf.constant([1.0 + hvd.rank(), 4.0])
        options = {"name": "scoped", "ignore_name_scope": True}
        results = []
        # One after the other: in a v1 graph too a name is free again only where its operation is done.
        with tf.name_scope(f"of_rank_{hvd.rank()}"):
            for act in (hvd.allreduce, hvd.allgather, lambda x, **o: hvd.broadcast(x, 0, **o), hvd.alltoall):
                with tf.control_dependencies([] if tf.executing_eagerly() else results):
                    results.append(act(mine, **options))
            with tf.control_dependencies([] if tf.executing_eagerly() else results):
                slope = gradient_of(lambda x: tf.reduce_sum(hvd.reducescatter(x, **options)), mine)
        return [*results, slope]

    shared = [[1.5, 4.0], [1.0, 4.0, 2.0, 4.0], [1.0, 4.0]]
    assert ranks(build) == [[*shared, [1.0, 2.0], [1.0, 1.0]], [*shared, [4.0, 4.0], [1.0, 1.0]]]


def test_the_older_spelling_of_an_average(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import warnings

        import tensorflow as tf

        mine = tf.constant(1.0 + hvd.rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [float(hvd.allreduce(mine, average=each)) for each in (True, False)]
            found.append(float(hvd.grouped_allreduce([mine], average=False)[0]))
        found.append(sum(each.category is DeprecationWarning for each in caught))
        try:
            hvd.allreduce(mine, average=True, op=hvd.Sum)
        except ValueError as error:
            found.append("only one of them" in str(error))
        return found

    assert two(fn) == [[1.5, 3.0, 3.0, 3, True]] * 2


def test_objects_travel_while_a_graph_is_built(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow.compat.v1 as tf

        with tf.Graph().as_default() as graph:
            sent = hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1)
            everyones = hvd.allgather_object(hvd.rank())
            return [sent, everyones, len(graph.get_operations())]

    assert two(fn) == [[{"rank": 1}, [0, 1], 0]] * 2


def test_gradients_of_ones_own_come_apart_from_the_reduced_ones(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        a, b, c = (tf.Variable(1.0) for _ in range(3))
        tape = hvd.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=False)
        tape.register_local_source(b)
        grads = [tf.constant(value * (1.0 + hvd.rank())) for value in (1.0, 2.0, 3.0)]
        return [[float(each) for each in part] for part in tape.get_local_and_global_gradients(grads, [a, b, c])]

    assert two(fn) == [[[2.0], [1.5, 4.5]], [[4.0], [1.5, 4.5]]]


def test_the_aggregation_of_passes_by_itself(two: Any, mode: str) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        from hvd_cluster.tensorflow.horovod_names import LocalGradientAggregationHelper

        def reduced(sums: Any, variables: Any) -> list[Any]:
            return [hvd.allreduce(each, op=hvd.Sum, name=f"helped{i}") for i, each in enumerate(sums)]

        helper = LocalGradientAggregationHelper(2, reduced, average_aggregated_gradients=True)

        def step(w: Any, count: Any, gradient: Any) -> Any:
            (result,) = helper.compute_gradients([gradient], [w])
            return helper.apply_gradients(lambda: w.assign_sub(result), None, global_step=count)

        scale = 1.0 + hvd.rank()
        if mode == "v1":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                w, count = (
                    tf.compat.v1.get_variable("w", initializer=0.0),
                    tf.compat.v1.get_variable("n", initializer=0),
                )
                gradient = tf.compat.v1.placeholder(tf.float32, [])
                train = step(w, count, gradient)
                session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
                for value in (1.0, 3.0, 5.0):
                    session.run(train, {gradient: value * scale})
                return [float(value) for value in session.run([w, count])]
        w, count = tf.Variable(0.0), tf.Variable(0)

        def run(gradient: Any) -> None:
            step(w, count, gradient)

        run = tf.function(run, autograph=False) if mode == "function" else run
        for value in (1.0, 3.0, 5.0):
            run(tf.constant(value * scale))
        return [float(w), float(count)]

    # Means of two passes, 2 and 4, added; passes without a step count an iteration.
    assert two(fn) == [[-6.0, 2.0]] * 2


def test_graphs_with_the_control_flow_and_the_variables_of_tensorflow_1(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow.compat.v1 as tf

        tf.disable_control_flow_v2()
        tf.disable_resource_variables()
        try:
            with tf.Graph().as_default(), tf.Session() as session:
                w = tf.get_variable("w", initializer=tf.constant([1.0 + hvd.rank()]))
                x = tf.placeholder(tf.float32, [])
                sgd = tf.train.GradientDescentOptimizer(1.0)
                train = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2).minimize(tf.reduce_sum(w * x))
                adasum = hvd.DistributedOptimizer(sgd, op=hvd.Adasum).minimize(tf.reduce_sum(w * x))
                chosen = [
                    tf.cond(x > 0.0, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: hvd.allreduce(2.0 * x))
                    for _ in range(2)
                ]
                _, grown = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, hvd.allreduce(y, op=hvd.Sum)), [0, x])
                begun = hvd.broadcast_global_variables(0)
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                session.run(begun)
                found = [type(w).__name__, float(session.run(w)[0])]
                for value in (1.0, 3.0):
                    session.run(train, {x: value * (1.0 + hvd.rank())})
                found.append(float(session.run(w)[0]))
                session.run(adasum, {x: 1.0})
                found.append(float(session.run(w)[0]))
                return [*found, *(float(value) for value in session.run([*chosen, grown], {x: 1.0}))]
        finally:
            tf.enable_control_flow_v2()
            tf.enable_resource_variables()

    assert two(fn) == [["RefVariable", 1.0, -5.0, -6.0, 2.0, 2.0, 8.0]] * 2


def test_private_collectives_sum_by_default_and_keep_the_order_of_their_arguments(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        from hvd_cluster.tensorflow import horovod_names

        mine = tf.constant([1.0, 2.0]) * (hvd.rank() + 1.0)
        results = [
            horovod_names._allreduce(mine, "one", hvd.Average, 2.0),
            horovod_names._grouped_allreduce([mine], "group")[0],
            horovod_names._reducescatter(mine, "rows", hvd.Sum, True, hvd.global_process_set, 2.0),
            horovod_names._grouped_reducescatter([mine], "group rows", ignore_name_scope=True)[0],
        ]
        return [result.numpy().tolist() for result in results]

    shared = [[3.0, 6.0], [3.0, 6.0]]
    assert two(fn) == [[*shared, [6.0], [3.0]], [*shared, [12.0], [6.0]]]


def test_a_refused_tensor_is_named_with_what_to_send_instead(two: Any) -> None:
    """Also while a function or a v1 graph is built, where text would reach the collective as objects."""

    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        def refusal(call: Any) -> str:
            try:
                call()
            except tf.errors.InvalidArgumentError as error:
                return str(error.message)
            return "accepted"

        text, complex_number = tf.constant(["a"]), tf.constant(1 + 2j)
        variables = [tf.Variable(1.0), tf.Variable("x", name="label")]
        found = [
            refusal(lambda: hvd.allgather(text)),
            refusal(lambda: tf.function(hvd.allgather)(text)),
            refusal(lambda: hvd.allreduce(complex_number)),
            refusal(lambda: hvd.broadcast_variables(variables, 0)),
            refusal(lambda: hvd.broadcast_variables(tf.Variable([1.0]), 0)),
            refusal(lambda: hvd.allgather(tf.ragged.constant([[1, 2], [3]]))),
            refusal(lambda: hvd.allreduce(tf.sparse.from_dense([1.0, 0.0]))),
        ]
        with tf.Graph().as_default():
            tf.compat.v1.get_variable("label", initializer="x")
            found.append(refusal(lambda: hvd.broadcast_global_variables(0)))
        return found

    text = "Tensor type string is not supported: send text with hvd.broadcast_object() or hvd.allgather_object()."
    complex_number = "Tensor type complex128 is not supported: send tf.math.real() and tf.math.imag() of it."
    variable = f"{text} It is the type of the variable 'label:0': leave this out."
    for found in two(fn):
        eager, function, real, variables, slices, ragged, sparse, v1 = found
        assert eager == text
        assert function.rstrip().endswith(text)  # after the lines of the user's function
        assert real == complex_number
        assert variables == v1 == variable
        assert slices.endswith("contains a EagerTensor: pass the variables themselves")
        assert "flat_values and each of its nested_row_lengths()" in ragged
        assert "indices and values, or tf.sparse.to_dense() of it" in sparse
