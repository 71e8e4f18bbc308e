"""What the job runs: fits a small model to a table that it makes, and saves it in the store."""

import argparse

import torch
from pyspark.sql import SparkSession

from hvd_cluster.estimators import TorchEstimator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True, help="a folder that all executors see, such as /Volumes/...")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--run-id", default="train", help="a retry with the same id continues from the last checkpoint")
    arguments = parser.parse_args()

    spark = SparkSession.builder.getOrCreate()
    df = spark.range(2000).selectExpr("array(sin(id), cos(id)) AS features", "sin(id) + 2 * cos(id) AS y")
    net = torch.nn.Linear(2, 1)
    model = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["features"],
        label_cols=["y"],
        batch_size=50,
        epochs=4,
        validation=0.2,
        num_proc=arguments.workers,
        store=arguments.store,
        run_id=f"run-{arguments.run_id}",
    ).fit(df)
    model.write().overwrite().save(f"{arguments.store}/model")
    print("validation loss", model.getHistory()[-1]["validation"]["loss"])


if __name__ == "__main__":
    main()
