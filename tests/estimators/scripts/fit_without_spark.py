"""Fits, saves, loads and scores with pyspark, ray and tensorflow absent, in the driver and in the workers."""

import importlib.util
import sys
import tempfile

PACKAGES = ("pyspark", "ray", "tensorflow")


def make_absent():
    """Hide the packages if they are installed."""
    if any(importlib.util.find_spec(name) for name in PACKAGES):
        import absent

        absent.block(*PACKAGES)


make_absent()


def loss(output, label):
    loaded = [name for name in PACKAGES if name in sys.modules]
    if loaded:
        raise RuntimeError(f"the worker has loaded {loaded}")
    make_absent()
    return ((output - label) ** 2).mean()


if __name__ == "__main__":
    import pandas as pd
    import torch

    from hvd_cluster.estimators import TorchEstimator, TorchModel
    from hvd_cluster.estimators.stages.spark_ml import Estimator

    frame = pd.DataFrame({"x": [[float(i), 1.0] for i in range(20)], "y": [2.0 * i for i in range(20)]})
    net = torch.nn.Linear(2, 1)
    model = TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters()),
        loss=loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=4,
        epochs=2,
        num_proc=2,
        verbose=0,
    ).fit(frame)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder + "/model")
        scored = TorchModel.load(folder + "/model").transform(frame)
    print(len(model.getHistory()), scored.columns[-1], f"Estimator:{Estimator.__module__}")
