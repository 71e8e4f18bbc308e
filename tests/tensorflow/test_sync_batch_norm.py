"""Batch normalisation over all ranks, where it is not obvious: names, far means, compilers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ENV = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}


def test_layers_match_by_their_order_and_not_by_their_names(two: Any) -> None:
    def fn(hvd: Any) -> float:
        import keras
        import numpy as np
        import tensorflow as tf

        def build() -> Any:
            layers = [keras.layers.Dense(3), hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization()]
            return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])

        if hvd.rank() == 0:
            build()  # to look at, say: from here on the layers that Keras names are called otherwise than on rank 1
        model = build()
        x = tf.constant(np.random.default_rng(hvd.rank()).normal(size=(8, 3)).astype("float32"))
        variables = [variable.value for variable in model.trainable_variables]

        @tf.function
        def gradients(x):
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
            return tape.gradient(loss, variables)

        return float(tf.add_n([tf.reduce_sum(tf.abs(each)) for each in gradients(x)]))

    mine, theirs = two(fn)
    assert mine == theirs > 0


def test_the_layer_in_conditions_beside_each_other(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import tensorflow as tf

        layers = [hvd.SyncBatchNormalization(center=False, scale=False, epsilon=0.0) for _ in range(2 + hvd.rank())]
        first, second = layers[-2:]

        @tf.function
        def normal(x, swap):
            a = tf.cond(swap, lambda: first(2.0 * x, training=True), lambda: first(x, training=True))
            b = tf.cond(swap, lambda: second(x, training=True), lambda: second(3.0 * x, training=True))
            return tf.reshape(a + b, [-1])

        x = tf.constant([[0.0], [2.0]]) + 2.0 * hvd.rank()
        return [float(each) for each in normal(x, tf.constant(True))]

    # 0, 2 and 2, 4: the mean is 2, the variance 2.
    edge = 2 * 2.0**0.5
    for found, expected in zip(two(fn), ([-edge, 0.0], [0.0, edge]), strict=True):
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5


def test_a_small_variance_far_from_zero_is_as_exact_as_that_of_keras(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import keras
        import numpy as np
        import tensorflow as tf

        whole = (1e4 + 0.1 * np.random.default_rng(0).normal(size=(64, 3))).astype("float32")
        share = slice(32 * hvd.rank(), 32 * hvd.rank() + 32)
        ours, plain = hvd.SyncBatchNormalization(momentum=0.0), keras.layers.BatchNormalization(momentum=0.0)
        out, expected = ours(tf.constant(whole[share]), training=True), plain(whole, training=True)
        variance = np.abs(np.array(ours.moving_variance) / np.var(whole.astype("float64"), axis=0) - 1.0)
        return [float(np.abs(out - expected[share]).max()), float(variance.max())]

    for output, variance in two(fn):
        assert output < 0.05  # float32 has steps of 0.001 there, a hundredth of the deviation
        assert variance < 0.05


def test_keras_compiles_neither_the_layer_nor_a_distributed_step_by_itself_on_a_gpu(two: Any) -> None:
    def fn(hvd: Any) -> list[bool]:
        import keras
        import tensorflow as tf

        def is_compiled(layer: Any, optimizer: Any) -> bool:
            model = keras.Sequential([keras.Input((3,)), layer])
            model.compile(optimizer, "mse")
            return bool(model.jit_compile)

        import hvd_cluster.tensorflow.keras as hvd_keras

        real = tf.config.list_physical_devices
        tf.config.list_physical_devices = lambda kind=None: [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
        try:
            return [
                is_compiled(keras.layers.Dense(1), keras.optimizers.SGD()),
                is_compiled(hvd.SyncBatchNormalization(), keras.optimizers.SGD()),
                is_compiled(keras.layers.Dense(1), hvd_keras.DistributedOptimizer(keras.optimizers.SGD())),
            ]
        finally:
            tf.config.list_physical_devices = real

    assert two(fn) == [[True, False, False]] * 2


@pytest.mark.slow
def test_a_saved_model_with_the_layer_loads_without_custom_objects(tmp_path: Path) -> None:
    """In a new process, which imports only the loading package."""
    save = """
import sys, keras
import hvd_cluster.tensorflow as hvd
model = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization(), keras.layers.Dense(1)])
model.compile("sgd", "mean_squared_error")
model.save(sys.argv[1])
"""
    load = """
import sys, keras
import hvd_cluster.tensorflow, hvd_cluster.keras as hvd
model = hvd.load_model(sys.argv[1]) if sys.argv[2] == "hvd" else keras.models.load_model(sys.argv[1])
print(type(model.layers[0]).__module__)
"""
    if find_spec("tensorflow") is None:
        pytest.skip("needs tensorflow")
    path = str(tmp_path / "model.keras")

    def run(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, path, *arguments]
        done = subprocess.run(command, env=os.environ | ENV, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run(save)
    only_keras = load.replace("hvd_cluster.tensorflow, ", "")
    found = [run(load, "keras"), run(only_keras, "hvd")]
    assert found == ["hvd_cluster.tensorflow.sync_batch_norm"] * 2
