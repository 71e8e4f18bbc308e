"""Where tensors cross between TensorFlow and the engine, without a copy on the CPU.

Eagerly a tensor crosses by DLPack, and the call is an ordinary call of Python. Inside a graph it is the NumPy array
that ``tf.numpy_function`` makes over the tensor's memory.

A ``tf.function`` runs such calls one after the other, in the order of the program: one of them waits at a time. A v1
graph runs them in any order, each on a thread of TensorFlow's for as long as it waits: a ``session.run`` with more
independent collectives than there are such threads (``inter_op_parallelism_threads``; the number of cores) needs them
grouped, or ordered by control dependencies. The gradients of an optimizer are one call, and so are variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import torch
from tensorflow.python.ops import control_flow_util

from hvd_cluster.tensorflow.errors import as_tensorflow_errors
from hvd_cluster.tensorflow.submission import Waitable

#: Submits torch tensors and gives what to wait for.
Begin = Callable[[list[torch.Tensor]], Waitable]
Array = npt.NDArray[Any]

_BFLOAT16 = tf.bfloat16.as_numpy_dtype


def call(
    begin: Begin,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[tf.TensorShape],
) -> list[tf.Tensor]:
    """Run ``begin`` on ``inputs``, now or when the graph runs, and give the tensors it comes to.

    Args:
        begin: submits.
        inputs: dense tensors.
        dtypes: the element type of each result.
        shapes: what is known of the shape of each result.

    Raises:
        tf.errors.OpError: eagerly, as :mod:`hvd_cluster.tensorflow.errors` says.
        ValueError: the graph is compiled by XLA, which cannot call back into Python.
    """
    if tf.executing_eagerly():
        with as_tensorflow_errors():
            return [_to_tensor(result) for result in begin([_from_tensor(tensor) for tensor in inputs]).wait()]
    graph = tf.compat.v1.get_default_graph()
    refuse_xla(graph)
    results = tf.numpy_function(lambda *arrays: _blocking(begin, arrays), inputs, list(dtypes))
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def refuse_xla(graph: Any) -> None:
    """Raise if ``graph`` is traced for XLA.

    Raises:
        ValueError: it is.
    """
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ValueError(
            "a collective cannot be compiled by XLA, which does not call back into Python: use jit_compile=False, in "
            "tf.function(jit_compile=...) and in model.compile(jit_compile=...) alike"
        )


def _blocking(begin: Begin, arrays: Sequence[Array]) -> list[Array]:
    return [_to_array(result) for result in begin([_from_array(array) for array in arrays]).wait()]


def _from_tensor(tensor: tf.Tensor) -> torch.Tensor:
    if tensor.dtype in (tf.string, tf.resource, tf.variant) or tensor.dtype.is_quantized:
        raise ValueError(f"Tensor type {tensor.dtype.name} is not supported.")
    result: torch.Tensor = torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
    return result if result.is_contiguous() else result.contiguous()


def _to_tensor(tensor: torch.Tensor) -> tf.Tensor:
    return tf.experimental.dlpack.from_dlpack(tensor.__dlpack__())


def _from_array(array: Array) -> torch.Tensor:
    array = np.asarray(array, order="C")  # a v1 graph hands over scalars as scalars
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if not array.flags.writeable:
        array = array.copy()  # a constant that TensorFlow keeps for itself
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise ValueError(f"Tensor type {array.dtype} is not supported.") from None


def _to_array(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()
