"""TorchModel, which TorchEstimator returns: scores DataFrames, keeps a history.

The history is that of its training.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.engine.objects import dumps
from hvd_cluster.estimators.model import FittedModel
from hvd_cluster.estimators.params import MODEL_ROWS, TORCH_MODEL_ROWS, with_params
from hvd_cluster.estimators.scoring.scorer import Framework
from hvd_cluster.estimators.torch import model_pickling
from hvd_cluster.estimators.torch.arguments import floating_dtype
from hvd_cluster.estimators.torch.export import FORMATS, NamedModule, example_arguments, export
from hvd_cluster.estimators.torch.framework import TORCH, load, predict
from hvd_cluster.estimators.torch.model_pickling import make_picklable, module_on_cpu
from hvd_cluster.estimators.torch.portable_model import (
    PortableModule,
    PortableOptimizer,
    optional_imports,
    without_our_layers,
)
from hvd_cluster.estimators.typed_params import TorchModelParams
from hvd_cluster.launch.pickling import by_value

if TYPE_CHECKING:
    from hvd_cluster.estimators.logged_model.log import Flavour


@with_params(MODEL_ROWS, TORCH_MODEL_ROWS)
class TorchModel(TorchModelParams, FittedModel):
    """A trained PyTorch model as a transformer.

    ``transform(data)`` keeps every column and adds one for each output, named ``<label>__output`` unless
    ``output_cols`` says otherwise. A pandas DataFrame gives a pandas DataFrame, a pyarrow Table a Table, a Spark
    DataFrame a Spark DataFrame. An output of one number a row has the type of its label column (integers are rounded);
    any other is a vector: Spark ML's on Spark, a list of float32 elsewhere. ``output_kinds`` asks for other forms:
    "vector", "array" (a list of float32), "probability" (the softmax of logits, as a vector), "argmax" (the class:
    float64 on Spark, int64 elsewhere) or "columns" (a column of its own for each element).

    A model that a factory made is saved, and sent to the tasks of a cluster, as the factory (``getModelFactory()``) and
    the weights that it does not make. If the module was changed so that the factory no longer makes its frozen part, or
    replaced, it is saved as a whole.

    Raises (from transform):
        ValueError: an output column exists already, or a feature column does not.
        DataError: a feature column holds nulls, or the model does not take it.
    """

    #: The form in which the model of a factory is saved.
    _portable: PortableModule | None = None
    framework = TORCH

    def _wrong_model(self) -> str:
        if isinstance(self._value("model"), torch.nn.Module):
            return ""
        return f"this {type(self).__name__} has no model: give model=, or setModel()"

    def _framework(self) -> Framework:
        predicting = functools.partial(predict, output_fn=self._value("output_fn"), order=self._output_order())
        return dataclasses.replace(self.framework, predict=predicting)

    def _output_order(self) -> tuple[str, ...]:
        """The order of outputs that have names: that of the training."""
        return tuple((self._get_metadata() or {}).get("output_names") or self._value("label_columns") or ())

    def _default_dtype(self) -> str:
        return floating_dtype(self._value("model"))

    def _flavour(self) -> Flavour:
        from hvd_cluster.estimators.logged_model.log import Flavour

        model = self._portable_model()

        def save(path: str, mlflow_model: Any, **given: Any) -> None:
            import mlflow.pytorch

            if "serialization_format" in inspect.signature(mlflow.pytorch.save_model).parameters:
                given["serialization_format"] = "pickle"  # the other format traces the model
            # So that the functions which rebuild parametrized and scripted modules travel with the model.
            with by_value(model_pickling):
                given["pickle_module"] = optional_imports(mlflow.pytorch.pickle_module)
                mlflow.pytorch.save_model(model, path, mlflow_model=mlflow_model, signature=False, **given)

        return Flavour(name="pytorch", save=save, load=load, parts=[model], travelling=[model_pickling.__name__])

    def export(self, path: str, format: str = "onnx", example: Any = None) -> None:
        """Write the model to a file that other runtimes load.

        The file is written once it gives the values of the model. It takes what ``preprocess`` returns, or the feature
        columns without it: inputs and outputs have names, and any number of rows. It returns each output as the model
        does: ``output_kinds`` are not applied. An ONNX file is for onnxruntime and others.
        ``torch.export.load(path).module()`` takes and returns a dict of tensors.

        Args:
            path: the file, a path or URL.
            format: "onnx" (needs the extra ``onnx``), or "torch" for torch's exported program.
            example: a few rows of the feature columns, a pandas DataFrame or pyarrow Table; None for rows of the
                training data, which a model has that was not loaded.

        Raises:
            ValueError: the format is unknown, or there are no example rows.
            DataError: the model cannot be exported, or the file gives other values than the model.
            MissingExtraError: ONNX's packages are not installed.
        """
        if format not in FORMATS:
            raise ValueError(f"format={format!r} is not one of {', '.join(map(repr, FORMATS))}")
        scorer = self._checked_scorer(list(self._value("feature_columns") or []), on_spark=False)
        model = self._portable_model()
        with self._framework().mode(model):
            inputs, values = example_arguments(scorer, model, self._example if example is None else example)
            names, order = self._output_names(), self._output_order()
            module = NamedModule(model, inputs.by_keyword, names, self._value("output_fn"), order)
            export(module, values, path, format)

    def _portable_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._value("model")
        make_picklable(model)
        return without_our_layers(module_on_cpu(model))

    def _pickled_model(self) -> bytes:
        source, model = self._value("model_factory"), self._portable_model()
        return dumps(model if source is None else PortableModule(source, model))

    def _as_saved(self, name: str, value: Any) -> Any:
        make_picklable(value)
        model, source = self._value("model"), self._value("model_factory")
        if source is not None and name in ("model", "optimizer") and value is not None:
            if self._portable is None or self._portable.module is not model or self._portable.source is not source:
                self._portable = PortableModule(source, model)
            # The same object for both: the optimizer is then that of the loaded model's parameters.
            return self._portable if name == "model" else PortableOptimizer(value, self._portable)
        return super()._as_saved(name, value)
