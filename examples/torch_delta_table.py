"""A fit on one version of a Delta table, to which another writer commits meanwhile.

python examples/torch_delta_table.py
"""

from __future__ import annotations

import tempfile

import numpy as np
import pyarrow as pa
import torch
from deltalake import DeltaTable, write_deltalake

from hvd_cluster.data import open_table
from hvd_cluster.estimators import TorchEstimator


def rows(begin: int, stop: int) -> pa.Table:
    x = np.arange(begin, stop, dtype="float32") / 1000
    return pa.table({"x": x, "y": 2 * x + 1})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_deltalake(folder, rows(0, 2000))  # version 0
        DeltaTable(folder).delete("x >= 1")  # version 1: its files still hold the rows
        table = open_table(folder)
        write_deltalake(folder, rows(5000, 6000), mode="append")  # version 2, of which the fit sees nothing

        net = torch.nn.Linear(1, 1)
        estimator = TorchEstimator(
            num_proc=2,
            model=net,
            optimizer=torch.optim.Adam(net.parameters(), lr=0.05),
            loss=torch.nn.functional.mse_loss,
            feature_cols=["x"],
            label_cols=["y"],
            input_shapes=[[-1, 1]],
            label_shapes=[[-1, 1]],
            validation=0.1,
            batch_size=32,
            epochs=5,
        )
        model = estimator.fit(table)
        print(f"{table.snapshot}: loss {model.getHistory()[-1]['validation']['loss']:.4f}")


if __name__ == "__main__":
    main()
