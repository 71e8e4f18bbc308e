"""Pickles values for the way to workers and back."""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

#: Objects that only the cluster's own pickler can transport, such as Ray's ObjectRefs; they are sent next to the bytes.
References = tuple[Any, ...]
#: Value -> its bytes, and the objects to which they refer by number.
Dumps = Callable[[Any], tuple[bytes, References]]


def dumps(value: Any) -> tuple[bytes, References]:
    """Pickle ``value`` with cloudpickle, for launchers whose clusters have no objects of their own."""
    return cloudpickle.dumps(value), ()


def loads(data: bytes, references: References = ()) -> Any:
    """Unpickle what any :data:`Dumps` returned. Unpickling can run code: check who sent the bytes first.

    Raises:
        ImportError: a module, or a name in it, is missing here; ``name`` is the module.
    """
    return _Unpickler(io.BytesIO(data), references).load()


def modules_in(data: bytes) -> set[str]:
    """Loaded modules that unpickling ``data`` may import; may include strings that only look like module names."""
    texts = (text for _, text, _ in pickletools.genops(data) if isinstance(text, str))
    return {text for text in texts if text in sys.modules}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, references: References) -> None:
        super().__init__(file)
        self._references = references

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except ImportError as error:
            error.name = error.name or module
            raise
        except AttributeError as error:
            file = getattr(sys.modules.get(module), "__file__", None)
            text = f"module {module!r} has no {name!r}; it was imported from {file or 'no file'}"
            raise ImportError(text, name=module) from error

    def persistent_load(self, pid: Any) -> Any:
        return self._references[pid]
