"""A fit on Spark minus its training loop, against `TorchDistributor` running the same training function minus the same
loop; 2 workers on a local session, in turns. Ours writes the Parquet too, which the peer finds written.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measure import Table, row
from benchmarks.spark_session import session
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.store import Store
from hvd_cluster.estimators import TorchEstimator
from hvd_cluster.estimators.torch.train import train

TURNS = 3
ROWS = 20_000
FEATURES = 20
EPOCHS = 2


def estimator(folder: Path) -> TorchEstimator:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    return TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=F.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=256,
        epochs=EPOCHS,
        num_proc=2,
        store=folder,
        verbose=0,
    )


def ours_s(frame: Any, folder: Path) -> float:
    """Seconds of ``fit`` that are not its training loop."""
    began_s = time.perf_counter()
    model = estimator(folder).fit(frame)
    taken_s = time.perf_counter() - began_s
    return taken_s - sum(record["seconds"] for record in model.getHistory())


def peer_s(spec: Any) -> float:
    """The same for TorchDistributor and the same spec."""
    from pyspark.ml.torch.distributor import TorchDistributor

    began_s = time.perf_counter()
    result = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train, spec)
    taken_s = time.perf_counter() - began_s
    return taken_s - sum(record["seconds"] for record in result.history)


def measure() -> Table:
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    with session(2) as spark, tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        values = [(each, sum(each)) for each in random.normal(size=(ROWS, FEATURES)).tolist()]
        frame = spark.createDataFrame(values, "x array<double>, y double").repartition(2).cache()
        frame.count()
        store = Store.create(Path(folder, "peer"))
        data = materialize(frame, store, columns=["x", "y"], num_proc=2)
        for turn in range(TURNS + 1):
            ours = estimator(Path(folder, "ours"))
            spec = ours._train_spec(ours._trial_rows(data, seed=0), store, f"run-{turn}")
            for name, taken_s in (("ours", ours_s(frame, Path(folder, "ours"))), ("peer", peer_s(spec))):
                if turn:
                    times[name].append(taken_s)
    return Table("fit minus its training loop", "TorchDistributor", [row(f"{ROWS:,} rows, 2 workers", times)])
