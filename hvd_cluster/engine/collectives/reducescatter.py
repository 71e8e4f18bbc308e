"""Reducescatter: each rank gets a slice of the rows of the sum, or average."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hvd_cluster.engine.buffers import BufferPool, as_bytes
from hvd_cluster.engine.collectives.stage import Stage, Stages
from hvd_cluster.engine.fusion import even_sizes
from hvd_cluster.engine.request import Request
from hvd_cluster.engine.scaling import HALVES, Factors, copy_scaled, finish_divided
from hvd_cluster.engine.signature import ReduceOp, Signature
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport, Work

#: The reductions that are neither a sum nor an average.
_FOLDS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.MIN: torch.amin,
    ReduceOp.MAX: torch.amax,
    ReduceOp.PRODUCT: torch.prod,
}


def reducescatter(requests: list[Request], transport: Transport, buffers: BufferPool, recorder: Recorder) -> Stages:
    """Send each slice to its owner, who adds in rank order: as many bytes as a ring."""
    if requests[0].outputs:
        return (yield from _scatter_into(requests[0], transport, buffers))
    signature = requests[0].signature
    names = [name for request in requests for name in request.tensor_names]
    with ExitStack() as leases:
        since_s = time.monotonic()
        with recorder.phase(names, "MEMCPY_IN_FUSION_BUFFER"):
            scatters = [
                _Scatter(tensor, signature, transport, buffers, leases)
                for request in requests
                for tensor in request.inputs
            ]
        works = [work for scatter in scatters for work in scatter.works]
        yield Stage(works, f"{transport.name}_REDUCESCATTER", since_s)
        with recorder.phase(names, "MEMCPY_OUT_FUSION_BUFFER"):
            outputs = [scatter.finish() for scatter in scatters]
    position = 0
    results = []
    for request in requests:
        results.append(outputs[position : position + len(request.inputs)])
        position += len(request.inputs)
    return results


def _scatter_into(request: Request, transport: Transport, buffers: BufferPool) -> Stages:
    """Reduce flat tensors, of which each rank gets an equal share in its output."""
    signature = request.signature
    op = ReduceOp.SUM if signature.op == ReduceOp.AVERAGE else signature.op
    divisor = transport.num_ranks if signature.op == ReduceOp.AVERAGE else 1
    since_s = time.monotonic()
    with ExitStack() as leases:
        works: list[Work] = []
        scatters: list[tuple[torch.Tensor, _Scatter]] = []
        for tensor, output in zip(request.inputs, request.outputs, strict=True):
            is_direct = tensor.is_floating_point() and tensor.device == transport.device and signature.prescale == 1.0
            work = transport.reduce_scatter(output, tensor, op, divisor) if is_direct and output.numel() else None
            if work is not None:
                works.append(work)
            elif output.numel():
                rows = tensor.view(transport.num_ranks, output.numel())
                scatter = _Scatter(rows, signature, transport, buffers, leases)
                works += scatter.works
                scatters.append((output, scatter))
        yield Stage(works, f"{transport.name}_REDUCESCATTER", since_s)
        for output, scatter in scatters:
            output.copy_(scatter.finish().view(-1))
    return [request.outputs]


@dataclass
class _Scatter:
    """One tensor whose slices are sent to their owners."""

    tensor: torch.Tensor
    signature: Signature
    transport: Transport
    buffers: BufferPool
    leases: ExitStack

    def __post_init__(self) -> None:
        transport, own = self.transport, self.tensor.dtype
        op, prescale, postscale = self.signature.op, self.signature.prescale, self.signature.postscale
        divisor = transport.num_ranks if op == ReduceOp.AVERAGE else 1
        self._factors = Factors.of(op, own, own, prescale, postscale, divisor, transport.num_ranks)
        prescale = self._factors.prescale
        # A scaled integer may not fit its own type although its mean does.
        dtype = torch.int64 if prescale != 1.0 and not own.is_floating_point else own
        rows = even_sizes(self.tensor.shape[0], transport.num_ranks)
        row_bytes = math.prod(self.tensor.shape[1:]) * dtype.itemsize
        self._mine = (rows[transport.index], *self.tensor.shape[1:])
        outgoing = self._lease(self.tensor.shape[0] * row_bytes)
        copy_scaled(outgoing.view(dtype).view(self.tensor.shape), self.tensor, prescale)
        my_bytes = rows[transport.index] * row_bytes
        self._received = self._lease(transport.num_ranks * my_bytes).view(dtype)
        self.works: list[Work] = []
        if outgoing.numel():
            incoming = [my_bytes] * transport.num_ranks
            sizes = [count * row_bytes for count in rows]
            self.works = [transport.alltoall(as_bytes(self._received), outgoing, incoming, sizes)]

    def finish(self) -> torch.Tensor:
        """This rank's slice, reduced; the works are done."""
        own, factors, num_ranks = self.tensor.dtype, self._factors, self.transport.num_ranks
        op = self.signature.op
        output = torch.empty(self._mine, dtype=own, device=self.tensor.device)
        parts = self._received.view(num_ranks, *self._mine)
        if op in _FOLDS:
            output.copy_(_FOLDS[op](parts, 0))
        elif own == torch.bool:  # a sum of bools is true if any is true
            output.copy_(parts.amax(0))
        elif own == torch.int64 and (factors.divisor, factors.postscale) != (1, 1.0):
            # The sum of all ranks may not fit.
            quotients = torch.div(parts, num_ranks, rounding_mode="floor").sum(0)
            finish_divided(output, quotients, torch.remainder(parts, num_ranks).sum(0), num_ranks, factors)
        else:
            wide = torch.float32 if own in HALVES else own if own.is_floating_point else torch.int64
            headroom = factors.headroom if own == torch.bfloat16 else 1.0  # float32 holds no larger numbers
            if headroom != 1.0:
                parts = parts.to(wide).div_(headroom)
            copy_scaled(output, parts.sum(0, dtype=wide), factors.postscale, factors.divisor / headroom)
        return output

    def _lease(self, num_bytes: int) -> torch.Tensor:
        return self.leases.enter_context(self.buffers.lease(num_bytes, self.transport.device))
