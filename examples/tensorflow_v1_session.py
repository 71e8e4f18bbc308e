"""A v1 graph in a MonitoredTrainingSession: hvdrun -np 2 python examples/tensorflow_v1_session.py"""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import hvd_cluster.tensorflow as hvd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint-dir", default="")
    arguments = parser.parse_args()

    hvd.init()
    tf.disable_eager_execution()

    config = tf.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())

    digits = load_digits()
    data, labels = (digits.data / 16.0).astype("float32"), digits.target.astype("int64")
    generator = np.random.default_rng(hvd.rank())

    images = tf.placeholder(tf.float32, [None, 64])
    targets = tf.placeholder(tf.int64, [None])
    weights = tf.get_variable("weights", [64, 10])
    bias = tf.get_variable("bias", [10], initializer=tf.zeros_initializer())
    logits = tf.matmul(images, weights) + bias
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), targets), tf.float32))

    optimizer = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.01 * hvd.size()))
    step = tf.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)

    hooks = [
        hvd.BroadcastGlobalVariablesHook(0),
        tf.train.StopAtStepHook(last_step=arguments.steps // hvd.size()),
    ]
    folder = arguments.checkpoint_dir if hvd.rank() == 0 and arguments.checkpoint_dir else None
    with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, config=config, hooks=hooks) as session:
        while not session.should_stop():
            chosen = generator.integers(0, len(data), arguments.batch_size)
            _, right = session.run([train, accuracy], {images: data[chosen], targets: labels[chosen]})
    if hvd.rank() == 0:
        print(f"accuracy {right:.3f} on {hvd.size()} workers")


if __name__ == "__main__":
    main()
