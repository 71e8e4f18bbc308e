"""Graphs that were traced in one world and run in another, and the errors of a world that is over or not yet there."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_function_that_was_traced_in_one_world_is_right_in_the_next(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import os

        import keras
        import numpy as np
        import tensorflow as tf

        rank = hvd.rank()
        shared, local = tf.Variable(1.0), tf.Variable(1.0)
        normalised = hvd.SyncBatchNormalization(center=False, scale=False, epsilon=0.0)

        @tf.function
        def asked():
            everything = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]
            return tf.stack([*everything, hvd.process_set_included_op()])

        @tf.function
        def gradients():
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = (shared + local) * 2.0 * (rank + 1.0)
            tape.register_local_source(local)
            return tf.stack(tape.gradient(loss, [shared, local]))

        @tf.function
        def normal():
            return normalised(tf.constant([[0.0], [2.0]]) + 4.0 * rank, training=True)

        def results() -> list[Any]:
            return [each().numpy().ravel().tolist() for each in (asked, gradients, normal)]

        hvd.shutdown()
        hvd.init(comm=[rank])
        os.environ["HOROVOD_ELASTIC"] = "1"  # traced as in an elastic job, whose world may grow
        try:
            alone = results()
        finally:
            del os.environ["HOROVOD_ELASTIC"]
            hvd.shutdown()
            hvd.init(process_sets="dynamic")
        together = results()
        whole = keras.layers.BatchNormalization(center=False, scale=False, epsilon=0.0)
        expected = whole(np.float32([[0.0], [2.0], [4.0], [6.0]]), training=True)[2 * rank : 2 * rank + 2]
        return [alone, together[:2], float(abs(np.float32(together[2]) - np.ravel(expected)).max())]

    for rank, (alone, together, error) in enumerate(two(fn)):
        own = 2.0 * (rank + 1)
        assert alone == [[0, 1, 0, 1, 1], [own, own], [-1.0, 1.0]]
        assert together == [[rank, 2, rank, 2, 1], [3.0, own / 2]]
        assert error < 1e-5


def test_a_world_that_is_over_is_an_error_of_tensorflow_and_the_next_one_works(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        def raised(act: Any) -> list[Any]:
            try:
                act()
            except tf.errors.OpError as error:
                kinds = [type(error).__mro__[1].__name__ if "hvd_cluster" in type(error).__module__ else ""]
                kinds = kinds if kinds[0] else [type(error).__name__]
                return [*kinds, isinstance(error, hvd.HorovodInternalError), "has been shut down" in str(error)]
            return []

        def reduced() -> Any:
            return hvd.allreduce(tf.ones([1]), name="over")

        compiled, asked = tf.function(reduced), tf.function(hvd.rank_op)
        asked(), compiled()
        found = []
        if hvd.rank() == 0:
            hvd.barrier()
            hvd.shutdown()
            found += [raised(reduced), raised(compiled), raised(hvd.rank_op), raised(asked)]
        else:
            hvd.barrier()
            found += [raised(reduced), raised(compiled)]
            hvd.shutdown()
        hvd.init(process_sets="dynamic")
        return [found, float(compiled()[0])]

    before_init = ["FailedPreconditionError", True, False]
    assert two(fn) == [
        [
            [
                before_init,
                ["UnknownError", False, False],
                ["FailedPreconditionError", False, False],
                ["InvalidArgumentError", False, False],
            ],
            1.0,
        ],
        [[["UnknownError", True, True], ["UnknownError", False, True]], 1.0],
    ]


@pytest.mark.slow
def test_a_name_that_is_in_flight_is_an_invalid_argument(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import threading

        import tensorflow as tf

        from hvd_cluster.engine import basics

        def reduced() -> Any:
            return hvd.allreduce(tf.ones([1]), name="twice")

        compiled = tf.function(reduced)
        compiled()
        found = []
        if hvd.rank() == 0:
            engine, submitted = basics.engine(), threading.Event()
            submit = engine.submit

            def noted(*arguments: Any, **options: Any) -> Any:
                try:
                    return submit(*arguments, **options)
                finally:
                    submitted.set()

            engine.submit = noted
            first = threading.Thread(target=reduced)  # rank 1 has not come yet
            first.start()
            submitted.wait()
            del engine.submit
            for act in (reduced, compiled):
                try:
                    act()
                except tf.errors.InvalidArgumentError as error:
                    found.append("same name as another tensor" in str(error))
            hvd.barrier()
            first.join()
        else:
            hvd.barrier()
            reduced()
        return found

    assert two(fn) == [[True, True], []]
