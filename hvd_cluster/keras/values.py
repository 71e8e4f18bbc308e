"""Collectives on Python and NumPy values and on model variables.

They work with any backend of Keras.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.keras.compression import Compression, Compressor

Array = npt.NDArray[Any]


@none_is_default
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Reduce a value over all ranks.

    Args:
        value: a number, a list, an array or a tensor, with the same shape and dtype on all ranks.
        name: matches the call with those of the other ranks.
        average: deprecated; True is ``op=Average``, False is ``op=Sum``.
        prescale_factor: multiplies the value before the reduction.
        postscale_factor: multiplies the result.
        op: Average (the default), Sum, Min, Max or Product.
        compression: how the value is compressed for transfer.

    Returns:
        An array of the same shape and dtype; a NumPy scalar for a number.

    Raises:
        ValueError: the value has an unsupported dtype or is a tensor of a step that is being compiled, or the
            arguments contradict each other.
        HorovodInternalError: the ranks disagree, or the job has ended.
    """
    array = _array(value)
    if compression is Compression.none:
        sent, context = array, None
    else:
        compressed, context = compression.compress(keras.ops.convert_to_tensor(array))
        sent = keras.ops.convert_to_numpy(compressed)
    result = hvd.allreduce(
        to_torch(sent),
        average,
        name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    reduced = from_torch(result, sent.dtype)
    if context is not None:
        tensor = compression.decompress(keras.ops.convert_to_tensor(reduced), context)
        reduced = keras.ops.convert_to_numpy(tensor).astype(array.dtype)
    return reduced[()]


def allgather(value: Any, name: str | None = None) -> Array:
    """Concatenate the values of all ranks along the first dimension.

    Its length may differ between ranks.

    Args:
        value: a list, an array or a tensor, of the same dtype and other dimensions on all ranks.
        name: matches the call with those of the other ranks.
    """
    array = _array(value)
    return from_torch(hvd.allgather(to_torch(array), name), array.dtype)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Broadcast the value of one rank.

    Args:
        value: a number, a list, an array or a tensor, with the same shape and dtype on all ranks.
        root_rank: the global rank whose value is broadcast.
        name: matches the call with those of the other ranks.

    Returns:
        An array of the same shape and dtype; a NumPy scalar for a number.
    """
    array = _array(value)
    return from_torch(hvd.broadcast(to_torch(array), root_rank, name), array.dtype)[()]


@none_is_default
def reducescatter(value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE) -> Array:
    """Reduce a value over all ranks and keep this rank's rows of the result.

    Args:
        value: a list, an array or a tensor, with the same shape and dtype on all ranks.
        name: matches the call with those of the other ranks.
        op: Average or Sum.

    Raises:
        UnsupportedReductionError: ``op`` is neither.
    """
    array = _array(value)
    return from_torch(hvd.reducescatter(to_torch(array), name, op=op), array.dtype)


@none_is_default
def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite Keras variables with ``root_rank``'s, in one transfer.

    Args:
        variables: the same on all ranks.
        root_rank: the global rank whose values are broadcast.
        process_set: the ranks that take part.
    """
    arrays = [np.ascontiguousarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
    if not arrays:
        return
    everything = torch.from_numpy(np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays]))
    data = hvd.broadcast_(everything, root_rank, process_set=process_set).numpy()
    start = 0
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(data[start : start + array.nbytes].view(array.dtype).reshape(keras.ops.shape(variable)))
        start += array.nbytes


def broadcast_global_variables(root_rank: int) -> None:
    """Always raises: Keras 3 keeps no list of all variables.

    Args:
        root_rank: part of the text.

    Raises:
        RuntimeError: always; the text names the replacements.
    """
    raise RuntimeError(
        f"hvd.broadcast_global_variables({root_rank}) needs global variables, and Keras 3 keeps none. Please use "
        "hvd.callbacks.BroadcastGlobalVariablesCallback in model.fit(), or "
        "hvd.broadcast_variables(<model/optimizer variables>) instead."
    )


def to_torch(array: Array) -> torch.Tensor:
    """A torch tensor of an array; shares its memory if the array is writeable."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not support
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError:
        instead = ": use hvd.broadcast_object() or hvd.allgather_object()" if array.dtype.kind in "OSU" else ""
        raise ValueError(f"values of dtype {array.dtype} are not supported by collectives{instead}") from None


def from_torch(tensor: torch.Tensor, dtype: Any) -> Array:
    """An array of ``dtype`` that shares the memory of a torch tensor."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


def _array(value: Any) -> Array:
    if not isinstance(value, keras.Variable) and not keras.ops.is_tensor(value):
        return np.asarray(value)
    try:
        return np.asarray(keras.ops.convert_to_numpy(value))
    except (NotImplementedError, TypeError) as error:  # of TensorFlow and JAX, whose compiled steps have no values
        raise ValueError(
            "hvd_cluster.keras reduces values, and a tensor has none while a step is compiled: call it between steps, "
            "in a callback, or on TensorFlow call the function of the same name in hvd_cluster.tensorflow"
        ) from error
