"""Collectives of a function run in the order of the program, in calls and branches that read a variable too."""

from __future__ import annotations

from typing import Any


def test_two_calls_of_one_function_that_reads_a_variable_meet_in_order(two: Any) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        import time

        import tensorflow as tf

        w = tf.Variable([1.0])

        def wait(x, pause_s):  # without side effects, so that TensorFlow puts it in no order
            def asleep(value, seconds):
                time.sleep(float(seconds))
                return value

            return tf.ensure_shape(tf.numpy_function(asleep, [x, pause_s], tf.float32, stateful=False), x.shape)

        @tf.custom_gradient
        def late(x, forward_s, backward_s):
            return wait(x, forward_s), lambda slope: (wait(slope, backward_s), None, None)

        @tf.function
        def everyone(x):
            return hvd.allreduce(w * x, op=hvd.Sum)

        @tf.function
        def step(a, b, of_a, of_b):
            # Where nobody keeps the order, the first call is late on rank 0, and the second one on rank 1.
            return late(everyone(late(a, of_a, 0.0)), 0.0, of_a), late(everyone(late(b, of_b, 0.0)), 0.0, of_b) * 10.0

        @tf.function
        def slopes(a, b, of_a, of_b):
            with tf.GradientTape() as tape:
                tape.watch([a, b])
                results = step(a, b, of_a, of_b)
            return tape.gradient(results, [a, b])

        a, b = tf.constant([1.0]), tf.constant([10.0])
        pauses = [tf.constant(0.2 * (hvd.rank() == which)) for which in range(2)]
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            results = step(a, b, *pauses)
        found = [results, tape.gradient(results, [a, b]), slopes(a, b, *pauses)]
        return [[float(value[0]) for value in values] for values in found]

    assert two(fn) == [[[2.0, 200.0], [2.0, 20.0], [2.0, 20.0]]] * 2


def test_conditions_and_loops_that_read_a_variable_keep_their_place(two: Any) -> None:
    def fn(hvd: Any) -> list[list[str]]:
        import tensorflow as tf

        from hvd_cluster.engine import basics

        w = tf.Variable([1.0])

        def everyone(name):
            return hvd.allreduce(w.read_value(), name=name)

        @tf.function
        def step(num_rounds, is_true):
            late = tf.while_loop(lambda i, _: i < num_rounds, lambda i, x: (i + 1, x + 0.0), [0, tf.ones([1])])[1]
            return [
                hvd.allreduce(late, name="first"),
                tf.cond(is_true, lambda: everyone("cond"), lambda: w.read_value()),
                hvd.allreduce(late, name="second"),
                tf.switch_case(tf.cast(is_true, tf.int32), [w.read_value, lambda: everyone("case")]),
                tf.while_loop(lambda i, _: i < 1, lambda i, x: (i + 1, everyone("loop")), [0, late])[1],
                hvd.allreduce(tf.ones([1]), name="last"),
            ]

        engine = basics.engine()
        submitted, submit = [], engine.submit

        def noted(request: Any, **options: Any) -> Any:
            submitted.append(request.name.rpartition(".")[2])
            return submit(request, **options)

        engine.submit = noted
        try:
            step(tf.constant(2000), tf.constant(True))
            step(tf.constant(2000), tf.constant(False))
        finally:
            del engine.submit
        return [submitted[:6], submitted[6:]]

    in_order = ["first", "cond", "second", "case", "loop", "last"]
    assert two(fn) == [[in_order, ["first", "second", "loop", "last"]]] * 2
