"""TorchModel, which TorchEstimator returns: scores DataFrames, and keeps the history of its training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_cluster.engine.objects import dumps
from hvd_cluster.estimators.model import FittedModel
from hvd_cluster.estimators.params import MODEL_ROWS, TORCH_MODEL_ROWS, with_params
from hvd_cluster.estimators.scoring.scorer import Framework
from hvd_cluster.estimators.spec import Features, called
from hvd_cluster.estimators.torch.arguments import floating_dtype, with_arguments
from hvd_cluster.estimators.torch.model_pickling import make_picklable, module_on_cpu
from hvd_cluster.estimators.torch.objective import as_outputs
from hvd_cluster.estimators.torch.portable_model import PortableModule, PortableOptimizer
from hvd_cluster.estimators.typed_params import TorchModelParams


def predict(
    model: torch.nn.Module, features: Features, output_fn: Callable[[Any], Any] | None = None
) -> list[torch.Tensor]:
    """The outputs of ``model`` as a list, without gradients."""
    with torch.no_grad():
        return as_outputs(called(model, features), output_fn)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode; the modes of its modules are restored at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


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
    framework = Framework(predict=predict, mode=evaluating, with_arguments=with_arguments)

    def _wrong_model(self) -> str:
        if isinstance(self._value("model"), torch.nn.Module):
            return ""
        return f"this {type(self).__name__} has no model: give model=, or setModel()"

    def _framework(self) -> Framework:
        output_fn = self._value("output_fn")
        if output_fn is None:
            return self.framework
        return dataclasses.replace(self.framework, predict=functools.partial(predict, output_fn=output_fn))

    def _default_dtype(self) -> str:
        return floating_dtype(self._value("model"))

    def log_to_mlflow(self, mlflow: Any) -> None:
        """Log the model to the active run of ``mlflow``, as "model" in its PyTorch flavour."""
        log = mlflow.pytorch.log_model
        accepted = inspect.signature(log).parameters
        given = {"name" if "name" in accepted else "artifact_path": "model"}  # artifact_path before MLflow 3
        if "serialization_format" in accepted:
            given["serialization_format"] = "pickle"  # the other format traces the model, and needs an example
        # Otherwise MLflow would load the model in a new process to find out what it imports.
        log(self._portable_model(), pip_requirements=[f"torch=={torch.__version__}"], **given)

    def _portable_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._value("model")
        make_picklable(model)
        return module_on_cpu(model)

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
