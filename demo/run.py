"""From a DataFrame to a fitted model: handwritten digits, two workers. `make demo` runs it.

On Spark where there is Java, else the same estimator over pandas in local processes.
"""

import logging
import os
import shutil
import sys
from pathlib import Path

import pandas as pd
import torch
from sklearn.datasets import load_digits

from hvd_cluster.estimators import LocalBackend, SparkBackend, TorchEstimator, TorchModel

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent).resolve()


def network() -> torch.nn.Module:
    nn = torch.nn
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(48 * 2 * 2, 10))


def accuracy(output, label):
    return (output.argmax(dim=1) == label).float().mean()


def digits() -> pd.DataFrame:
    """The 1,797 images of 8 x 8 that ship inside scikit-learn; features in [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    return pd.DataFrame({"features": (images / 16).tolist(), "label": labels})


def java() -> str | None:
    """Where Spark would find Java."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=f"{home}/bin" if home else None)


def start_spark():
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's own choice is the python3 of the PATH
    builder = SparkSession.builder.master("local[4]").appName("hvd_cluster demo")
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    return builder.config(map=quiet).getOrCreate()


def plot(history: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    names = {"train_loss": "training", "validation_loss": "validation"}
    history.set_index("epoch")[list(names)].rename(columns=names).plot(ax=left, title="loss")
    names = {"train_accuracy": "training", "validation_accuracy": "validation"}
    history.set_index("epoch")[list(names)].rename(columns=names).plot(ax=right, title="accuracy")
    figure.savefig(path, dpi=120)


def main() -> int:
    logging.basicConfig(level=logging.WARNING)
    OUT.mkdir(parents=True, exist_ok=True)
    timeline = OUT / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(timeline), "OMP_NUM_THREADS": "1"}
    spark = None
    if java():
        print("Starting Spark; this takes about 10 s.", file=sys.stderr, flush=True)
        spark = start_spark()
        data, backend = spark.createDataFrame(digits()), SparkBackend(num_proc=2, env=env, spark=spark)
        print(f"Training on Spark {spark.version} ({spark.conf.get('spark.master')}) with 2 workers.", flush=True)
    else:
        print(
            "No Java here, so no Spark (Debian: apt-get install openjdk-17-jre-headless): pandas and local processes.",
            flush=True,
        )
        data, backend = digits(), LocalBackend(num_proc=2, env=env)

    net = network()
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.004),
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        feature_cols=["features"],
        input_shapes=[[-1, 1, 8, 8]],
        label_cols=["label"],
        validation=0.2,
        batch_size=32,
        epochs=12,
        backend=backend,
        random_seed=1,
        store=str(OUT / "work"),
    )
    model = estimator.fit(data)

    reached = model.history["validation_accuracy"].iloc[-1]
    print(f"validation accuracy: {reached:.4f}")
    plot(model.history, OUT / "history.png")
    model.write().overwrite().save(str(OUT / "model"))
    scored = TorchModel.load(str(OUT / "model")).setOutputKinds(["argmax"]).transform(data)
    scored = scored.toPandas() if spark else scored
    right = scored["label__output"] == scored["label"]
    print(f"the model, saved and loaded again, recognises {right.sum()} of {len(right)} digits")
    print(f"written: {OUT / 'history.png'}, {timeline} (open it at https://ui.perfetto.dev), {OUT / 'model'}")
    programs, example = Path(sys.executable).parent, ROOT / "examples" / "torch_digits.py"
    print(
        "\nThree things to try next:\n"
        f"  {programs / 'hvdrun'} timeline {timeline}\n"
        "      what each worker did, as a table and a picture\n"
        f"  {programs / 'horovodrun'} -np 2 --monitor {sys.executable} {example} --epochs 3\n"
        "      a program written for Horovod, and what its steps spend their time on\n"
        f"  less {ROOT / 'docs' / 'getting-started.md'}\n"
        "      your own program: seven changes"
    )
    if spark:
        spark.stop()
    return 0 if reached > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
