"""Allreduce: all ranks get the sum, average, min, max or product of all tensors."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hvd_cluster.engine.buffers import BufferPool, layout
from hvd_cluster.engine.collectives.adasum import adasum
from hvd_cluster.engine.collectives.stage import Stage, Stages
from hvd_cluster.engine.request import Request
from hvd_cluster.engine.scaling import Bucketing
from hvd_cluster.engine.signature import ReduceOp, Signature
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport, Work


@dataclass
class _Part:
    """Tensors of one element type, reduced by one call."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    names: list[str]
    signature: Signature

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    @property
    def wire(self) -> torch.dtype:
        return self.signature.wire_dtype(self.dtype)

    def bucketing(self, transport: Transport) -> Bucketing:
        """How the tensors would pass through a bucket."""
        signature = self.signature
        factors = (signature.prescale, signature.postscale)
        return Bucketing.of(signature.op, self.dtype, self.wire, *factors, transport.num_ranks)

    def begin_directly(self, transport: Transport, bucketing: Bucketing) -> Work | None:
        """Let the transport read and write the tensors themselves; None if it cannot."""
        # Inputs are contiguous, and so are outputs made like them.
        is_direct = self.dtype.is_floating_point or bucketing.is_plain(self.dtype)
        if not is_direct or self.inputs[0].device.type != transport.device.type:
            return None
        signature = self.signature
        return transport.reduce_directly(
            self.inputs,
            self.outputs,
            bucketing.op,
            wire=self.wire,
            prescale=signature.prescale,
            postscale=signature.postscale,
            divisor=int(bucketing.factors.divisor),
        )

    def fits_in_place(self, bucketing: Bucketing, transport: Transport) -> bool:
        """True if the only output can be the transport's buffer."""
        return (
            len(self.outputs) == 1
            and self.outputs[0].is_contiguous()
            and self.outputs[0].device == transport.device
            and bucketing.is_plain(self.dtype)
        )


def allreduce(requests: list[Request], transport: Transport, buffers: BufferPool, recorder: Recorder) -> Stages:
    """Reduce a bucket of equal op and factors, with one call for each element type."""
    signature = requests[0].signature
    if signature.op == ReduceOp.ADASUM:
        return (yield from adasum(requests, transport, buffers, recorder))
    results = [request.outputs or [torch.empty_like(tensor) for tensor in request.inputs] for request in requests]
    parts = _parts(requests, results)
    for part in parts:
        # One after the other: a transport's buffers may serve one reduction at a time.
        yield from _reduce(part, transport, buffers, recorder, is_last=part is parts[-1])
    return results


def _reduce(
    part: _Part, transport: Transport, buffers: BufferPool, recorder: Recorder, *, is_last: bool
) -> Generator[Stage, None, None]:
    activity = f"{transport.name}_ALLREDUCE"
    bucketing = part.bucketing(transport)
    since_s = time.monotonic()
    work = part.begin_directly(transport, bucketing)
    if work is not None:
        yield Stage([work], activity, since_s, is_last)
        return
    with ExitStack() as leases:
        with recorder.phase(part.names, "MEMCPY_IN_FUSION_BUFFER"):
            flat, pieces = _pack(part, bucketing, transport, buffers, leases)
        since_s = time.monotonic()
        yield Stage([transport.allreduce(flat, bucketing.op)] if flat.numel() else [], activity, since_s, is_last)
        with recorder.phase(part.names, "MEMCPY_OUT_FUSION_BUFFER"):
            for output, piece in zip(part.outputs, pieces, strict=True):
                bucketing.unpack(output, piece)


def reduce_inline(requests: list[Request], transport: Transport) -> list[list[torch.Tensor]] | None:
    """The results, if the transport reduces directly; None to use :func:`allreduce`."""
    signature = requests[0].signature
    if signature.op == ReduceOp.ADASUM:
        return None
    results = [request.outputs or [torch.empty_like(tensor) for tensor in request.inputs] for request in requests]
    inputs = [tensor for request in requests for tensor in request.inputs]
    dtype = inputs[0].dtype
    if any(tensor.dtype != dtype for tensor in inputs):
        return None
    part = _Part(inputs, [tensor for result in results for tensor in result], [], signature)
    return None if part.begin_directly(transport, part.bucketing(transport)) is None else results


def _parts(requests: list[Request], results: list[list[torch.Tensor]]) -> list[_Part]:
    parts: dict[torch.dtype, _Part] = {}
    for request, outputs in zip(requests, results, strict=True):
        for tensor, output, name in zip(request.inputs, outputs, request.tensor_names, strict=True):
            part = parts.setdefault(tensor.dtype, _Part([], [], [], request.signature))
            part.inputs.append(tensor)
            part.outputs.append(output)
            part.names.append(name)
    return list(parts.values())


def _pack(
    part: _Part, bucketing: Bucketing, transport: Transport, buffers: BufferPool, leases: ExitStack
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The flat buffer to reduce, and each tensor's part for :meth:`Bucketing.pack`.

    Args:
        part: what to pack.
        bucketing: how to pack it.
        transport: determines the device of the buffer.
        buffers: provides the buffer.
        leases: returns the buffer.
    """
    if part.fits_in_place(bucketing, transport):
        bucketing.pack(part.outputs[0], part.inputs[0])
        return part.outputs[0].view(-1), [part.outputs[0]]
    dtype, num_places = bucketing.dtype, bucketing.num_places
    slices, num_bytes = layout(part.inputs, dtype.itemsize * num_places)
    buffer = leases.enter_context(buffers.lease(num_bytes, transport.device))
    # The gaps between tensors are reduced too, and must not hold values that slow arithmetic down.
    pieces = []
    for tensor, where in zip(part.inputs, slices, strict=True):
        shape = tensor.shape if num_places == 1 else (num_places, *tensor.shape)
        piece = buffer[where].view(dtype).view(shape)
        bucketing.pack(piece, tensor)
        pieces.append(piece)
    flat = buffer.view(dtype)
    for where, following in zip(slices, [*(s.start for s in slices[1:]), num_bytes], strict=True):
        buffer[where.stop : following].zero_()
    return flat, pieces
