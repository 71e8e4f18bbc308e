"""Estimators: fit a model to a DataFrame with several workers.

>>> from hvd_cluster.estimators import TorchEstimator
>>> model = TorchEstimator(model=net, optimizer=opt, loss=loss_fn, feature_cols=["x"], label_cols=["y"],
...                        num_proc=2, store="work/").fit(df)
>>> scored = model.transform(df)

If pyspark is installed, the classes are Spark ML stages. Without it they have a small base of our own instead, and fit
pandas DataFrames, Arrow tables and Parquet folders in local processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_cluster.lazy import lazy

if TYPE_CHECKING:
    from hvd_cluster.estimators.backend import Backend as Backend
    from hvd_cluster.estimators.backend import LocalBackend as LocalBackend
    from hvd_cluster.estimators.backend import SparkBackend as SparkBackend
    from hvd_cluster.estimators.keras.estimator import KerasEstimator as KerasEstimator
    from hvd_cluster.estimators.keras.model import KerasModel as KerasModel
    from hvd_cluster.estimators.lightning.estimator import LightningEstimator as LightningEstimator
    from hvd_cluster.estimators.model_factory import ModelFactory as ModelFactory
    from hvd_cluster.estimators.ray.backend import RayBackend as RayBackend
    from hvd_cluster.estimators.run.data_module import DataModule as DataModule
    from hvd_cluster.estimators.run.early_stopping import EarlyStopping as EarlyStopping
    from hvd_cluster.estimators.run.epochs import StopFit as StopFit
    from hvd_cluster.estimators.torch.estimator import TorchEstimator as TorchEstimator
    from hvd_cluster.estimators.torch.model import TorchModel as TorchModel
    from hvd_cluster.estimators.torch.strategies.communication import DiLoCo as DiLoCo
    from hvd_cluster.estimators.torch.strategies.communication import LocalSGD as LocalSGD
    from hvd_cluster.estimators.torch.strategies.communication import PowerSGD as PowerSGD
    from hvd_cluster.estimators.torch.strategies.fsdp2 import FSDP2 as FSDP2

#: Public name -> the module that defines it. Loaded on first use: workers import this package and need no Spark.
_HOMES = {
    "Backend": "backend",
    "DataModule": "run.data_module",
    "DiLoCo": "torch.strategies.communication",
    "EarlyStopping": "run.early_stopping",
    "FSDP2": "torch.strategies.fsdp2",
    "KerasEstimator": "keras.estimator",
    "KerasModel": "keras.model",
    "LightningEstimator": "lightning.estimator",
    "LocalBackend": "backend",
    "LocalSGD": "torch.strategies.communication",
    "ModelFactory": "model_factory",
    "PowerSGD": "torch.strategies.communication",
    "RayBackend": "ray.backend",
    "SparkBackend": "backend",
    "StopFit": "run.epochs",
    "TorchEstimator": "torch.estimator",
    "TorchModel": "torch.model",
}

__all__ = [
    "FSDP2",
    "Backend",
    "DataModule",
    "DiLoCo",
    "EarlyStopping",
    "KerasEstimator",
    "KerasModel",
    "LightningEstimator",
    "LocalBackend",
    "LocalSGD",
    "ModelFactory",
    "PowerSGD",
    "RayBackend",
    "SparkBackend",
    "StopFit",
    "TorchEstimator",
    "TorchModel",
]

__getattr__, __dir__ = lazy(__name__, _HOMES)
