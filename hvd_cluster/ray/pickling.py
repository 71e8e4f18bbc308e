"""Pickles values between the driver and actors, including Ray's own objects.

Ray tracks who holds an ``ObjectRef`` or an actor handle, and finds its owner, only if it is in an argument or a result
of a Ray call. Therefore these objects are taken out of the bytes and sent next to them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cloudpickle

from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.pickling import References, by_value
from hvd_cluster.ray.session import load_ray

#: How to make a module available to the workers; see :func:`hvd_cluster.launch.call.pack_call`.
MODULE_REMEDY = (
    "install it on the nodes, or ship it with ray.init(runtime_env={'py_modules': [MODULE]}) or "
    "runtime_env={'working_dir': FOLDER}"
)


def dumps(value: Any) -> tuple[bytes, References]:
    """Pickle a value like Ray, with Ray's serializers.

    They are registered by ``ray.util.register_serializer``.

    Returns:
        The bytes, and Ray's objects in ``value``, which must be sent in an argument or a result of a Ray call.
    """
    file = io.BytesIO()
    pickler = _pickler_class()(file)
    with _by_value_in_ray():
        pickler.dump(value)
    return file.getvalue(), tuple(pickler.references)


def dumps_out_of_band(value: Any) -> bytes:
    """Pickle a value for a connection other than Ray's.

    Ray keeps the objects in it until this process ends.
    """
    with _by_value_in_ray():
        data: bytes = load_ray().cloudpickle.dumps(value)
    return data


def detached(outcome: Outcome, worker_id: str) -> Outcome:
    """The outcome of a worker that ends with its call, with its objects copied.

    Ray drops the objects that the worker owns.
    """
    error = outcome.error
    if error is not None and error.references:
        error = replace(error, references=_copied(error.references, worker_id))
    return replace(outcome, references=_copied(outcome.references, worker_id), error=error)


def _copied(references: References, worker_id: str) -> References:
    ray = load_ray()

    def is_owned(each: Any) -> bool:
        if not isinstance(each, ray.ObjectRef):
            return False
        owner: bytes = ray._private.worker.global_worker.core_worker.get_owner_address(each)
        return bytes.fromhex(worker_id) in owner

    return tuple(ray.put(ray.get(each)) if is_owned(each) else each for each in references)


@functools.cache
def _pickler_class() -> Any:
    ray = load_ray()
    of_ray = (ray.ObjectRef, ray.actor.ActorHandle, *_of_a_client())

    class Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file)
            self.references: list[Any] = []
            self._numbers: dict[int, int] = {}

        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, of_ray):
                return None
            if id(obj) not in self._numbers:
                self._numbers[id(obj)] = len(self.references)
                self.references.append(obj)
            return self._numbers[id(obj)]

    return Pickler


def _of_a_client() -> tuple[type, ...]:
    """Ray's classes in a process that is a Ray Client."""
    try:
        from ray.util.client import common
    except ImportError:  # ray[client] is not installed
        return ()
    names = ("ClientObjectRef", "ClientActorHandle", "ClientActorClass", "ClientRemoteFunc", "ClientRemoteMethod")
    return tuple(getattr(common, name) for name in names)


@contextlib.contextmanager
def _by_value_in_ray() -> Iterator[None]:
    """Make Ray's copy of cloudpickle pickle by value as cloudpickle itself does.

    It then knows what is registered there.
    """
    rays = load_ray().cloudpickle
    with contextlib.ExitStack() as stack:
        for name in cloudpickle.list_registry_pickle_by_value() & sys.modules.keys():
            stack.enter_context(by_value(sys.modules[name], rays))
        yield
