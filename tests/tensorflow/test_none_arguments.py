"""None for an argument of a public function of TensorFlow or Keras means "not given", as in Horovod's functions."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import cloudpickle

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def with_none(function: Any, *args: Any) -> list[str]:
    """The parameters for which None fails; those whose default is None are left out."""
    failed = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default not in (None, parameter.empty):
            try:
                function(*args, **{name: None})
            except Exception as error:  # noqa: BLE001 - collected
                failed.append(f"{function.__name__}({name}=None): {type(error).__name__}: {error}")
    return failed


def test_none_is_the_default_of_each_argument(two: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        import keras
        import numpy as np
        import tensorflow as tf

        import hvd_cluster.keras as hvd_keras

        tensor, variable, failed = tf.ones((2, 1)), tf.Variable([1.0]), []
        for name in ("allreduce", "allgather", "alltoall", "reducescatter"):
            failed += with_none(getattr(hvd, name), tensor)
        for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"):
            failed += with_none(getattr(hvd, name), [tensor])
        failed += with_none(hvd.broadcast, tensor, 0) + with_none(hvd.broadcast_, [variable], 0)
        failed += with_none(hvd.broadcast_variables, [variable], 0) + with_none(hvd.barrier)
        failed += with_none(hvd.broadcast_object, 1) + with_none(hvd.allgather_object, 1)
        failed += with_none(hvd.broadcast_object_fn) + with_none(hvd.size_op) + with_none(hvd.process_set_included_op)

        def gradient(**given: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = variable * variable
            return hvd.DistributedGradientTape(tape, **given).gradient(loss, [variable])

        gradient.__signature__ = inspect.signature(hvd.DistributedGradientTape)  # type: ignore[attr-defined]
        failed += with_none(gradient)
        failed += with_none(hvd.DistributedOptimizer, tf.compat.v1.train.GradientDescentOptimizer(0.1))
        for wrapper in (hvd_keras.DistributedOptimizer, hvd_keras.PartialDistributedOptimizer):
            failed += with_none(wrapper, keras.optimizers.SGD())
        failed += with_none(hvd_keras.allreduce, np.ones(2)) + with_none(hvd_keras.reducescatter, np.ones(2))
        failed += with_none(hvd_keras.broadcast_variables, [keras.Variable([1.0])], 0)
        compiled = tf.function(lambda: hvd.allreduce(tensor, compression=None, prescale_factor=None, process_set=None))
        assert compiled().numpy().tolist() == [[1.0], [1.0]]
        return failed

    assert two(fn) == [[], []]
