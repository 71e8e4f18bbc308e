# ruff: noqa: N802 - the spelling is that of pyspark.ml
"""KerasModel, which KerasEstimator returns: scores DataFrames, and keeps the history of its training."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from hvd_cluster.engine.objects import dumps
from hvd_cluster.estimators.keras.arguments import with_arguments
from hvd_cluster.estimators.keras.data import flat, inputs_of, keys_of, structured
from hvd_cluster.estimators.keras.made_model import MadeKerasModel
from hvd_cluster.estimators.keras.packed_model import PackedModel, Unpacking
from hvd_cluster.estimators.keras.params import KERAS_MODEL_ROWS, KerasStage, wrong_model
from hvd_cluster.estimators.model import FittedModel
from hvd_cluster.estimators.params import MODEL_ROWS, with_params
from hvd_cluster.estimators.scoring.scorer import Framework
from hvd_cluster.estimators.typed_params import KerasModelParams


def predict(model: Any, features: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a Keras model as a list of tensors on the CPU."""
    given = structured([feature.numpy() for feature in features], keys_of(inputs_of(model)))
    outputs = flat(model.predict_on_batch(given), keys_of(getattr(model, "_outputs_struct", None)))
    return [torch.from_numpy(np.array(output)) for output in outputs]


@with_params(MODEL_ROWS, KERAS_MODEL_ROWS)
class KerasModel(KerasModelParams, KerasStage, FittedModel):
    """A trained Keras model as a transformer.

    ``transform(data)`` keeps every column and adds one for each output, named ``<label>__output`` unless
    ``output_cols`` says otherwise. Their types, and ``output_kinds``, are those of
    :class:`hvd_cluster.estimators.TorchModel`. ``getModel()`` is the Keras model, compiled as it was trained; a file
    that it saves can be loaded without this package.

    Raises (from transform):
        ValueError: an output column exists already, or a feature column does not.
        DataError: a feature column holds nulls, or the model does not take it.
    """

    framework = Framework(predict=predict, with_arguments=with_arguments)

    def getHistory(self) -> dict[str, list[float]]:
        """The numbers of each epoch under Keras's names, as in ``keras.callbacks.History.history``."""
        records = self._records()
        names = dict.fromkeys(name for record in records for name in record["logged"])
        return {name: [record["logged"][name] for record in records if name in record["logged"]] for name in names}

    def _get_floatx(self) -> str | None:
        found: str | None = self._value("_floatx")
        return found

    def _wrong_model(self) -> str:
        return wrong_model(self._value("model"))

    def _portable_model(self) -> Any:
        return self._value("model")

    def _pickled_model(self) -> bytes:
        pickled: bytes = dumps(Unpacking(self._packed_model(self._value("model"))))
        return pickled

    def _packed_model(self, model: Any) -> PackedModel:
        source: MadeKerasModel | None = self._value("model_factory")
        return super()._packed_model(model) if source is None else source.packed(model, self._value("custom_objects"))

    def _input_shapes(self) -> Any:
        return (self._get_metadata() or {}).get("input_shapes")

    def log_to_mlflow(self, mlflow: Any) -> None:
        """Log the model to the active run of ``mlflow``, as "model" in its Keras flavour."""
        import keras

        log = mlflow.keras.log_model
        name = "name" if "name" in inspect.signature(log).parameters else "artifact_path"  # before MLflow 3
        log(self._value("model"), **{name: "model"}, pip_requirements=[f"keras=={keras.__version__}"])
