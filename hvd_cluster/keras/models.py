"""Loading a model for further training on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.keras.compression import Compression, Compressor
from hvd_cluster.keras.optimizer import DistributedOptimizer, replace_optimizer


@none_is_default
def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model and distribute its optimizer, which keeps its state.

    Args:
        filepath: as for ``keras.models.load_model``.
        custom_optimizers: optimizer classes outside of Keras that the model was saved with.
        custom_objects: further classes and functions by name, as for ``keras.models.load_model``.
        compression: how gradients are compressed for transfer.
        legacy_opts: accepted and ignored: Keras 3 has only one family of optimizers.

    Returns:
        The model; unchanged if it was saved without an optimizer.
    """
    del legacy_opts
    if keras.backend.backend() == "tensorflow":
        import hvd_cluster.tensorflow.sync_batch_norm  # noqa: F401 - Keras knows the layer from then on
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        replace_optimizer(model, DistributedOptimizer(model.optimizer, compression=compression))
    return model
