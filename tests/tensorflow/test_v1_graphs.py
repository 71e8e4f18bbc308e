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


@pytest.mark.parametrize(
    "passes",
    [
        # Three steps: the second gradient is there only in the first pass, only in the second, and in none.
        [True, False, False, True, False, False],
        # Two steps: a function is traced first without it.
        [False, True, True, False],
    ],
)
@pytest.mark.parametrize("mode", ["eager", "function", "v1"])
def test_a_gradient_that_is_missing_in_one_pass_counts_as_zero_in_it(two: Any, mode: str, passes: list[bool]) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow.compat.v1 as tf

        scale = 1.0 + hvd.rank()
        options = {"backward_passes_per_step": 2}

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
                steps = {has_second: step(variables, has_second) for has_second in passes[:2]}
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                for has_second in passes:
                    session.run(steps[has_second])
                return [value.tolist() for value in session.run(variables)]
        variables, seen = [tf.Variable([0.0]), tf.Variable([0.0])], []
        step = optimizer_and_step()

        def done(variables, has_second):
            step(variables, has_second)

        run = step if mode == "eager" else tf.function(done, autograph=False)
        for has_second in passes:
            run(variables, has_second)
            seen.append(float(variables[1][0]))
        found = [variable.numpy().tolist() for variable in variables]
        assert seen == [15.0 * sum(passes[: number // 2 * 2]) for number in range(1, len(passes) + 1)]
        try:
            step([variables[0], tf.Variable([0.0], name="stranger")], True)
        except ValueError as error:
            found.append("stranger" in str(error) and "one optimizer for each set of variables" in str(error))
        return found

    expected: list[Any] = [[1.5 * len(passes)], [30.0]]
    expected += [] if mode == "v1" else [True]
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


def test_a_condition_broadcasts_and_waits_where_it_is_true_and_keeps_no_graph_alive(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import gc
        import weakref

        import tensorflow.compat.v1 as tf

        from hvd_cluster.engine import basics

        def run_graph() -> tuple[Any, list[Any]]:
            with tf.Graph().as_default() as graph, tf.Session() as session:
                w = tf.get_variable("w", initializer=tf.constant([1.0 + hvd.rank()]))
                is_true = tf.placeholder(tf.bool, [])
                nodes = [
                    tf.cond(is_true, lambda: hvd.broadcast_([w], 1), tf.no_op),
                    tf.cond(is_true, hvd.barrier, tf.no_op),
                    tf.cond(is_true, lambda: hvd.broadcast_([], 1), tf.no_op),
                ]
                session.run(tf.global_variables_initializer())
                found = []
                for condition in (False, True):
                    session.run(nodes, {is_true: condition})
                    found.append([len(submitted), float(session.run(w)[0])])
                return weakref.ref(graph), found

        engine = basics.engine()
        submitted, submit = [], engine.submit

        def noted(request: Any, **options: Any) -> Any:
            submitted.append(request.name)
            return submit(request, **options)

        engine.submit = noted
        try:
            graph, found = run_graph()
        finally:
            del engine.submit
        gc.collect()
        return [*found, graph() is None]

    assert two(fn) == [[[0, 1.0 + rank], [2, 2.0], True] for rank in range(2)]


@pytest.mark.parametrize("kind", ["function", "v1"])
def test_collectives_with_gradients_keep_no_graph_alive(two: Any, kind: str) -> None:
    def fn(hvd: Any) -> list[Any]:
        import gc
        import weakref

        import tensorflow as tf

        def slope_of_sum(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.add_n(
                    [hvd.allreduce(x, op=hvd.Sum), hvd.broadcast(x, 0), hvd.reducescatter(hvd.allgather(x))]
                )
            return tape.gradient(total, x)

        def run_graph() -> tuple[Any, float]:
            if kind == "function":
                function = tf.function(slope_of_sum)
                value = function(tf.ones([2]))
                return weakref.ref(function.get_concrete_function(tf.ones([2])).graph), float(value[0])
            with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
                return weakref.ref(graph), float(session.run(slope_of_sum(tf.ones([2])))[0])

        graph, slope = run_graph()
        gc.collect()
        return [slope, graph() is None]

    # 2 of the sum, 1 of the broadcast on its root, 1 of the reduced rows of all.
    assert two(fn) == [[4.0, True], [3.0, True]]


def test_a_barrier_of_a_graph_is_an_operation(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import time

        import tensorflow.compat.v1 as tf

        with tf.Graph().as_default(), tf.Session() as session:
            wait = hvd.barrier()
            time.sleep(0.3 * hvd.rank())
            before = time.monotonic()
            session.run(wait)
            return [type(wait).__name__, before, time.monotonic()]

    (kind, _, first_is_through), (_, last_comes, _) = two(fn)
    assert kind == "Operation"
    assert last_comes <= first_is_through  # by the clock of the host


def test_what_a_failed_run_left_goes_with_its_world(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow.compat.v1 as tf

        from hvd_cluster.tensorflow import interop

        found = []
        with tf.Graph().as_default(), tf.Session() as session:
            begun = hvd.allreduce(tf.ones([4]), op=hvd.Sum, name="left")
            while begun.op.type != "PyFunc":  # the node that begins and that which waits, behind a lock
                begun = begun.op.inputs[0]
            (number,) = begun.op.inputs
            whole = hvd.allreduce(tf.ones([4]), op=hvd.Sum, name="whole")
            session.run(number)  # as in a run that fails before it waits
            found.append(len(interop._under_way))
            hvd.allgather_object(None)  # both have begun
            hvd.shutdown()
            hvd.init(process_sets="dynamic")
            found.append(float(session.run(whole)[0]))
        return [*found, len(interop._under_way)]

    assert two(fn) == [[1, 2.0, 0]] * 2
