"""The same, surviving the loss and the arrival of workers:

hvdrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python examples/keras_digits_elastic.py
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
    arguments = parser.parse_args()

    hvd.init()
    use_own_gpu(hvd.local_rank())  # once: a worker keeps its GPU when the world changes
    digits = load_digits()
    images, labels = (digits.data / 16.0).astype("float32"), digits.target.astype("int64")
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    rate = 0.002
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(rate * hvd.size())),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )

    @hvd.elastic.run
    def train(state):
        steps = len(images) // arguments.batch_size // hvd.size()
        mine = np.arange(hvd.rank(), len(images), hvd.size())[: steps * arguments.batch_size]
        state.model.fit(
            images[mine],
            labels[mine],
            batch_size=arguments.batch_size,
            epochs=arguments.epochs - state.epoch,
            callbacks=[
                hvd.elastic.UpdateBatchStateCallback(state),  # ends a resumed epoch where it would have ended
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
            ],
            verbose=0,
        )
        return state.model.evaluate(images, labels, verbose=0)[1]

    def on_reset():
        model.optimizer.learning_rate = rate * hvd.size()
        # The steps of an epoch depend on the number of workers here, so the position in the epoch does too.
        state.batch = state.batch * state.size // hvd.size()
        state.size = hvd.size()

    state = hvd.elastic.KerasState(model, epoch=0, batch=0, size=hvd.size())
    state.register_reset_callbacks([on_reset])
    accuracy = train(state)
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.3f} on {hvd.size()} workers")


if __name__ == "__main__":
    main()
