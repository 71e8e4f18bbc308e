"""Allreduce: every rank gets the sum, average, minimum, maximum or product of all ranks' tensors."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hvd_cluster.engine.buffers import BufferPool, places
from hvd_cluster.engine.collectives.adasum import adasum
from hvd_cluster.engine.collectives.step import Step, Steps
from hvd_cluster.engine.request import ReduceOp, Request, Signature
from hvd_cluster.engine.scaling import copy_scaled, finish_scaled, reduction_dtype, reduction_op
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport


@dataclass
class _Part:
    """Tensors of one element type, reduced by one call."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    names: list[str]
    op: ReduceOp

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    def is_direct(self, transport: Transport) -> bool:
        """True when the transport can read and write the tensors themselves."""
        # What was submitted is contiguous, and what is made like it too.
        return (
            reduction_dtype(self.dtype, self.op) == self.dtype and self.inputs[0].device.type == transport.device.type
        )

    def fits_in_place(self, wire: torch.dtype, transport: Transport) -> bool:
        """True when the one output can serve as the transport's buffer."""
        return (
            len(self.outputs) == 1
            and self.outputs[0].is_contiguous()
            and self.outputs[0].device.type == transport.device.type
            and reduction_dtype(wire, self.op) == self.dtype
        )


def allreduce(requests: list[Request], transport: Transport, buffers: BufferPool, recorder: Recorder) -> Steps:
    """Reduce a bucket of requests of equal op and factors. Each element type needs a call of its own."""
    signature = requests[0].signature
    if signature.op == ReduceOp.ADASUM:
        return (yield from adasum(requests, transport, buffers, recorder))
    results = [request.outputs or [torch.empty_like(tensor) for tensor in request.inputs] for request in requests]
    divisor = transport.num_ranks if signature.op == ReduceOp.AVERAGE else 1
    parts = _parts(requests, results)
    for part in parts:
        # One after the other: a transport's buffers may serve one reduction at a time.
        yield from _reduce(part, signature, divisor, transport, buffers, recorder, is_last=part is parts[-1])
    return results


def _reduce(
    part: _Part,
    signature: Signature,
    divisor: int,
    transport: Transport,
    buffers: BufferPool,
    recorder: Recorder,
    *,
    is_last: bool,
) -> Generator[Step, None, None]:
    activity = f"{transport.name}_ALLREDUCE"
    wire = signature.wire_dtype(part.dtype)
    op = reduction_op(signature.op, part.dtype)
    since_s = time.monotonic()
    if part.is_direct(transport):
        work = transport.reduce_directly(
            part.inputs,
            part.outputs,
            op,
            wire=wire,
            prescale=signature.prescale,
            postscale=signature.postscale,
            divisor=divisor,
        )
        if work is not None:
            yield Step([work], activity, since_s, is_last)
            return
    with ExitStack() as leases:
        with recorder.phase(part.names, "MEMCPY_IN_FUSION_BUFFER"):
            flat, pieces = _pack(part, wire, transport, buffers, leases, signature.prescale)
        since_s = time.monotonic()
        yield Step([transport.allreduce(flat, op)] if flat.numel() else [], activity, since_s, is_last)
        with recorder.phase(part.names, "MEMCPY_OUT_FUSION_BUFFER"):
            for output, piece in zip(part.outputs, pieces, strict=True):
                finish_scaled(output, piece, signature.postscale, divisor)


def reduce_at_once(requests: list[Request], transport: Transport) -> list[list[torch.Tensor]] | None:
    """The results, if the transport can reduce this bucket directly; None if it takes :func:`allreduce`."""
    signature = requests[0].signature
    if signature.op == ReduceOp.ADASUM:
        return None
    results = [request.outputs or [torch.empty_like(tensor) for tensor in request.inputs] for request in requests]
    inputs = [tensor for request in requests for tensor in request.inputs]
    part = _Part(inputs, [tensor for result in results for tensor in result], [], signature.op)
    if any(tensor.dtype != part.dtype for tensor in part.inputs) or not part.is_direct(transport):
        return None
    work = transport.reduce_directly(
        part.inputs,
        part.outputs,
        reduction_op(signature.op, part.dtype),
        wire=signature.wire_dtype(part.dtype),
        prescale=signature.prescale,
        postscale=signature.postscale,
        divisor=transport.num_ranks if signature.op == ReduceOp.AVERAGE else 1,
    )
    return None if work is None else results


def _parts(requests: list[Request], results: list[list[torch.Tensor]]) -> list[_Part]:
    parts: dict[torch.dtype, _Part] = {}
    for request, outputs in zip(requests, results, strict=True):
        for tensor, output, name in zip(request.inputs, outputs, request.tensor_names, strict=True):
            part = parts.setdefault(tensor.dtype, _Part([], [], [], request.signature.op))
            part.inputs.append(tensor)
            part.outputs.append(output)
            part.names.append(name)
    return list(parts.values())


def _pack(
    part: _Part, wire: torch.dtype, transport: Transport, buffers: BufferPool, leases: ExitStack, prescale: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The flat buffer to reduce, and the place of each tensor in it, shaped like the tensor.

    Args:
        part: what to pack.
        wire: the element type in which it travels.
        transport: says where the buffer has to live.
        buffers: where buffers come from.
        leases: gives the buffer back.
        prescale: multiplies every element.
    """
    if part.fits_in_place(wire, transport):
        copy_scaled(part.outputs[0], part.inputs[0], prescale)
        return part.outputs[0].view(-1), [part.outputs[0]]
    dtype = reduction_dtype(wire, part.op)
    slices, num_bytes = places(part.inputs, dtype.itemsize)
    buffer = leases.enter_context(buffers.lease(num_bytes, transport.device))
    # The gaps between tensors are reduced too, and must not hold what traps or slows arithmetic down.
    pieces = []
    for tensor, where in zip(part.inputs, slices, strict=True):
        piece = buffer[where].view(dtype).view(tensor.shape)
        copy_scaled(piece, tensor, prescale)
        pieces.append(piece)
    flat = buffer.view(dtype)
    for where, following in zip(slices, [*(s.start for s in slices[1:]), num_bytes], strict=True):
        buffer[where.stop : following].zero_()
    return flat, pieces
