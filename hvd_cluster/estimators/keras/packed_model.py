"""A Keras model on its way to another process: architecture, weights, and how it is compiled, as bytes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from hvd_cluster.engine.objects import dumps
from hvd_cluster.estimators.keras.state import as_array, is_rate
from hvd_cluster.topology import export

#: Options of ``compile`` that hold a learning rate, in the configs of Keras's schedules.
_RATES = ("initial_learning_rate", "end_learning_rate", "warmup_target", "values")


@dataclass(frozen=True)
class PackedModel:
    """Unpickling it needs no Keras; :meth:`load` imports it, on the backend that the model was made on."""

    #: The backend's name.
    backend: str
    #: What ``model.save("x.keras")`` writes, without how it is compiled.
    file: bytes = field(repr=False)
    #: cloudpickle of name -> class or function.
    custom_objects: bytes = field(repr=False)
    #: cloudpickle of the arguments of ``compile``, the optimizer as its config; None where it is not compiled.
    compilation: bytes | None = field(default=None, repr=False)
    #: The optimizer's variables; None where it has not begun.
    optimizer_state: Any = field(default=None, repr=False)

    @classmethod
    def of(
        cls, model: Any, custom_objects: Mapping[str, Any], compilation: Mapping[str, Any] | None = None
    ) -> PackedModel:
        """Pack ``model``, which stays as it is.

        Args:
            model: a Keras model.
            custom_objects: what Keras cannot find by itself.
            compilation: arguments of ``compile``, the optimizer among them; None for those that it is compiled with.
        """
        import keras

        if compilation is None:
            compilation = compilation_of(model)
        packed, state = None, None
        if compilation is not None:
            optimizer = compilation["optimizer"]
            state = [as_array(variable) for variable in optimizer.variables] if optimizer.built else None
            config = keras.saving.serialize_keras_object(optimizer)
            packed = dumps({**compilation, "optimizer": config})
        return cls(keras.config.backend(), _saved(model), dumps(dict(custom_objects)), packed, state)

    def load(self, wrap: Callable[[Any], Any] | None = None, rate_factor: float = 1.0, **compilation: Any) -> Any:
        """The model, compiled if it was.

        Args:
            wrap: makes the optimizer to compile with of the one that it was compiled with.
            rate_factor: multiplies the learning rate.
            compilation: arguments of ``compile`` over those that it was compiled with.

        Raises:
            ValueError: the learning rate is a schedule of the user's own, and should be multiplied.
        """
        choose_backend(self.backend)
        import keras

        with keras.saving.custom_object_scope(cloudpickle.loads(self.custom_objects)):
            with tempfile.TemporaryDirectory(prefix="hvd-keras-") as folder:
                path = Path(folder) / "model.keras"
                path.write_bytes(self.file)
                # The user's own model: whatever code it holds is the user's.
                model = keras.models.load_model(path, compile=False, safe_mode=False)
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


class Unpacking:
    """Pickles as a :class:`PackedModel`, and unpickles as the model in it."""

    def __init__(self, packed: PackedModel) -> None:
        self.packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedModel.load, (self.packed,)


def compilation_of(model: Any) -> dict[str, Any] | None:
    """The arguments that ``model`` was compiled with, the optimizer as an object; None where it was not."""
    if not getattr(model, "compiled", False):
        return None
    return {**model._compile_config.config, "optimizer": model.optimizer}


def choose_backend(backend: str) -> None:
    """Have Keras use ``backend`` when it is imported; too late, and without effect, where it is already."""
    if "keras" not in sys.modules:
        export({"KERAS_BACKEND": backend})


def scaled(config: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The config of an optimizer with ``factor`` times its learning rate.

    Raises:
        ValueError: the rate is a schedule that is none of Keras's own.
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
    with tempfile.TemporaryDirectory(prefix="hvd-keras-") as folder, _as_if_not_compiled(model):
        path = Path(folder) / "model.keras"
        model.save(path)
        return _undated(path)


def _undated(path: Path) -> bytes:
    """The file without the time of day: whoever keeps what is sent has one copy of equal models."""
    copy = io.BytesIO()
    with zipfile.ZipFile(path) as saved, zipfile.ZipFile(copy, "w") as undated:
        for name in saved.namelist():
            content = saved.read(name)
            if name == "metadata.json":
                content = json.dumps({**json.loads(content), "date_saved": ""}).encode()
            undated.writestr(zipfile.ZipInfo(name), content)
    return copy.getvalue()


@contextlib.contextmanager
def _as_if_not_compiled(model: Any) -> Iterator[None]:
    """Keras would write losses that it cannot read again: functions of the user's own."""
    compiled = getattr(model, "compiled", False)
    model.compiled = False
    try:
        yield
    finally:
        model.compiled = compiled
