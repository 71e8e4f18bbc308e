"""How values become bytes on their way to workers and back."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle

#: Objects that only the cluster's own pickler may carry, such as Ray's ObjectRefs; they travel beside the bytes.
References = tuple[Any, ...]
#: Value -> its bytes, and what they refer to by number.
Dumps = Callable[[Any], tuple[bytes, References]]


def dumps(value: Any) -> tuple[bytes, References]:
    """Pickle ``value`` with cloudpickle, for launchers whose clusters have no objects of their own."""
    return cloudpickle.dumps(value), ()


def loads(data: bytes, references: References = ()) -> Any:
    """Unpickle what any :data:`Dumps` returned. Trusts the bytes: check who sent them first."""
    return _Unpickler(io.BytesIO(data), references).load() if references else cloudpickle.loads(data)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, references: References) -> None:
        super().__init__(file)
        self._references = references

    def persistent_load(self, pid: Any) -> Any:
        return self._references[pid]
