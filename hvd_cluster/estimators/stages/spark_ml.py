"""Spark ML's base classes, or without pyspark those of :mod:`plain_stage`."""

from __future__ import annotations

try:
    from pyspark.ml.base import Estimator, Model
    from pyspark.ml.param import Param, Params
    from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
except ImportError:
    from hvd_cluster.estimators.stages.plain_stage import (
        Estimator,
        MLReadable,
        MLReader,
        MLWritable,
        MLWriter,
        Model,
        Param,
        Params,
    )

__all__ = ["Estimator", "MLReadable", "MLReader", "MLWritable", "MLWriter", "Model", "Param", "Params"]
