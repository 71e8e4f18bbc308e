"""A device whose progress a test controls: operations run on CPUs, and complete later, never, or with an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from hvd_cluster.engine import submission
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.engine.transports.select import TransportTable
from hvd_cluster.engine.transports.transport import Transport, Work


class ControlledWork(Work):
    """Work of a CPU transport that counts as complete when the test says so."""

    def __init__(self, work: Work, is_complete: Callable[[], bool]) -> None:
        self._work = work
        self._is_complete = is_complete

    def on_done(self, callback: Callable[[], None]) -> None:
        self._work.on_done(callback)

    def result(self) -> None:
        self._work.result()

    def is_complete(self) -> bool:
        return self._is_complete()


class ControlledTransport(Transport):
    """Launches work as NCCL does.

    Args:
        cpu: moves the bytes.
        is_complete: called with the number of the work, counted from 0; may raise ``RuntimeError``.
    """

    name: ClassVar[str] = "CONTROLLED"
    is_asynchronous: ClassVar[bool] = True

    def __init__(self, cpu: Transport, is_complete: Callable[[int], bool]) -> None:
        self._cpu = cpu
        self._is_complete = is_complete
        self._num_works = 0
        self.device = cpu.device
        self.ranks = cpu.ranks
        self.index = cpu.index

    def _launched(self, work: Work) -> Work:
        number = self._num_works
        self._num_works += 1
        return ControlledWork(work, lambda: self._is_complete(number))

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        return self._launched(self._cpu.allreduce(buffer, op))

    def allgather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        return self._launched(self._cpu.allgather(output, buffer))

    def broadcast(self, buffer: torch.Tensor, root_index: int) -> Work:
        return self._launched(self._cpu.broadcast(buffer, root_index))

    def alltoall(
        self, output: torch.Tensor, buffer: torch.Tensor, output_bytes: list[int], input_bytes: list[int]
    ) -> Work:
        return self._launched(self._cpu.alltoall(output, buffer, output_bytes, input_bytes))

    def abort(self) -> None:
        self._cpu.abort()

    def close(self) -> None:
        self._cpu.close()


class _Event:
    """A CUDA event."""

    def __init__(self, query: Callable[[], bool]) -> None:
        self.query = query


def install(is_complete: Callable[[int], bool], *, has_inputs: Callable[[], bool] = lambda: True) -> None:
    """Make the worlds of this process use the device; call it before ``hvd.init()``.

    Args:
        is_complete: see :class:`ControlledTransport`.
        has_inputs: returns whether the device has computed what the operations take.
    """
    table: Any = TransportTable
    for_cpu = table._for_cpu
    table._for_cpu = lambda *args: ControlledTransport(for_cpu(*args), is_complete)
    vars(submission)["recorded_event"] = lambda _: _Event(has_inputs)
