"""Passing tensors between TensorFlow and the engine, without a copy on the CPU.

Eager tensors are passed by DLPack, in an ordinary Python call. In a graph, a tensor is passed as the NumPy array that
``tf.numpy_function`` makes over its memory.

A ``tf.function`` runs such calls one after the other, in the order of the program
(:mod:`hvd_cluster.tensorflow.order`), so there is one blocking call at a time. A v1 graph runs them in any order, on
as many threads as TensorFlow has for it: two ranks whose threads all wait for different tensors would wait forever. So
one node starts a call and another node waits for it, under a lock of the graph that does not block threads: one thread
waits, and the others start the remaining calls of the session. This also works in a session with one thread: TensorFlow
grants the lock in another thread, after everything that is ready to run. (A ``tf.function`` that a v1 graph calls
blocks its thread: several concurrent ones need as many threads, or an order.)
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import torch
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from hvd_cluster.engine.compiled_steps import keep_error
from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.submission import Waitable
from hvd_cluster.errors import SHUT_DOWN_TEXT, WorldEndedError
from hvd_cluster.monitor.callback_steps import callback_steps
from hvd_cluster.tensorflow.dtypes import check_dtype, check_is_one_tensor
from hvd_cluster.tensorflow.errors import as_tensorflow_errors
from hvd_cluster.tensorflow.order import put_in_order

#: Submits torch tensors and returns a handle; the flag says whether the calling thread waits for it next.
Begin = Callable[[list[torch.Tensor], bool], Waitable]
Array = npt.NDArray[Any]

_BFLOAT16 = tf.bfloat16.as_numpy_dtype
#: Handles that v1 graphs do not wait for yet, with their engines.
_under_way: dict[int, tuple[Engine, Waitable]] = {}
_next_id = itertools.count()
_lock = threading.Lock()


# AutoGraph would rewrite what a step calls, and go through it again whenever the step runs.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator,unused-ignore]
def call(
    begin: Begin,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[tf.TensorShape],
    *,
    ends_step: bool = False,
) -> list[tf.Tensor]:
    """Run ``begin`` on ``inputs``, now or in the graph, and return the results.

    Args:
        begin: submits.
        inputs: dense tensors.
        dtypes: the element type of each result.
        shapes: the shape of each result, as far as it is known.
        ends_step: nothing else reduces gradients of this training step later.

    Raises:
        tf.errors.InvalidArgumentError: an input has a dtype that no collective transfers.
        tf.errors.OpError: eagerly, as :mod:`hvd_cluster.tensorflow.errors` says.
        ValueError: the graph is compiled by XLA, which cannot call back into Python.
    """
    for tensor in inputs:
        check_dtype(tensor.dtype)
    if tf.executing_eagerly():
        with as_tensorflow_errors():
            return [_to_tensor(result) for result in begin([_from_tensor(tensor) for tensor in inputs], True).wait()]
    refuse_xla(tf.compat.v1.get_default_graph())
    graph = _graph_that_runs()
    if isinstance(graph, tf.__internal__.FuncGraph):
        given = [_arrival(graph), *inputs] if ends_step else inputs
        results = tf.numpy_function(lambda *arrays: _blocking(begin, arrays, ends_step), given, list(dtypes))
        put_in_order(results[0].op)
    else:
        results = _begun_and_awaited(begin, inputs, list(dtypes), graph, ends_step)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def is_v1_graph() -> bool:
    """Whether operations become nodes of a v1 graph, which run only if fetched."""
    return not tf.executing_eagerly() and not isinstance(_graph_that_runs(), tf.__internal__.FuncGraph)


def _graph_that_runs() -> Any:
    """The function or v1 graph to which operations are added.

    Branches and loops belong to an outer one.
    """
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


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


def _arrival(graph: Any) -> tf.Tensor:
    """When the function that is traced had its inputs, in seconds of ``time.time()``."""
    held = (tf.resource, tf.variant)  # variables and the iterators of data: there from the beginning
    with graph.as_default(), tf.control_dependencies([each for each in graph.inputs if each.dtype not in held]):
        return tf.timestamp()


def _blocking(begin: Begin, arrays: Sequence[Array], ends_step: bool) -> list[Array]:
    arrived_s = 0.0
    if ends_step:
        arrived_s, arrays = time.monotonic() - (time.time() - float(arrays[0])), arrays[1:]
    with callback_steps.callback(ends_step=ends_step, arrived_s=arrived_s), keep_error():
        return [_to_array(result) for result in begin([_from_array(array) for array in arrays], True).wait()]


def _begun_and_awaited(
    begin: Begin, inputs: Sequence[tf.Tensor], dtypes: list[tf.DType], v1_graph: Any, ends_step: bool
) -> list[tf.Tensor]:
    def submit(*arrays: Array) -> npt.NDArray[np.int64]:
        with keep_error():
            waitable = begin([_from_array(array) for array in arrays], False)
            engine = running_engine()
        with _lock:
            # A run that failed in between never waits for its calls: drop them with their world.
            for left in [number for number, (engine_, _) in _under_way.items() if engine_ is not engine]:
                del _under_way[left]
            number = next(_next_id)
            _under_way[number] = engine, waitable
        return np.int64(number)  # type: ignore[return-value]

    def fetch(number: npt.NDArray[np.int64]) -> list[Array]:
        with _lock:
            _, waitable = _under_way.pop(int(number), (None, _EndedWorld()))
        with callback_steps.callback(ends_step=ends_step), keep_error():
            return [_to_array(result) for result in waitable.wait()]

    number = tf.numpy_function(submit, inputs, tf.int64)
    if not hasattr(v1_graph, "_hvd_turn"):
        with tf.init_scope():
            # An attribute of the graph, because it holds a reference to the graph.
            v1_graph._hvd_turn = tf.CriticalSection(name="hvd_turn")
    # It depends only on the number, so that the lock is not taken before the call has started.
    results = v1_graph._hvd_turn.execute(lambda: tf.numpy_function(fetch, [number], dtypes))
    return list(results) if isinstance(results, (list, tuple)) else [results]


class _EndedWorld:
    """The handle of an operation whose world has ended."""

    def wait(self) -> list[torch.Tensor]:
        raise WorldEndedError(SHUT_DOWN_TEXT)


def _from_tensor(tensor: tf.Tensor) -> torch.Tensor:
    if not _has_torch_number(tensor.device):
        return _from_array(tensor.numpy())
    result: torch.Tensor = torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
    return result if result.is_contiguous() else result.contiguous()


def _has_torch_number(device: str) -> bool:
    """Whether tensors on a device can be passed by DLPack.

    DLPack contains TensorFlow's number of a GPU. TensorFlow numbers only the visible GPUs, and the parts of a divided
    one; torch numbers all GPUs. The answer is the same for all GPUs: if each rank sees only its own GPU, only the first
    rank's has torch's number, and a request with a GPU tensor on one rank and CPU tensors on the others would be a
    mismatch.
    """
    if tf.DeviceSpec.from_string(device).device_type != "GPU":
        return True
    seen = tf.config.get_visible_devices("GPU")
    is_whole = len(tf.config.list_logical_devices("GPU")) == len(seen)
    return is_whole and seen == tf.config.list_physical_devices("GPU")


def _to_tensor(tensor: torch.Tensor) -> tf.Tensor:
    if tensor.is_cuda:  # TensorFlow computes on its own stream, and does not wait for torch's
        torch.cuda.current_stream(tensor.device).synchronize()
    return tf.experimental.dlpack.from_dlpack(tensor.__dlpack__())


def _from_array(array: Array) -> torch.Tensor:
    array = np.asarray(array, order="C")  # a v1 graph hands over scalars as scalars
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if not array.flags.writeable:
        array = array.copy()  # a constant that TensorFlow keeps
    return torch.from_numpy(array)


def _to_array(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()


def dense(value: Any) -> tf.Tensor:
    """A dense tensor from a tensor, a variable, an array or numbers.

    The variable may be TensorFlow's or Keras's.

    Raises:
        tf.errors.InvalidArgumentError: ``value`` is a ragged or sparse tensor.
    """
    if isinstance(value, tf.Tensor):
        return value
    check_is_one_tensor(value)
    # A Keras variable holds a TensorFlow variable.
    return tf.convert_to_tensor(value.value if hasattr(value, "value") and not callable(value.value) else value)


def any_rows(shape: tf.TensorShape) -> tf.TensorShape:
    """``shape`` with an unknown first dimension."""
    return tf.TensorShape([None, *shape[1:]]) if shape.rank else tf.TensorShape(None)
