# ruff: noqa: I001 - compat comes first: its import is what makes horovod resolve
"""Handwritten digits with Keras and TensorFlow on the actors of a Ray cluster, with Horovod's API:

    python examples/ray/keras_digits.py --num-workers 2

Each worker makes one ``Digits``, which keeps its data and its model from call to call: training continues where it was.
"""

from __future__ import annotations

import argparse
from typing import Any

import hvd_cluster.compat  # noqa: F401
import ray
from horovod.ray import RayExecutor


class Digits:
    """A worker's share of the data, and its model."""

    def __init__(self, batch_size: int) -> None:
        import horovod.tensorflow.keras as hvd
        import keras
        import tensorflow as tf
        from sklearn.datasets import load_digits

        hvd.init()
        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
            tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
        keras.utils.set_random_seed(hvd.rank())
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype("float32")
        self.test = images[1437:], labels[1437:]
        steps = 1437 // hvd.size() // batch_size  # as many on every worker
        self.mine = [part[hvd.rank() : 1437 : hvd.size()][: steps * batch_size] for part in (images, labels)]
        self.batch_size = batch_size
        self.hvd = hvd
        self.epoch = 0
        self.model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.002 * hvd.size()))
        self.model.compile(optimizer, loss, metrics=["accuracy"])

    def train(self, epochs: int) -> float:
        """Train ``epochs`` more epochs; returns the mean loss of the last one over all workers."""
        from horovod.ray import ray_logger

        def log(epoch: int, logs: dict[str, Any]) -> None:
            if self.hvd.rank() == 0:
                ray_logger.log({"epoch": epoch, "loss": logs["loss"]})

        import keras

        callbacks = [
            self.hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            self.hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.LambdaCallback(on_epoch_end=log),
        ]
        history = self.model.fit(
            *self.mine,
            batch_size=self.batch_size,
            initial_epoch=self.epoch,
            epochs=self.epoch + epochs,
            callbacks=callbacks,
            verbose=0,
        )
        self.epoch += epochs
        return float(history.history["loss"][-1])

    def accuracy(self) -> float:
        """On the test set."""
        return float(self.model.evaluate(*self.test, verbose=0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with horovod.ray and Keras")
    parser.add_argument("--address", default=None, help="of the Ray cluster; none starts one here")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4, help="of each of two rounds")
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
    parser.add_argument("--use-gpu", action="store_true")
    args = parser.parse_args()

    ray.init(address=args.address)
    settings = RayExecutor.create_settings(timeout_s=120)
    executor = RayExecutor(settings, num_workers=args.num_workers, use_gpu=args.use_gpu)
    executor.start(executable_cls=Digits, executable_args=[args.batch_size])
    epochs = args.epochs
    for part in range(2):
        losses = executor.execute(lambda digits: digits.train(epochs), callbacks=[lambda info: print("logged", info)])
        print(f"round {part}: loss {losses[0]:.3f}")
    accuracy = executor.execute_single(lambda digits: digits.accuracy())
    executor.shutdown()
    print(f"accuracy {accuracy:.3f} on {len(losses)} workers")


if __name__ == "__main__":
    main()
