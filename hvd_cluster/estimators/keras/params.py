"""The params of KerasEstimator and KerasModel that others do not have."""

from __future__ import annotations

from typing import Any

from hvd_cluster.estimators import values
from hvd_cluster.estimators.keras.packed_model import PackedModel
from hvd_cluster.estimators.stages.param_row import Row
from hvd_cluster.estimators.stages.stage import PipelineStage


def named(value: Any) -> dict[str, Any]:
    """A dict with names as keys."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a dict of names")
    return dict(value)


_CUSTOM_OBJECTS = Row("custom_objects", {}, "name -> class or function of yours that the model uses", named)

KERAS_ROWS = (
    Row("model", None, "the Keras model to train, compiled or not, which is not changed; or a function that makes it"),
    Row("optimizer", None, "a Keras optimizer or its name; None: that of the compiled model"),
    Row("loss", None, "as for model.compile(); None: that of the compiled model"),
    Row("metrics", [], "as for model.compile(); empty: those of the compiled model"),
    Row("loss_weights", None, "weight of each label column's loss; None: as for model.compile()", values.numbers),
    Row("callbacks", [], "list of Keras callbacks, which run on every rank", values.items),
    _CUSTOM_OBJECTS,
    Row("checkpoint_callback", None, "a ModelCheckpoint, whose file goes to the run's folder; see BestModelCheckpoint"),
    Row("backend_env", {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"}, "environment variables of the workers", named),
)

KERAS_MODEL_ROWS = (
    _CUSTOM_OBJECTS,
    Row("model_factory", None, "what made the model without its trained weights; None if it was given as a model"),
    Row("_floatx", None, "Keras's default floating dtype when the model was trained", values.text),
)


class KerasStage(PipelineStage):
    """A stage whose ``model`` is a Keras model, saved in Keras's format, not pickled."""

    def _as_saved(self, name: str, value: Any) -> Any:
        if name == "model" and value is not None and not wrong_model(value):
            return self._packed_model(value)
        return super()._as_saved(name, value)

    def _packed_model(self, model: Any) -> PackedModel:
        """The form in which the model is saved."""
        return PackedModel.of(model, self._value("custom_objects"))

    def _set(self, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("model"), PackedModel):
            kwargs["model"] = kwargs["model"].load()
        return super()._set(**kwargs)


def wrong_model(value: Any) -> str:
    """The mistake if ``value`` is not a Keras model; else empty."""
    names = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(value).__mro__}
    if "keras.Model" in names:
        return ""
    return "Model parameter is required: give a keras.Model (Keras 3)"
