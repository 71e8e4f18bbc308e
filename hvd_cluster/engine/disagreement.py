"""The error on every rank if two ranks submit different requests under one name.

The texts begin like Horovod's, because programs match them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_cluster.engine.signature import Key, Kind, ReduceOp, Signature, TensorMeta


def explain(key: Key, ours: Signature, our_rank: int, theirs: Signature, their_rank: int) -> str:
    """Why the requests of two ranks do not match; the signatures must differ."""
    _, name = key
    where = f" (tensor {name!r}; ranks {our_rank} and {their_rank}, in this order)"
    return _difference(ours, theirs) + where


def not_with_join(key: Key, signature: Signature, joined: Sequence[int]) -> str | None:
    """Why a request cannot run after the ranks ``joined`` joined; None if it can."""
    where = f" (tensor {key[1]!r})"
    if signature.needs_all_ranks:
        named = ", ".join(map(str, joined))
        return (
            f"Calls of torch.distributed are not supported with Join: rank {named} has called join() and does not take "
            f"part.{where}"
        )
    if signature.kind not in (Kind.ALLREDUCE, Kind.BARRIER):
        return f"{signature.kind.value.capitalize()} is not supported with Join at this time.{where}"
    is_whole = signature.prescale and (1 / signature.prescale).is_integer()
    if signature.op == ReduceOp.PRODUCT and not is_whole and any(_is_integer(meta) for meta in signature.tensors):
        return (
            f"Allreduce with op=hvd.Product and prescale_factor={signature.prescale:g} of integers is not supported "
            f"with Join: a joined rank would have to send {1 / (signature.prescale or math.inf):g}. Scale the tensor "
            f"before the call.{where}"
        )
    return None


def _difference(ours: Signature, theirs: Signature) -> str:
    if ours.kind != theirs.kind:
        return f"Mismatched operations: One rank did an {ours.kind.name}, but another rank did an {theirs.kind.name}."
    if ours.identity != theirs.identity:
        return (
            "Mismatched members of a group: One rank sends other tensors than another rank, e.g. because they have "
            "frozen different parameters, or have gradients of different layers in this step."
        )
    if ours.sparse_shapes != theirs.sparse_shapes:
        return (
            f"Mismatched shapes of sparse tensors: One rank has {_shapes(ours.sparse_shapes)}, "
            f"but another rank has {_shapes(theirs.sparse_shapes)}."
        )
    if len(ours.tensors) != len(theirs.tensors):
        return (
            f"Mismatched group sizes: One rank submitted a group of {len(ours.tensors)} tensors, "
            f"but another rank submitted a group of {len(theirs.tensors)}."
        )
    for our_tensor, their_tensor in zip(ours.tensors, theirs.tensors, strict=True):
        if our_tensor != their_tensor:
            return _tensor_difference(ours.kind, our_tensor, their_tensor)
    if ours.op != theirs.op:
        return (
            f"Mismatched reduction operation: One rank asked for {ours.op.name}, "
            f"but another rank asked for {theirs.op.name}."
        )
    if ours.root != theirs.root:
        return (
            f"Mismatched {ours.kind.name} root ranks: One rank specified root rank {ours.root}, "
            f"but another rank specified root rank {theirs.root}."
        )
    if ours.wire != theirs.wire:
        return (
            f"Mismatched compression: One rank sends {ours.wire or 'tensors as they are'}, "
            f"but another rank sends {theirs.wire or 'tensors as they are'}."
        )
    if ours.ranks != theirs.ranks:
        return (
            f"Mismatched process sets: One rank named the ranks {list(ours.ranks)}, "
            f"but another rank named the ranks {list(theirs.ranks)}."
        )
    return (
        f"Mismatched prescale/postscale factors: One rank used {ours.prescale} and {ours.postscale}, "
        f"but another rank used {theirs.prescale} and {theirs.postscale}."
    )


def _tensor_difference(kind: Kind, ours: TensorMeta, theirs: TensorMeta) -> str:
    if ours.dtype != theirs.dtype:
        return f"Mismatched data types: One rank had type {ours.dtype}, but another rank had type {theirs.dtype}."
    if ours.shape != theirs.shape:
        return (
            f"Mismatched {kind.name} tensor shapes: One rank sent a tensor of shape {_shape(ours.shape)}, "
            f"but another rank sent a tensor of shape {_shape(theirs.shape)}."
        )
    return (
        f"Mismatched {kind.name} CPU/GPU device selection: One rank specified device {ours.device}, "
        f"but another rank specified device {theirs.device}."
    )


def _is_integer(tensor: TensorMeta) -> bool:
    return "int" in tensor.dtype


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(_shape, shapes)) or "none"


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join("any" if length == -1 else str(length) for length in shape) + "]"
