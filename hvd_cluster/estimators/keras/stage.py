"""What KerasEstimator and KerasModel have in common: a Keras model as the value of a param."""

from __future__ import annotations

from typing import Any

from hvd_cluster.estimators.keras.packed_model import PackedModel
from hvd_cluster.estimators.stages.stage import Stage


class KerasStage(Stage):
    """A stage whose ``model`` is saved as the file that Keras writes, and not as a pickle of objects."""

    def _as_saved(self, name: str, value: Any) -> Any:
        if name == "model" and value is not None:
            return PackedModel.of(value, self._value("custom_objects"))
        return super()._as_saved(name, value)

    def _set(self, **kwargs: Any) -> Any:
        loaded = {name: value.load() if isinstance(value, PackedModel) else value for name, value in kwargs.items()}
        return super()._set(**loaded)


def wrong_model(value: Any) -> str:
    """Why ``value`` is no Keras model, with the remedy; empty if it is one."""
    names = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(value).__mro__}
    if "keras.Model" in names:
        return ""
    return "Model parameter is required: give a keras.Model (Keras 3)"
