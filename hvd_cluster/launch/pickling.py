"""Pickles values for the way to workers and back."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import cloudpickle

#: Objects that only the cluster's own pickler can transport, such as Ray's ObjectRefs; they are sent next to the bytes.
References = tuple[Any, ...]
#: Value -> its bytes, and the objects to which they refer by number.
Dumps = Callable[[Any], tuple[bytes, References]]

_lock = threading.Lock()
#: How many contexts of :func:`by_value` need a module, by the copy of cloudpickle and the module's name.
_num_users: Counter[tuple[str, str]] = Counter()


def dumps(value: Any) -> tuple[bytes, References]:
    """Pickle ``value`` with cloudpickle.

    For launchers whose clusters have no objects of their own.
    """
    return cloudpickle.dumps(value), ()


def loads(data: bytes, references: References = ()) -> Any:
    """Unpickle what any :data:`Dumps` returned.

    Unpickling can run code: check who sent the bytes first.

    Raises:
        ImportError: a module, or a name in it, is missing here; ``name`` is the module.
    """
    return _Unpickler(io.BytesIO(data), references).load()


@contextlib.contextmanager
def by_value(module: ModuleType, pickler: Any = cloudpickle) -> Iterator[None]:
    """Make a pickler pickle functions and classes of ``module`` by value.

    Threads may do so at the same time.

    Args:
        pickler: cloudpickle or a copy of it. A module that the user has registered there stays registered.
    """
    user = (pickler.__name__, module.__name__)
    with _lock:
        is_ours = _num_users[user] > 0 or module.__name__ not in pickler.list_registry_pickle_by_value()
        if is_ours and not _num_users[user]:
            pickler.register_pickle_by_value(module)
        _num_users[user] += is_ours
    try:
        yield
    finally:
        with _lock:
            _num_users[user] -= is_ours
            if is_ours and not _num_users[user]:
                pickler.unregister_pickle_by_value(module)


def modules_in(data: bytes) -> set[str]:
    """Loaded modules that unpickling ``data`` may import.

    May include strings that only look like module names.
    """
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
