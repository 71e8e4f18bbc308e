"""The part of a request that all ranks must agree on. It does not need torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class ReduceOp(IntEnum):
    """How the tensors of all ranks are reduced."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    __hash__ = int.__hash__  # that of an Enum is written in Python, and each request is looked up by its signature

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        raise ValueError(f"op={value!r} is none of {', '.join(f'hvd.{op.name.capitalize()}' for op in cls)}")


class Kind(str, Enum):
    """The collective operations. The value is the prefix of a request's name."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    ADD_PROCESS_SET = "add_process_set"
    REMOVE_PROCESS_SET = "remove_process_set"

    __hash__ = str.__hash__  # as in ReduceOp


#: A registered process set, by its number; or any set of ranks, which needs no registration, by its ranks in order.
SetId = int | tuple[int, ...]
#: (process set id, request name): requests of different ranks match if these are equal.
Key = tuple[SetId, str]

#: Bytes of one element of each type, by torch's name of it.
_ELEMENT_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64"), 8),
}


def ranks_of(process_sets: Mapping[int, tuple[int, ...]], id: SetId) -> tuple[int, ...]:
    """The global ranks of a process set; empty if it is not registered."""
    return id if isinstance(id, tuple) else process_sets.get(id, ())


class TensorMeta(NamedTuple):
    """What the ranks must agree on about one tensor."""

    #: torch's name of the element type, e.g. "float32".
    dtype: str
    #: The tensor's shape; the first dimension of an allgather or alltoall, which may differ between ranks, is -1.
    shape: tuple[int, ...]
    #: "cpu" or "cuda".
    device: str

    @property
    def num_elements(self) -> int:
        """Elements of the tensor; meaningless if the first dimension is -1."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor; meaningless if the first dimension is -1."""
        return self.num_elements * _ELEMENT_BYTES[self.dtype]


class Signature(NamedTuple):
    """What must be equal on all ranks, and suffices for a joined rank's zeros."""

    kind: Kind
    #: One entry, or one for each tensor of a group.
    tensors: tuple[TensorMeta, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    #: Global rank that a broadcast starts from.
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    #: The ranks of a process set to add or remove.
    ranks: tuple[int, ...] = ()
    #: torch's name of the element type in which floating-point tensors travel and are added; "" for their own.
    wire: str = ""
    #: A number that identifies the tensors of a group if their metas do not.
    identity: int = -1
    #: The shapes of the sparse tensors of which these are the entries; -1 for a length that is unknown.
    sparse_shapes: tuple[tuple[int, ...], ...] = ()
    #: It is refused after a rank has joined; else zeros stand in for that rank where this is possible.
    needs_all_ranks: bool = False

    def wire_dtype(self, own: torch.dtype) -> torch.dtype:
        """The element type in which tensors of type ``own`` travel."""
        return element_dtype(self.wire) if self.wire and own.is_floating_point else own

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def element_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name``."""
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a torch dtype")
    return dtype
