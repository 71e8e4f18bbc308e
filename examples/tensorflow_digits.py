"""Handwritten digits with a ``tf.function``: hvdrun -np 2 python examples/tensorflow_digits.py

The six lines that make a script distributed are marked with their number.
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvd_cluster.tensorflow as hvd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint", default="")
    arguments = parser.parse_args()

    hvd.init()  # 1

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")  # 2
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)

    digits = load_digits()
    images, labels = (digits.images / 16.0).astype("float32")[..., None], digits.target.astype("int64")
    mine = np.arange(hvd.rank(), len(images), hvd.size())
    dataset = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
    dataset = dataset.repeat().shuffle(1000, seed=hvd.rank()).batch(arguments.batch_size)

    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(0.002 * hvd.size())  # 3
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)  # 4
        variables = [variable.value for variable in model.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    hvd.broadcast_variables(model.weights, root_rank=0)  # 5
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    for number, (x, y) in enumerate(dataset.take(arguments.steps // hvd.size())):
        loss = step(x, y)
        if number % 10 == 0 and hvd.rank() == 0:
            print(f"step {number}: loss {float(loss):.3f}")

    right = tf.reduce_mean(tf.cast(tf.argmax(model(images[mine]), axis=1) == labels[mine], tf.float32))
    accuracy = float(hvd.allreduce(right))
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.3f} on {hvd.size()} workers")
        if arguments.checkpoint:
            model.save(arguments.checkpoint)  # 6


if __name__ == "__main__":
    main()
