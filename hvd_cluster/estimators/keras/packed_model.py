"""A Keras model as bytes for another process: architecture, weights, compilation."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from hvd_cluster.engine.objects import dumps
from hvd_cluster.estimators.keras.framework import choose_backend
from hvd_cluster.estimators.keras.state import as_array, is_rate

#: Options of ``compile`` that hold a learning rate, in the configs of Keras's schedules.
_RATES = ("initial_learning_rate", "end_learning_rate", "warmup_target", "values")


@dataclass(frozen=True)
class PackedModel:
    """A Keras model whose unpickling does not import Keras.

    :meth:`load` does, on the backend that the model was made on.
    """

    #: The backend's name.
    backend: str
    #: The file of ``model.save("x.keras")``, as if the model were not compiled.
    file: bytes = field(repr=False)
    #: cloudpickle of name -> class or function.
    custom_objects: bytes = field(repr=False)
    #: cloudpickle of the arguments of ``compile``, with the optimizer as its config; None if it is not compiled.
    compilation: bytes | None = field(default=None, repr=False)
    #: The optimizer's variables; None if it is not built.
    optimizer_state: Any = field(default=None, repr=False)

    @property
    def made(self) -> Mapping[str, str] | None:
        """The contents of what a factory makes; None if the model is in ``file``."""
        return None

    @classmethod
    def of(
        cls, model: Any, custom_objects: Mapping[str, Any], compilation: Mapping[str, Any] | None = None
    ) -> PackedModel:
        """Pack ``model``, which is not changed.

        Args:
            model: a Keras model.
            custom_objects: classes and functions that Keras cannot find by itself.
            compilation: arguments of ``compile``, including the optimizer; None for those that it was compiled with.
        """
        import keras

        return cls(
            keras.config.backend(),
            _saved(model),
            dumps({**_layers_of_this_package(model), **custom_objects}),
            *packed_compilation(model, compilation),
        )

    def _uncompiled(self) -> Any:
        """The model without optimizer, loss and metrics."""
        import keras

        with tempfile.TemporaryDirectory(prefix="hvd-keras-") as folder:
            path = Path(folder) / "model.keras"
            path.write_bytes(self.file)
            # It is the user's own model, and so is any code in it.
            return keras.models.load_model(path, compile=False, safe_mode=False)

    def load(self, wrap: Callable[[Any], Any] | None = None, rate_factor: float = 1.0, **compilation: Any) -> Any:
        """The model, compiled if it was.

        Args:
            wrap: wraps the optimizer that it was compiled with.
            rate_factor: multiplies the learning rate.
            compilation: arguments of ``compile`` that replace those that it was compiled with.

        Raises:
            ValueError: the learning rate is a schedule that cannot be multiplied.
        """
        choose_backend(self.backend)
        import keras

        with keras.saving.custom_object_scope(cloudpickle.loads(self.custom_objects)):
            model = self._uncompiled()
            if self.compilation is None:
                return model
            given = {**cloudpickle.loads(self.compilation), **compilation}
            optimizer = keras.saving.deserialize_keras_object(scaled(given.pop("optimizer"), rate_factor))
        if self.optimizer_state is not None and model.built:
            optimizer.build(model.trainable_variables)
            for variable, value in zip(optimizer.variables, self.optimizer_state, strict=True):
                if not is_rate(variable):
                    variable.assign(value)
        model.compile(optimizer=optimizer if wrap is None else wrap(optimizer), **given)
        return model


def _layers_of_this_package(model: Any) -> dict[str, type]:
    """The classes by name, which Keras finds only in a process that imported them."""
    classes = {type(layer) for layer in model._flatten_layers()}
    return {each.__name__: each for each in classes if each.__module__.startswith("hvd_cluster.")}


def packed_compilation(model: Any, compilation: Mapping[str, Any] | None) -> tuple[bytes | None, Any]:
    """The compilation and the optimizer's state; see :meth:`PackedModel.of`."""
    import keras

    if compilation is None:
        compilation = compilation_of(model)
    if compilation is None:
        return None, None
    optimizer = compilation["optimizer"]
    state = [as_array(variable) for variable in optimizer.variables] if optimizer.built else None
    config = keras.saving.serialize_keras_object(optimizer)
    return dumps({**compilation, "optimizer": config}), state


class Unpacking:
    """Pickles as a :class:`PackedModel`, and unpickles as the Keras model."""

    def __init__(self, packed: PackedModel) -> None:
        self.packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedModel.load, (self.packed,)


def compilation_of(model: Any) -> dict[str, Any] | None:
    """The arguments that ``model`` was compiled with; None if it is not compiled.

    The optimizer is an object.
    """
    if not getattr(model, "compiled", False):
        return None
    return {**model._compile_config.config, "optimizer": model.optimizer}


def scaled(config: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The config of an optimizer with ``factor`` times its learning rate.

    Raises:
        ValueError: the rate is a schedule that Keras does not define.
    """
    if factor == 1.0:
        return dict(config)
    inner = dict(config["config"])
    if isinstance(inner.get("inner_optimizer"), Mapping):  # a LossScaleOptimizer
        inner["inner_optimizer"] = scaled(inner["inner_optimizer"], factor)
    elif isinstance(inner.get("learning_rate"), Mapping):
        inner["learning_rate"] = _scaled_schedule(inner["learning_rate"], factor)
    elif "learning_rate" in inner:
        inner["learning_rate"] = inner["learning_rate"] * factor
    return {**config, "config": inner}


def _scaled_schedule(config: Mapping[str, Any], factor: float) -> dict[str, Any]:
    inner = dict(config["config"])
    held = [name for name in _RATES if inner.get(name) is not None]
    if not held:
        raise ValueError(
            f"the learning rate is a {config.get('class_name')}, which cannot be multiplied by the number of workers: "
            "set scale_lr=False, and scale it yourself"
        )
    for name in held:
        value = inner[name]
        inner[name] = [one * factor for one in value] if isinstance(value, (list, tuple)) else value * factor
    return {**config, "config": inner}


def _saved(model: Any) -> bytes:
    """A model's file without its date; Spark and Ray keep one copy of equal files."""
    compiled, copy = getattr(model, "compiled", False), io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="hvd-keras-") as folder:
        path = Path(folder) / "model.keras"
        model.compiled = False  # otherwise Keras would save losses that it cannot load: functions of the user
        try:
            model.save(path)
        finally:
            model.compiled = compiled
        with zipfile.ZipFile(path) as saved, zipfile.ZipFile(copy, "w") as undated:
            for name in saved.namelist():
                content = saved.read(name)
                if name == "metadata.json":
                    content = json.dumps({**json.loads(content), "date_saved": ""}).encode()
                undated.writestr(zipfile.ZipInfo(name), content)
    return copy.getvalue()
