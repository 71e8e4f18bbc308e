"""Where tensors cross between TensorFlow and the engine, without a copy on the CPU.

Eagerly a tensor crosses by DLPack, and the call is an ordinary call of Python. Inside a graph it is the NumPy array
that ``tf.numpy_function`` makes over the tensor's memory.

A ``tf.function`` runs such calls one after the other, in the order of the program
(:mod:`hvd_cluster.tensorflow.order`), so one blocking call at a time is all there is. A v1 graph runs them in any
order, on as many threads as TensorFlow has for it: two ranks with all their threads waiting for different tensors would
wait forever. There one node starts a call, and another one waits for it, behind a lock of the graph that no thread
has to wait for: one thread waits, the others start what else the session runs. That holds for a session of
one thread too: TensorFlow grants the lock in a thread of its own, which puts what waits for the lock behind all that is
ready to run. (A ``tf.function`` that a v1 graph calls blocks the thread it runs in: several that run beside each other
need as many threads, or an order.)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import torch
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.submission import Waitable, keep_error, running_engine
from hvd_cluster.errors import SHUT_DOWN_TEXT, WorldEndedError
from hvd_cluster.tensorflow.errors import as_tensorflow_errors
from hvd_cluster.tensorflow.order import put_in_order

#: Submits torch tensors and gives what to wait for; the flag says whether the calling thread waits for it next.
Begin = Callable[[list[torch.Tensor], bool], Waitable]
Array = npt.NDArray[Any]

_BFLOAT16 = tf.bfloat16.as_numpy_dtype
#: What v1 graphs have begun and not awaited yet, with the engine that carries it out.
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
            return [_to_tensor(result) for result in begin([_from_tensor(tensor) for tensor in inputs], True).wait()]
    refuse_xla(tf.compat.v1.get_default_graph())
    graph = _graph_that_runs()
    if isinstance(graph, tf.__internal__.FuncGraph):
        results = tf.numpy_function(lambda *arrays: _blocking(begin, arrays), inputs, list(dtypes))
        put_in_order(results[0].op)
    else:
        results = _begun_and_awaited(begin, inputs, list(dtypes), graph)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def is_v1_graph() -> bool:
    """Whether what is called now becomes a node that somebody has to fetch."""
    return not tf.executing_eagerly() and not isinstance(_graph_that_runs(), tf.__internal__.FuncGraph)


def _graph_that_runs() -> Any:
    """The function or the v1 graph that what is called now becomes a part of: branches and loops run within theirs."""
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


def _blocking(begin: Begin, arrays: Sequence[Array]) -> list[Array]:
    with keep_error():
        return [_to_array(result) for result in begin([_from_array(array) for array in arrays], True).wait()]


def _begun_and_awaited(
    begin: Begin, inputs: Sequence[tf.Tensor], dtypes: list[tf.DType], v1_graph: Any
) -> list[tf.Tensor]:
    def submit(*arrays: Array) -> npt.NDArray[np.int64]:
        with keep_error():
            waitable = begin([_from_array(array) for array in arrays], False)
            engine = running_engine()
        with _lock:
            # A run that failed in between never awaits what it has begun: its tensors go with its world.
            for left in [number for number, (its_engine, _) in _under_way.items() if its_engine is not engine]:
                del _under_way[left]
            number = next(_next_id)
            _under_way[number] = engine, waitable
        return np.int64(number)  # type: ignore[return-value]

    def fetch(number: npt.NDArray[np.int64]) -> list[Array]:
        with _lock:
            _, waitable = _under_way.pop(int(number), (None, _EndedWorld()))
        with keep_error():
            return [_to_array(result) for result in waitable.wait()]

    number = tf.numpy_function(submit, inputs, tf.int64)
    if not hasattr(v1_graph, "_hvd_turn"):
        with tf.init_scope():
            # Kept by the graph, and nowhere else: it keeps the graph.
            v1_graph._hvd_turn = tf.CriticalSection(name="hvd_turn")
    # All of it depends on the number alone, so that no lock is taken before the call has begun.
    results = v1_graph._hvd_turn.execute(lambda: tf.numpy_function(fetch, [number], dtypes))
    return list(results) if isinstance(results, (list, tuple)) else [results]


class _EndedWorld:
    """What was begun in a world that another one has followed."""

    def wait(self) -> list[torch.Tensor]:
        raise WorldEndedError(SHUT_DOWN_TEXT)


def _from_tensor(tensor: tf.Tensor) -> torch.Tensor:
    if tensor.dtype in (tf.string, tf.resource, tf.variant) or tensor.dtype.is_quantized:
        raise ValueError(f"Tensor type {tensor.dtype.name} is not supported.")
    if not _is_numbered_as_in_torch(tensor.device):
        return _from_array(tensor.numpy())
    result: torch.Tensor = torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
    return result if result.is_contiguous() else result.contiguous()


def _is_numbered_as_in_torch(device: str) -> bool:
    """Whether tensors on ``device`` may cross by DLPack, which passes on TensorFlow's number of a GPU.

    That number counts the visible GPUs alone, and the parts of one that was divided; torch counts all. The answer is
    for all GPUs alike: where each rank has left out all but its own, only the first rank's has torch's number, and a
    request to which one rank sends a tensor of a GPU and the others one of the CPU is a mismatch.
    """
    if tf.DeviceSpec.from_string(device).device_type != "GPU":
        return True
    seen = tf.config.get_visible_devices("GPU")
    is_whole = len(tf.config.list_logical_devices("GPU")) == len(seen)
    return is_whole and seen == tf.config.list_physical_devices("GPU")


def _to_tensor(tensor: torch.Tensor) -> tf.Tensor:
    if tensor.is_cuda:  # TensorFlow computes on a stream of its own, and waits for none of torch's
        torch.cuda.current_stream(tensor.device).synchronize()
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
