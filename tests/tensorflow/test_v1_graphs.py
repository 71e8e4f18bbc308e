"""What v1 graphs have of their own: operations in any order, conditions, sums of passes, broadcasts as nodes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("num_threads", [1, 2])
def test_optimizers_of_one_run_meet_by_name_on_however_few_threads(two: Any, num_threads: int) -> None:
    def fn(hvd: Any) -> list[float]:
        import tensorflow.compat.v1 as tf

        config = tf.ConfigProto(inter_op_parallelism_threads=num_threads, use_per_session_threads=True)
        with tf.Graph().as_default(), tf.Session(config=config) as session:
            variables, steps = [], []
            for number in range(4):
                w = tf.get_variable(f"w{number}", initializer=tf.zeros([3]))
                optimizer = tf.train.GradientDescentOptimizer(1.0)
                optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
                steps.append(optimizer.minimize(tf.reduce_sum(w) * -(number + 1.0 + hvd.rank())))
                variables.append(w)
            late = tf.zeros([64, 64])
            for _ in range(8):
                late = tf.nn.softmax(tf.add_n([tf.matmul(late, late) for _ in range(4)]))
            first, second = (tf.ones([64, 64]), late) if hvd.rank() else (late, tf.ones([64, 64]))
            steps += [hvd.allreduce(first, name="first"), hvd.allreduce(second, name="second")]
            if hvd.rank():
                steps.reverse()
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(10):
                session.run(steps)
            return [float(value[0]) for value in session.run(variables)]

    # Averages over the ranks, of sums of ten passes.
    assert two(fn) == [[15.0, 25.0, 35.0, 45.0]] * 2


def test_variables_are_broadcast_by_a_node(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow.compat.v1 as tf

        with tf.Graph().as_default(), tf.Session() as session:
            a = tf.get_variable("a", initializer=tf.constant([1.0 + hvd.rank()]))
            b = tf.get_variable("b", initializer=tf.constant(10 + hvd.rank()))
            one, both, none = hvd.broadcast_(a, 0), hvd.broadcast_variables([a, b], 1), hvd.broadcast_([], 0)
            session.run(tf.global_variables_initializer())
            session.run([one, none])
            seen = [session.run(a).tolist()]
            session.run(a.assign([5.0 + hvd.rank()]))
            session.run(both)
            return [*seen, session.run(a).tolist(), int(session.run(b))]

    assert two(fn) == [[[1.0], [6.0], 11]] * 2


@pytest.mark.parametrize("mode", ["eager", "function", "v1"])
def test_a_gradient_that_is_missing_in_one_pass_counts_as_zero_in_it(two: Any, mode: str) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow.compat.v1 as tf

        scale = 1.0 + hvd.rank()
        options = {"backward_passes_per_step": 2}
        # Three steps: the second gradient is there only in the first, only in the second, and in no pass.
        passes = [True, False, False, True, False, False]

        def optimizer_and_step() -> Any:
            optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0), **options)
            optimizer._optimizer.compute_gradients = lambda given, variables: list(zip(given, variables, strict=True))

            def step(variables: Any, has_second: bool) -> Any:
                gradients = [tf.constant([-scale]), tf.constant([-10.0 * scale]) if has_second else None]
                return optimizer.apply_gradients(optimizer.compute_gradients(gradients, variables))

            return step

        if mode == "v1":
            with tf.Graph().as_default(), tf.Session() as session:
                variables = [tf.get_variable(name, initializer=tf.zeros([1])) for name in "ab"]
                step = optimizer_and_step()
                steps = [step(variables, has_second) for has_second in passes[:2]]
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                for number in (0, 1, 1, 0, 1, 1):
                    session.run(steps[number])
                return [value.tolist() for value in session.run(variables)]
        variables = [tf.Variable([0.0]), tf.Variable([0.0])]
        step = optimizer_and_step()

        def done(variables, has_second):
            step(variables, has_second)

        run = step if mode == "eager" else tf.function(done, autograph=False)
        for has_second in passes:
            run(variables, has_second)
        found = [variable.numpy().tolist() for variable in variables]
        try:
            step([variables[0], tf.Variable([0.0], name="stranger")], True)
        except ValueError as error:
            found.append("stranger" in str(error) and "an optimizer for each set of variables" in str(error))
        return found

    expected = [[9.0], [30.0]] if mode == "v1" else [[9.0], [30.0], True]
    assert two(fn) == [expected] * 2


def test_collectives_in_loops_and_conditions_have_gradients(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import tensorflow.compat.v1 as tf

        with tf.Graph().as_default(), tf.Session() as session:
            x = tf.constant(1.0)
            _, grown = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, hvd.allreduce(y, op=hvd.Sum)), [0, x])
            # Two conditions beside each other, whose branches are alike.
            chosen = [tf.cond(x > 0.0, lambda: hvd.allreduce(3.0 * x), lambda: hvd.allreduce(x)) for _ in range(2)]
            slopes = [tf.gradients(value, x)[0] for value in (grown, chosen[0])]
            return [float(value) for value in session.run([grown, *chosen, *slopes])]

    assert two(fn) == [[8.0, 3.0, 3.0, 8.0, 3.0]] * 2
