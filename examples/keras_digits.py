"""Handwritten digits with ``model.fit`` on any backend of Keras: hvdrun -np 2 python examples/keras_digits.py

KERAS_BACKEND=torch or KERAS_BACKEND=jax chooses another backend than TensorFlow.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvd_cluster.keras as hvd
from hvd_cluster.keras.device import use_own_gpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint", default="")
    arguments = parser.parse_args()

    hvd.init()
    use_own_gpu(hvd.local_rank())
    keras.utils.set_random_seed(hvd.rank())

    digits = load_digits()
    images, labels = (digits.images / 16.0).astype("float32")[..., None], digits.target.astype("int64")
    steps = len(images) // arguments.batch_size // hvd.size()
    mine = np.arange(hvd.rank(), len(images), hvd.size())[: steps * arguments.batch_size]

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    rate = 0.002 * hvd.size()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(rate)), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2),
    ]
    if hvd.rank() == 0 and arguments.checkpoint:
        callbacks.append(keras.callbacks.ModelCheckpoint(arguments.checkpoint))
    history = model.fit(
        images[mine],
        labels[mine],
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    if hvd.rank() == 0:
        accuracy = history.history["accuracy"][-1]
        print(f"accuracy {accuracy:.3f} on {hvd.size()} workers")


if __name__ == "__main__":
    main()
