"""Variables and objects made equal on all ranks; the script of Horovod's README in a v1 session."""

from __future__ import annotations

from typing import Any


def test_variables_become_those_of_the_root(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        variables = [tf.Variable([1.0 * hvd.rank()]), tf.Variable(hvd.rank()), tf.Variable(tf.zeros([0]))]
        hvd.broadcast_variables(variables, 1)
        one = tf.Variable([5.0 + hvd.rank()])
        same = hvd.broadcast_(one, 0) is one
        again, more = tf.Variable([7.0 * hvd.rank()]), tf.Variable([3.0 - hvd.rank()])

        @tf.function
        def inside() -> None:
            hvd.broadcast_variables([again], 1)
            hvd.broadcast_(more, 0)

        inside()
        return [v.numpy().tolist() for v in (*variables, one, again, more)] + [same]

    assert two(fn) == [[[1.0], 1, [], [5.0], [7.0], [3.0], True]] * 2


def test_objects_travel(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        mine = {"rank": hvd.rank(), "text": "x" * 1000 * hvd.rank()}
        sent = hvd.broadcast_object(mine, root_rank=1)
        again = hvd.broadcast_object_fn(root_rank=0)(mine)
        return [sent["rank"], len(sent["text"]), again["rank"], [each["rank"] for each in hvd.allgather_object(mine)]]

    assert two(fn) == [[1, 1000, 0, [0, 1]]] * 2


def test_global_variables_are_a_matter_of_graphs(two: Any) -> None:
    def fn(hvd: Any) -> str:
        try:
            hvd.broadcast_global_variables(0)
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("hvd.broadcast_variables" in text for text in two(fn))


def test_the_v1_script_of_the_readme_ends_with_equal_weights(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import numpy as np
        import tensorflow.compat.v1 as tf

        rng = np.random.default_rng(hvd.rank())
        with tf.Graph().as_default():
            x = tf.placeholder(tf.float32, [None, 3])
            y = tf.placeholder(tf.float32, [None, 1])
            w = tf.get_variable("w", initializer=tf.constant([[1.0 + hvd.rank()]] * 3))
            b = tf.get_variable("b", initializer=tf.constant([0.0]))
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w) + b - y))
            optimizer = tf.train.MomentumOptimizer(0.05 * hvd.size(), momentum=0.9)
            optimizer = hvd.DistributedOptimizer(optimizer)
            step = tf.train.get_or_create_global_step()
            train = optimizer.minimize(loss, global_step=step)
            hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=20)]
            losses = []
            with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
                while not session.should_stop():
                    data = rng.normal(size=(16, 3))
                    target = data @ [[2.0], [-1.0], [0.5]]
                    _, value, weights = session.run([train, loss, w], {x: data, y: target})
                    losses.append(float(value))
            return [weights.ravel().tolist(), losses[0], losses[-1]]

    (weights, first, last), (others, _, _) = two(fn)
    assert weights == others
    assert last < 0.2 * first


def test_v1_aggregation_applies_every_second_pass(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow.compat.v1 as tf

        with tf.Graph().as_default(), tf.Session() as session:
            w = tf.get_variable("w", initializer=tf.constant([1.0]))
            x = tf.placeholder(tf.float32, [])
            optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
            step = tf.train.get_or_create_global_step()
            train = optimizer.minimize(tf.reduce_sum(w * x), global_step=step)
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            seen = []
            for value in (1.0, 2.0, 3.0, 4.0):
                session.run(train, {x: value * (hvd.rank() + 1)})
                seen.append(float(session.run(w)[0]))
            return [seen, int(session.run(step))]

    # Averages over the ranks of the sums of two passes: 1.5 * (1 + 2), then 1.5 * (3 + 4).
    assert two(fn) == [[[1.0, -3.5, -3.5, -14.0], 4]] * 2
