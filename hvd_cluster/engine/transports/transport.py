"""The interface of a transport: collectives over flat buffers in a process set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from hvd_cluster.engine.signature import ReduceOp


class Work(ABC):
    """A collective in progress."""

    @abstractmethod
    def on_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, as soon as :meth:`result` does not block."""

    @abstractmethod
    def result(self) -> None:
        """Return when the buffers may be read; raise ``RuntimeError`` after a failure."""

    def is_complete(self) -> bool:
        """False while a device works on it, even after :meth:`result`; never blocks.

        Raises:
            RuntimeError: the device has failed.
        """
        return True


class Transport(ABC):
    """Moves bytes among the ranks of one process set.

    All ranks of the set call the same methods in the same order. Buffers are one-dimensional, contiguous, and live on
    :attr:`device`; they must not be touched until the work is done.
    """

    #: How the transport appears in the timeline, e.g. "GLOO" in "GLOO_ALLREDUCE".
    name: ClassVar[str]
    #: :meth:`reduce_directly` finishes its work in the calling thread.
    ends_in_caller: ClassVar[bool] = False
    #: :meth:`Work.result` returns when the work is launched on a device, which completes it later.
    is_asynchronous: ClassVar[bool] = False
    #: One collective must be done before the next one begins: while one rank of a host is back in the engine, others
    #: may wait for it in the middle of the collective.
    is_exclusive: ClassVar[bool] = False
    #: :meth:`alltoall` may crash or leave memory unwritten if the sizes of two ranks differ: compare them before it.
    needs_equal_sizes: ClassVar[bool] = False
    #: The device of the buffers.
    device: torch.device
    #: The global ranks of the process set, by index.
    ranks: tuple[int, ...]
    #: This rank's index in the process set.
    index: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the process set."""
        return len(self.ranks)

    @property
    def is_idle(self) -> bool:
        """Whether all work has ended, also a GPU's work for handles that are done."""
        return True

    @property
    def for_sizes(self) -> Transport:
        """The transport for a few numbers that the host must read before it can continue."""
        return self

    @abstractmethod
    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        """Reduce ``buffer`` over all ranks, in place. ``op`` is SUM, MIN, MAX or PRODUCT."""

    def reduce_directly(
        self,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        op: ReduceOp,
        *,
        wire: torch.dtype,
        prescale: float,
        postscale: float,
        divisor: int,
    ) -> Work | None:
        """Start a whole reduction with scaling; None if this transport needs a bucket.

        Args:
            inputs: contiguous tensors of one element type on :attr:`device`.
            outputs: where their results go; contiguous, possibly the inputs themselves.
            op: SUM, MIN, MAX or PRODUCT.
            wire: the element type in which they travel and are added.
            prescale: multiplies before the reduction.
            postscale: multiplies after it.
            divisor: divides after that.
        """
        return None

    @abstractmethod
    def allgather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        """Concatenate the ranks' equally long byte ``buffer`` into ``output``, in order."""

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor, root_index: int) -> Work:
        """Copy the byte ``buffer`` of the rank at ``root_index`` to all other ranks."""

    @abstractmethod
    def alltoall(
        self, output: torch.Tensor, buffer: torch.Tensor, output_bytes: list[int], input_bytes: list[int]
    ) -> Work:
        """Send ``input_bytes[i]`` of ``buffer`` to rank i, and get ``output_bytes[i]``."""

    def require_equal_sizes(self, output_bytes: list[int], sent_bytes: list[int]) -> None:
        """Check that this rank gets from each rank index what that rank sends.

        Raises:
            RuntimeError: some rank sends fewer bytes or more.
        """
        for rank, expected, sent in zip(self.ranks, output_bytes, sent_bytes, strict=True):
            if expected != sent:
                raise RuntimeError(
                    f"in an alltoall, rank {rank} sends {sent} bytes to rank {self.ranks[self.index]}, which expects "
                    f"{expected}: the output split for each rank must have the size of that rank's input split"
                )

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp, divisor: int) -> Work | None:
        """Reduce ``buffer`` over all ranks, and write this rank's share to ``output``.

        Returns None if this is not supported.

        Args:
            output: shape (elements,).
            buffer: shape (ranks * elements,) and the same element type; ``output`` may be this rank's part of it.
            op: SUM, MIN, MAX or PRODUCT.
            divisor: divides after it.
        """
        return None

    @abstractmethod
    def abort(self) -> None:
        """Make all work in progress fail now, on this rank."""

    @abstractmethod
    def close(self) -> None:
        """Release sockets and threads, when no work is left or after :meth:`abort`."""


class FinishedWork(Work):
    """Work that is done when it is started."""

    def on_done(self, callback: Callable[[], None]) -> None:
        callback()

    def result(self) -> None:
        return
