"""Packing of gradients, and the inverse.

Packed ones are compressed, contiguous, real and on the device of their bucket.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hvd_cluster.torch.compression import Compressor


def _num_users(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


#: What :func:`_num_users` gives for memory that no other tensor has.
_ALONE = _num_users(torch.empty(1, device="cpu"))


def shares_memory(gradient: torch.Tensor) -> bool:
    """Whether other tensors have memory of a dense gradient.

    Autograd makes the gradient of a parameter without a copy where it can: a part of a concatenation gets a part of the
    gradient of the whole, and one that is added through a view gets the very memory of the other summand's gradient,
    which the rest of the backward pass still reads. Users make gradients that are parts of one buffer.
    """
    if gradient.layout is not torch.strided:
        return False
    whole = gradient._base  # only the user's code makes gradients that are views
    return _num_users(gradient) > _ALONE if whole is None else whole.numel() > gradient.numel()


#: The context of sparse values that were not compressed.
_NOT_COMPRESSED = object()


class PackedGradient(NamedTuple):
    """The tensor that is sent for a gradient, and what undoes the packing."""

    #: Contiguous; the gradient's own memory if no other tensor has it.
    tensor: torch.Tensor
    context: Any
    is_complex: bool
    #: The gradient's device.
    device: torch.device


def pack(gradient: torch.Tensor, compression: type[Compressor], device: torch.device) -> PackedGradient:
    """Prepare a dense gradient to be sent from ``device`` and reduced in place.

    It is not copied if possible.
    """
    if shares_memory(gradient):
        gradient = gradient.clone()
    # Autograd leaves the gradient of v.conj() as a conjugated view, whose memory holds other numbers.
    gradient = gradient.resolve_conj().resolve_neg()
    is_complex = gradient.is_complex()
    tensor, context = compression.compress(torch.view_as_real(gradient) if is_complex else gradient)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    own = gradient.device
    return PackedGradient(tensor if own == device else tensor.to(device), context, is_complex, own)


def unpack(packed: PackedGradient, compression: type[Compressor]) -> torch.Tensor:
    """The reduced gradient in the original's form."""
    tensor = packed.tensor if packed.tensor.device == packed.device else packed.tensor.to(packed.device)
    tensor = compression.decompress(tensor, packed.context)
    return torch.view_as_complex(tensor) if packed.is_complex else tensor


def compress_sparse(gradient: torch.Tensor, compression: type[Compressor]) -> tuple[torch.Tensor, Any]:
    """Compress a gradient's values; also return what :func:`decompress_sparse` needs.

    The ranks gather one value for each index, so a compression that changes the shape does not apply: as in Horovod,
    the values are then sent as they are.
    """
    gradient = gradient.coalesce()
    own = gradient.values()
    values, context = compression.compress(own)
    if values.shape != own.shape:
        return gradient, _NOT_COMPRESSED
    if values is own:  # compare identity, not the type: a compressor may scale or round
        return gradient, context
    packed = torch.sparse_coo_tensor(
        gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
    )
    return packed, context


def decompress_sparse(gradient: torch.Tensor, compression: type[Compressor], context: Any) -> torch.Tensor:
    """The inverse of :func:`compress_sparse`; entries may still occur several times."""
    if context is _NOT_COMPRESSED:
        return gradient
    own = gradient._values()
    values = compression.decompress(own, context)
    if values is own:
        return gradient
    return torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape, check_invariants=False)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients, which may differ from its own.

    Newer versions of torch allow that.
    """
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def empty(parameter: torch.Tensor, sparse_dim: int = 0) -> torch.Tensor:
    """A gradient of zeros: dense, or sparse and empty if ``sparse_dim`` is not 0."""
    dtype = gradient_dtype(parameter)
    if not sparse_dim:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    indices = torch.zeros(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = torch.zeros(0, *parameter.shape[sparse_dim:], dtype=dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)
