"""Allreduce between hosts: shared memory inside, Gloo between one rank of each.

Over the network every tensor travels once per host, not once per rank: for 2 hosts of 2 ranks a flat ring moves 1.5
times its size over the link, and this transport moves it once. All other collectives use the flat ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.engine.transports.chunks import Arithmetic, Chunk, full_chunks_of, without_aliases
from hvd_cluster.engine.transports.exchange import NUM_BUFFERS, HostExchange
from hvd_cluster.engine.transports.gloo import GlooTransport
from hvd_cluster.engine.transports.transport import Transport, Work

#: Smaller tensors use the flat ring: the barriers within the host cost more than the link saves.
_MIN_BYTES = 1 << 20
#: How often a waiting leader checks whether the others are alive.
_CHECK_PERIOD_S = 0.05


class HierarchicalTransport(Transport):
    """One transport made of two transports and an exchange, which it owns.

    Args:
        flat: among all ranks of the process set.
        within: among the ranks of this host, whose first one leads.
        between: among the leaders; None on the others.
        check: called now and then while waiting; raises if the world is broken.
    """

    name: ClassVar[str] = "HIERARCHICAL"
    # The next collective within the host must wait until the leader is back from the network.
    is_exclusive: ClassVar[bool] = True
    needs_equal_sizes: ClassVar[bool] = True

    def __init__(
        self,
        flat: GlooTransport,
        within: HostExchange,
        between: GlooTransport | None,
        check: Callable[[], None],
    ) -> None:
        self.device = flat.device
        self.ranks = flat.ranks
        self.index = flat.index
        self._flat = flat
        self._within = within
        self._between = between
        self._check = check

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        wire = buffer.dtype
        work = self.reduce_directly([buffer], [buffer], op, wire=wire, prescale=1.0, postscale=1.0, divisor=1)
        return self._flat.allreduce(buffer, op) if work is None else work

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
        if sum(tensor.numel() for tensor in inputs) * wire.itemsize < _MIN_BYTES:
            return None
        factors, num_here = (prescale, postscale, divisor), self._within.num_ranks
        arithmetic = Arithmetic.between_hosts(op, inputs[0].dtype, wire, *factors, self.num_ranks, num_here)
        chunks = full_chunks_of(without_aliases(inputs, outputs), outputs, self._within.piece_bytes // wire.itemsize)
        return _Relay(chunks, arithmetic, op, wire, self._within, self._between, self._check)

    def allgather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        return self._flat.allgather(output, buffer)

    def broadcast(self, buffer: torch.Tensor, root_index: int) -> Work:
        return self._flat.broadcast(buffer, root_index)

    def alltoall(
        self, output: torch.Tensor, buffer: torch.Tensor, output_bytes: list[int], input_bytes: list[int]
    ) -> Work:
        return self._flat.alltoall(output, buffer, output_bytes, input_bytes)

    def abort(self) -> None:
        if self._between is not None:
            self._between.abort()
        self._flat.abort()

    def close(self) -> None:
        if self._between is not None:
            self._between.close()
        self._within.close()
        self._flat.close()


class _Relay(Work):
    """One reduction: its pieces are gathered, reduced between hosts, and copied out.

    As many pieces as the exchange has buffers are in progress when this returns; the others follow in :meth:`result`.

    Args:
        chunks: the tensors, split into pieces; at least one.
        arithmetic: how the elements are reduced.
        op: the reduction between the hosts.
        wire: the element type in which they travel.
        within: among the ranks of this host.
        between: among the leaders; None on the others.
        check: called now and then while waiting; raises if the world is broken.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        arithmetic: Arithmetic,
        op: ReduceOp,
        wire: torch.dtype,
        within: HostExchange,
        between: GlooTransport | None,
        check: Callable[[], None],
    ) -> None:
        self._chunks = chunks
        self._arithmetic = arithmetic
        self._op = op
        self._wire = wire
        self._within = within
        self._between = between
        self._check = check
        #: The work between the hosts, in the order of the pieces, and whether it is done.
        self._works: list[tuple[Work, threading.Event]] = []
        for piece in range(min(NUM_BUFFERS, len(chunks))):
            self._gather(piece)

    def on_done(self, callback: Callable[[], None]) -> None:
        if self._between is None:
            callback()  # a rank that does not lead waits for its leader in result()
        else:
            # The leader continues when the first piece has arrived; with few pieces, when the last one has.
            self._works[-1 if len(self._works) == len(self._chunks) else 0][0].on_done(callback)

    def result(self) -> None:
        for piece, chunk in enumerate(self._chunks):
            if self._between is not None:
                work, arrived = self._works[piece]
                # Gloo's own wait would not notice the death of a rank that is not adjacent in its ring.
                while not arrived.wait(_CHECK_PERIOD_S):
                    self._check()
                work.result()
                self._within.announce()
            else:
                self._within.await_arrival()
            self._within.scatter(piece, chunk, self._arithmetic, self._wire)
            if piece + NUM_BUFFERS < len(self._chunks):
                self._gather(piece + NUM_BUFFERS)

    def _gather(self, piece: int) -> None:
        self._within.gather(piece, self._chunks[piece], self._arithmetic, self._wire, lambda: self._send_up_to(piece))
        if self._within.num_ranks == 1:
            self._send_up_to(piece + 1)
        elif piece + 1 == len(self._chunks):
            self._within.barrier()
            self._send_up_to(piece + 1)

    def _send_up_to(self, piece: int) -> None:
        """The leader sends the pieces before this one that were not sent yet."""
        if self._between is None:
            return
        for number in range(len(self._works), piece):
            buffer = self._within.buffer(number, self._chunks[number].length, self._wire)
            work, arrived = self._between.allreduce(buffer, self._op), threading.Event()
            work.on_done(arrived.set)
            self._works.append((work, arrived))
