# ruff: noqa: N802 - the spelling is that of pyspark.ml
"""KerasModel, which KerasEstimator returns: scores DataFrames, keeps the history."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_cluster.engine.objects import dumps
from hvd_cluster.estimators.keras.framework import KERAS, load, predict
from hvd_cluster.estimators.keras.model_source import KerasModelSource
from hvd_cluster.estimators.keras.packed_model import PackedModel, Unpacking
from hvd_cluster.estimators.keras.params import KERAS_MODEL_ROWS, KerasStage, wrong_model
from hvd_cluster.estimators.model import FittedModel
from hvd_cluster.estimators.params import MODEL_ROWS, with_params
from hvd_cluster.estimators.scoring.scorer import Framework
from hvd_cluster.estimators.torch.export import example_arguments
from hvd_cluster.estimators.typed_params import KerasModelParams

if TYPE_CHECKING:
    from hvd_cluster.estimators.logged_model.log import Flavour


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

    framework = KERAS

    def getHistory(self) -> dict[str, list[float]]:
        """Each epoch's numbers by Keras's names, as ``keras.callbacks.History.history``."""
        records = self._records()
        names = dict.fromkeys(name for record in records for name in record["logged"])
        return {name: [record["logged"][name] for record in records if name in record["logged"]] for name in names}

    def export(self, path: str, format: str = "onnx", example: Any = None) -> None:
        """Write the model to a file or folder that other runtimes load.

        It fails unless what is written gives the scores of the model. Inputs and outputs have names, and any number of
        rows, as those of :meth:`TorchModel.export`.

        Args:
            path: the file, a path or URL; the local folder of a "tf_saved_model".
            format: on Keras's torch backend "onnx" (needs the extra ``onnx``) or "torch"; on TensorFlow and JAX
                "tf_saved_model", or "onnx" with tf2onnx or jax2onnx installed.
            example: a few rows of the feature columns, a pandas DataFrame or pyarrow Table; None for rows of the
                training data, which a model has that was not loaded.

        Raises:
            ValueError: the backend does not write the format, or there are no example rows.
            DataError: the model cannot be exported, or the file gives other values than the model.
            MissingExtraError: ONNX's packages are not installed.
        """
        import keras

        from hvd_cluster.estimators.keras.export import export, require_format

        backend = keras.config.backend()
        require_format(backend, format)
        scorer = self._checked_scorer(list(self._value("feature_columns") or []), on_spark=False)
        model = self._value("model")
        if backend == "torch" and any(parameter.device.type != "cpu" for parameter in model.parameters()):
            with keras.device("cpu"):
                model = self._packed_model(model).load()
        with keras.device("cpu") if backend == "torch" else contextlib.nullcontext():
            _, values = example_arguments(scorer, model, self._example if example is None else example)
            export(model, values, self._output_names(), self._output_order(), path, format)

    def _get_floatx(self) -> str | None:
        found: str | None = self._value("_floatx")
        return found

    def _framework(self) -> Framework:
        return dataclasses.replace(self.framework, predict=functools.partial(predict, order=self._output_order()))

    def _output_order(self) -> tuple[str, ...]:
        """The order of outputs that have names: that of the training."""
        return tuple((self._get_metadata() or {}).get("output_keys") or self._value("label_columns") or ())

    def _wrong_model(self) -> str:
        return wrong_model(self._value("model"))

    def _portable_model(self) -> Any:
        return self._value("model")

    def _pickled_model(self) -> bytes:
        pickled: bytes = dumps(Unpacking(self._packed_model(self._value("model"))))
        return pickled

    def _packed_model(self, model: Any) -> PackedModel:
        source: KerasModelSource | None = self._value("model_factory")
        return super()._packed_model(model) if source is None else source.packed(model, self._value("custom_objects"))

    def _input_shapes(self) -> Any:
        return (self._get_metadata() or {}).get("input_shapes")

    def _flavour(self) -> Flavour:
        import keras

        from hvd_cluster.estimators.logged_model.log import Flavour

        model = self._value("model")
        layers = [_without_synchronization(type(layer)) for layer in (model, *model._flatten_layers())]
        own = [layer for layer in layers if layer.__module__.partition(".")[0] != "keras"]
        given = self._value("custom_objects")
        # Also by the names that a decorator has registered: it does not run again where a class comes by pickle.
        objects = {keras.saving.get_registered_name(one): one for one in (*own, *given.values())} | given
        backend = keras.config.backend()

        def save(path: str, mlflow_model: Any, **given: Any) -> None:
            import mlflow.keras

            Path(path).mkdir(parents=True, exist_ok=True)  # it writes the input example before it makes the folder
            mlflow.keras.save_model(model, path, mlflow_model=mlflow_model, **given)

        return Flavour(
            name="keras",
            save=save,
            load=functools.partial(load, backend=backend, custom_objects=dumps(objects)),
            parts=[layers, objects],
            modules=("keras", backend),
        )


def _without_synchronization(layer: type) -> type:
    """The class of a layer; a stand-in for our SyncBatchNormalization.

    The stand-in has its name and does not need this package. The name is that under which Keras finds the layer and its
    weights in a file.
    """
    if not layer.__module__.startswith("hvd_cluster."):
        return layer
    import keras

    return type(layer.__name__, (keras.layers.BatchNormalization,), {})
