"""Passing arrays between MXNet and the engine, by DLPack and without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import torch


def to_torch(arrays: Sequence[Any], *, for_writing: bool = False) -> list[torch.Tensor]:
    """Torch tensors over the memory of MXNet arrays that are computed.

    Raises:
        ValueError: an array is sparse.
    """
    sparse = [array for array in arrays if array.stype != "default"]
    if sparse:
        raise ValueError(f"an array of storage type {sparse[0].stype} cannot be sent: use array.tostype('default')")
    return [
        torch.utils.dlpack.from_dlpack(array.to_dlpack_for_write() if for_writing else array.to_dlpack_for_read())
        for array in arrays
    ]


def to_mxnet(tensors: Sequence[torch.Tensor], like: Sequence[Any]) -> list[Any]:
    """MXNet arrays over the memory of torch tensors.

    Each is of the same kind (``mx.nd`` or ``mx.np``) as in ``like``.
    """
    arrays = [mx.nd.from_dlpack(tensor.__dlpack__()) for tensor in tensors]
    return [
        array.as_np_ndarray() if isinstance(model, mx.np.ndarray) else array
        for array, model in zip(arrays, like, strict=True)
    ]
