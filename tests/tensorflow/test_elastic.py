"""The states of TensorFlow's elastic functions, and what counts as a lost worker."""

from __future__ import annotations

from typing import Any

import pytest


def test_variables_are_saved_restored_and_made_equal(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        variables = [tf.Variable([1.0 * hvd.rank(), 2.0]), tf.Variable(hvd.rank())]
        state = hvd.elastic.TensorFlowState(variables, epoch=hvd.rank(), batch=3)
        state.sync()
        seen = [[v.numpy().tolist() for v in variables], state.epoch]
        variables[0].assign([9.0, 9.0])
        state.epoch = 7
        state.restore()  # to what was made equal, not to what was there at first
        seen += [[v.numpy().tolist() for v in variables], state.epoch]
        variables[1].assign(5)
        state.commit()
        variables[1].assign(6)
        state.restore()
        return [*seen, int(variables[1].numpy())]

    assert two(fn) == [[[[0.0, 2.0], 0], 0, [[0.0, 2.0], 0], 0, 5]] * 2


def test_a_session_keeps_its_state(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import tensorflow.compat.v1 as tf

        with tf.Graph().as_default(), tf.Session() as session:
            w = tf.get_variable("w", initializer=tf.constant(1.0 + hvd.rank()))
            session.run(tf.global_variables_initializer())
            state = hvd.elastic.TensorFlowState(session=session, step=hvd.rank())
            state.sync()
            seen = [float(session.run(w))]
            session.run(w.assign(8.0))
            state.restore()
            return [*seen, float(session.run(w)), state.step]

    assert two(fn) == [[1.0, 1.0, 0]] * 2


def test_a_keras_model_and_its_optimizer_are_kept(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import numpy as np

        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential([keras.layers.Dense(1)])
        try:
            hvd.elastic.TensorFlowKerasState(model)
        except ValueError as error:
            refused = "built" in str(error)
        model.build((None, 2))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0)
        state.sync()
        kept = [weight.copy() for weight in model.get_weights()]
        equal = all(len(np.unique(hvd.allgather(w.reshape(1, -1)), axis=0)) == 1 for w in kept)
        model.set_weights([weight + 1.0 for weight in kept])
        state.restore()
        back = all((a == b).all() for a, b in zip(kept, model.get_weights(), strict=True))
        return [refused, bool(equal), bool(back), len(optimizer.variables) > 2]

    assert two(fn) == [[True] * 4] * 2


def test_the_seeds_of_random_layers_stay_each_ranks_own(two: Any) -> None:
    def fn(hvd: Any) -> list[bool]:
        import keras
        import numpy as np

        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=1 + hvd.rank())])
        ones = np.ones((1, 64), "float32")
        state = hvd.elastic.TensorFlowKerasState(model, epoch=0)
        state.sync()
        masks = hvd.allgather(model(ones, training=True))
        return [bool((masks[0] == masks[1]).numpy().all())]

    assert two(fn) == [[False]] * 2


def test_the_passes_of_a_session_belong_to_its_state(two: Any) -> None:
    def fn(hvd: Any, adasum: bool) -> list[Any]:
        import tensorflow.compat.v1 as tf

        def begun(passes: int) -> Any:
            """A session behind so many passes of a step that has two."""
            graph = tf.Graph()
            with graph.as_default():
                w = tf.get_variable("w", initializer=tf.constant([1.0]))
                x = tf.placeholder(tf.float32, [])
                op = hvd.Adasum if adasum else hvd.Average
                optimizer = tf.train.GradientDescentOptimizer(1.0)
                optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, op=op)
                train = optimizer.minimize(tf.reduce_sum(w * x))
                session = tf.Session()
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(passes):
                session.run(train, {x: 1.0})
            return session, train, x, w

        # Rank 0 stands in the middle of a step; rank 1, like a newcomer, at the beginning of one.
        session, train, x, w = begun(3 - hvd.rank())
        state = hvd.elastic.TensorFlowState(session=session)
        state.sync()
        session.run(train, {x: 8.0})
        seen = [float(session.run(w)[0])]
        state.restore()  # the pass is lost, and one half of a step stands as before
        session.run(train, {x: 4.0})
        return [*seen, float(session.run(w)[0])]

    # Weights of 1 - 2 passes, then 1 + 8, and 1 + 4 after the restoration; Adasum of equal changes is that change.
    assert two(fn, False) == two(fn, True) == [[-10.0, -6.0]] * 2


def test_eager_passes_that_a_newcomer_would_not_have_are_refused_in_an_elastic_job(two: Any) -> None:
    def fn(hvd: Any) -> list[bool]:
        import os

        import tensorflow as tf

        found = []
        for op in (hvd.Average, hvd.Adasum):
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
            optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, op=op)
            w = tf.Variable([1.0])
            os.environ["HOROVOD_ELASTIC"] = "1"
            try:
                optimizer.apply_gradients(optimizer.compute_gradients(lambda w=w: w * w, [w]))
            except NotImplementedError as error:
                found.append("backward_passes_per_step" in str(error) and "Keras optimizer" in str(error))
            finally:
                del os.environ["HOROVOD_ELASTIC"]
        return found

    assert two(fn) == [[True, True]] * 2


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_collective_that_failed_counts_as_one_and_other_errors_are_raised(two: Any, mode: str) -> None:
    def fn(hvd: Any) -> list[str]:
        import tensorflow as tf

        def mismatched():
            return hvd.allreduce(tf.ones([2 + hvd.rank()]), name="elastic_shapes")

        def wrong():
            tf.debugging.assert_equal(tf.random.uniform([]), 2.0)
            return tf.constant(0)

        found = []
        for act in (mismatched, wrong):
            act = tf.function(act) if mode == "function" else act
            train = hvd.elastic.run(lambda state, act=act: act())
            try:
                train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))
            except hvd.HorovodInternalError as error:
                found.append("Mismatched ALLREDUCE tensor shapes" in str(error))
            except Exception as error:  # noqa: BLE001 - its class is what is tested
                found.append(type(error).__name__)
        return found

    assert two(fn) == [[True, "InvalidArgumentError"]] * 2
