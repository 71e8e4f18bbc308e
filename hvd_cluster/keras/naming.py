"""The names by which a saved model finds its optimizer's class again: those of the class that the user chose."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.saving import object_registration


def subclass_saved_as(kind: type, front: type) -> Any:
    """A subclass of ``kind`` with the methods of ``front`` before its own, which is saved under the name of ``kind``.

    Args:
        kind: an optimizer class of Keras or of the user's, registered with Keras or not.
        front: comes first in the order of methods.
    """
    module, public = _public_class(kind)
    made: Any = type(public.__name__, (front, kind), {"__module__": module})
    registered = keras.saving.get_registered_name(public)
    if registered != public.__name__:
        # The name alone: what is loaded by it is the user's class.
        object_registration.GLOBAL_CUSTOM_NAMES[made] = registered
    return made


def _public_class(kind: type) -> tuple[str, type]:
    """The class that a saved model names, and the module in which it says to look."""
    for base in kind.__mro__:
        if getattr(keras.optimizers, base.__name__, None) is base:
            return "keras.optimizers", base
        if not base.__module__.startswith("keras."):
            return base.__module__, base
    return kind.__module__, kind
