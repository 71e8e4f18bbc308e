"""Collectives of Python objects, pickled, signed and sent as bytes."""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from hvd_cluster.engine.membership import next_number, running_engine
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.submission import Collective
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.rendezvous.secret import sign, verify


@dataclass(frozen=True)
class _Unpicklable:
    """The substitute for an object that cannot be pickled: other ranks wait for one."""

    rank: int
    text: str


#: dtypes that torch's own pickles of tensors know, and those that stand for the others, by size in bytes: torch fails
#: when it unpickles unsigned integers of more than a byte, or float8.
_PICKLED = frozenset(
    getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "int64", "int32", "int16", "int8",
        "uint8", "bool",
    )
)  # fmt: skip
_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Pickler(cloudpickle.CloudPickler):
    """cloudpickle's pickler for tensors of all dtypes.

    In a process that is connected to Ray it has the reducers that Ray adds to its own copy of cloudpickle.
    """

    def __init__(self, file: io.BytesIO) -> None:
        if (of_ray := sys.modules.get("ray.cloudpickle")) is not None:
            own = cloudpickle.CloudPickler.dispatch_table
            self.dispatch_table = ChainMap(own, of_ray.CloudPickler.dispatch)
        super().__init__(file)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.dtype not in _PICKLED and obj.layout == torch.strided:
            stand_in = _STAND_INS.get(obj.itemsize)
            if stand_in is not None and not obj.is_quantized:
                return torch.Tensor.view, (obj.detach().contiguous().view(stand_in), obj.dtype)
        return super().reducer_override(obj)


def dumps(obj: Any) -> bytes:
    """Pickle ``obj`` for another process.

    An ObjectRef of Ray keeps its owner, without which ``ray.get`` would never return. This process keeps the object
    until it ends.
    """
    file = io.BytesIO()
    _Pickler(file).dump(obj)
    return file.getvalue()


def broadcast_object(obj: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    """Give every rank ``root_rank``'s object.

    Args:
        obj: anything that cloudpickle takes; what the other ranks pass is ignored.
        root_rank: the global rank whose object all get.
        name: matches the calls of the ranks; None takes the next number.
        process_set: whose ranks take part.

    Returns:
        ``obj`` itself on the root, a copy elsewhere.

    Raises:
        HorovodInternalError: the job has ended, or the root could not pickle its object, where it raises its own error.
    """
    is_root = running_engine().world.topology.rank == root_rank
    pickled, failure = _pickle(obj) if is_root else (b"", None)
    label = name if name is not None else f"object.{next_number(process_set, 'broadcast_object')}"
    data = _signed(pickled, label) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    collective = Collective(kind=Kind.BROADCAST, process_set=process_set, root=root_rank)
    (size,) = collective.named(f"{label}.sz").begin([torch.tensor([data.numel()], device="cpu")]).wait()
    room = data if is_root else torch.empty(int(size), dtype=torch.uint8, device="cpu")
    (sent,) = collective.named(f"{label}.t").begin([room]).wait()
    if failure is not None:
        raise failure
    return obj if is_root else _from_bytes(sent, label)


def allgather_object(obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Give every rank the objects of all ranks, in the order of the ranks.

    Args:
        obj: anything that cloudpickle takes.
        name: matches the calls of the ranks; None takes the next number.
        process_set: whose ranks take part.

    Raises:
        HorovodInternalError: the job has ended, or a rank could not pickle its object, where it raises its own error.
    """
    pickled, failure = _pickle(obj)
    label = name if name is not None else f"object.{next_number(process_set, 'allgather_object')}"
    data = _signed(pickled, label)
    collective = Collective(kind=Kind.ALLGATHER, process_set=process_set)
    (sizes,) = collective.named(f"{label}.sz").begin([torch.tensor([data.numel()], device="cpu")]).wait()
    (gathered,) = collective.named(f"{label}.t").begin([data]).wait()
    if failure is not None:
        raise failure
    return [_from_bytes(part, label) for part in gathered.split(sizes.tolist())]


def _pickle(obj: Any) -> tuple[bytes, Exception | None]:
    """``obj`` pickled, or a replacement and the error if it cannot be pickled."""
    try:
        return dumps(obj), None
    except Exception as error:  # noqa: BLE001 - pickling runs user code, which may raise anything
        rank = running_engine().world.topology.rank
        return cloudpickle.dumps(_Unpicklable(rank, f"{type(error).__name__}: {error}")), error


def _signed(pickled: bytes, label: str) -> torch.Tensor:
    """Signed bytes: data sockets are not authenticated, and unpickling runs code."""
    signed = sign(running_engine().world.topology.secret, label, pickled)
    return torch.frombuffer(bytearray(signed), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor, label: str) -> Any:
    obj = cloudpickle.loads(verify(running_engine().world.topology.secret, label, data.numpy().tobytes()))
    if isinstance(obj, _Unpicklable):
        raise HorovodInternalError(f"rank {obj.rank} could not pickle its object: {obj.text}")
    return obj
