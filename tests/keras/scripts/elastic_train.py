"""An elastic training run: ``elastic_train.py FOLDER function|fit PAUSE_S``. Rank 0 writes end.json, all pid.<pid>.

The data of a step depend on its number alone, so a run that goes back to a commit ends as one that nobody disturbs.
"""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import hvd_cluster.keras as hvd

FOLDER, KIND, PAUSE_S = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
EPOCHS, STEPS, BATCH = 3, 8, 4

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # ranks begin apart: the first sync makes them equal
generator = np.random.default_rng(0)
x = generator.normal(size=(EPOCHS, STEPS, 2 * BATCH, 3)).astype("float32")
y = x.sum(axis=-1, keepdims=True)
# The dropout drops nothing; its seed is what a step of JAX that fails takes along.
model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(1e-9, seed=1), keras.layers.Dense(1)])
for variable in model.trainable_variables:
    variable.assign(keras.ops.full(variable.shape, 0.5 if hvd.rank() == 0 else -1.0))


def note(step):
    temporary = FOLDER / f"tmp.{os.getpid()}"
    temporary.write_text(f"{step} {hvd.rank()}")
    temporary.rename(FOLDER / f"pid.{os.getpid()}")
    time.sleep(PAUSE_S)


def mine(of, epoch, first):
    """This rank's rows of a whole epoch, with those of step ``first`` at its beginning."""
    steps = np.roll(of[epoch], -first, axis=0)
    return steps[:, hvd.rank() * BATCH : (hvd.rank() + 1) * BATCH].reshape(-1, of.shape[-1])


def fit():
    """``model.fit`` and the callbacks, one epoch at a time."""
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            note(state.epoch * STEPS + state.batch)

    @hvd.elastic.run
    def train(state):
        while state.epoch < EPOCHS:
            state.model.fit(
                mine(x, state.epoch, state.batch),
                mine(y, state.epoch, state.batch),
                batch_size=BATCH,
                shuffle=False,
                verbose=0,
                callbacks=[
                    hvd.elastic.UpdateBatchStateCallback(state),
                    hvd.elastic.UpdateEpochStateCallback(state),
                    Note(),
                    hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
                ],
            )

    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    train(state)


def function():
    """A ``tf.function`` with a tape."""
    import tensorflow as tf

    import hvd_cluster.tensorflow as hvd_tf

    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)

    @tf.function
    def step(a, b):
        with hvd_tf.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(model(a, training=True) - b))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @hvd_tf.elastic.run
    def train(state):
        while state.step < EPOCHS * STEPS:
            epoch, number = divmod(state.step, STEPS)
            step(tf.constant(mine(x, epoch, number)[:BATCH]), tf.constant(mine(y, epoch, number)[:BATCH]))
            state.step += 1
            note(state.step)
            if state.step % 2 == 0:
                state.commit()

    train(hvd_tf.elastic.TensorFlowKerasState(model, optimizer, step=0))


{"fit": fit, "function": function}[KIND]()
weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
everyone = hvd.allgather(weights[None])
if hvd.rank() == 0:
    equal = bool((everyone == everyone[0]).all())
    (FOLDER / "end.json").write_text(json.dumps({"weights": weights.tolist(), "equal": equal, "size": hvd.size()}))
