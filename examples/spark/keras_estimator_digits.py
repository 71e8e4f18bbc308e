# ruff: noqa: I001 - compat comes first: its import is what makes horovod resolve
"""Handwritten digits with the Keras estimator on a Spark DataFrame, with Horovod's API:

    python examples/spark/keras_estimator_digits.py --num-proc 2

Without ``--master`` or ``--remote`` a small Spark is started on this machine. KERAS_BACKEND=torch or KERAS_BACKEND=jax
chooses another backend than TensorFlow, for the workers too.
"""

from __future__ import annotations

import argparse

import hvd_cluster.compat  # noqa: F401
from horovod.keras.callbacks import BestModelCheckpoint
from horovod.spark.keras import KerasEstimator
import keras
import pandas as pd
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with horovod.spark.keras")
    parser.add_argument("--master", default="local[2]", help="of a classic session")
    parser.add_argument("--remote", default=None, help="of a Spark Connect session, for example sc://host:15002")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="of one worker")
    args = parser.parse_args()

    builder = SparkSession.builder.appName("digits")
    spark = builder.remote(args.remote).getOrCreate() if args.remote else builder.master(args.master).getOrCreate()
    images, digits = load_digits(return_X_y=True)
    rows = pd.DataFrame({"image": (images / 16).tolist(), "digit": digits})
    train, test = (spark.createDataFrame(part) for part in (rows[:1437], rows[1437:]))
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    estimator = KerasEstimator(
        model=model,
        optimizer=keras.optimizers.Adam(0.002),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        feature_cols=["image"],
        label_cols=["digit"],
        validation=0.1,
        checkpoint_callback=BestModelCheckpoint(monitor="val_loss"),
        output_kinds=["argmax"],
        num_proc=args.num_proc,
        epochs=args.epochs,
        batch_size=args.batch_size,
        verbose=0,
    )
    fitted = estimator.fit(train)
    for epoch, loss in enumerate(fitted.getHistory()["loss"]):
        print(f"epoch {epoch}: loss {loss:.3f}")
    scored = fitted.transform(test).select("digit", "digit__output").collect()
    spark.stop()
    right = sum(row["digit"] == row["digit__output"] for row in scored)
    print(f"accuracy {right / len(scored):.3f} on {args.num_proc} workers")


if __name__ == "__main__":
    main()
