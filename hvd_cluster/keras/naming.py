"""Class names under which a model saves a distributed optimizer.

They are those of the wrapped optimizer's class.
"""

from __future__ import annotations

from typing import Any

import keras
from keras.src.saving import object_registration


def subclass_saved_as(kind: type, front: type) -> Any:
    """A subclass of ``front`` and ``kind`` that Keras saves as ``kind``.

    Args:
        kind: a Keras or user-defined optimizer class, registered with Keras or not.
        front: the class that comes first in the method resolution order.
    """
    module, public = _public_class(kind)
    made: Any = type(public.__name__, (front, kind), {"__module__": module})
    registered = keras.saving.get_registered_name(public)
    if registered != public.__name__:
        # Only the name is registered: loading by it returns the user's class.
        object_registration.GLOBAL_CUSTOM_NAMES[made] = registered
    return made


def _public_class(kind: type) -> tuple[str, type]:
    """The module and the class that a saved model names."""
    for base in kind.__mro__:
        if getattr(keras.optimizers, base.__name__, None) is base:
            return "keras.optimizers", base
        if not base.__module__.startswith("keras."):
            return base.__module__, base
    return kind.__module__, kind
