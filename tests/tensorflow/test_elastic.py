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
