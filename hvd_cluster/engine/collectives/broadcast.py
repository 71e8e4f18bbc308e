"""Broadcast: every rank gets the root's tensors."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from hvd_cluster.engine.buffers import BufferPool, as_bytes, layout
from hvd_cluster.engine.collectives.stage import Stage, Stages
from hvd_cluster.engine.request import Request
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport


def broadcast(requests: list[Request], transport: Transport, buffers: BufferPool, recorder: Recorder) -> Stages:
    """Send a bucket of requests with the same root as one run of bytes."""
    root_index = transport.ranks.index(requests[0].signature.root)
    is_root = root_index == transport.index
    names = [name for request in requests for name in request.tensor_names]
    inputs = [tensor for request in requests for tensor in request.inputs]
    results = [request.outputs or [torch.empty_like(tensor) for tensor in request.inputs] for request in requests]
    outputs = [tensor for result in results for tensor in result]
    in_place = len(outputs) == 1 and outputs[0].device == transport.device and outputs[0].is_contiguous()
    with ExitStack() as leases:
        with recorder.phase(names, "MEMCPY_IN_FUSION_BUFFER"):
            if in_place:
                buffer, pieces = as_bytes(outputs[0]), [outputs[0]]
            else:
                slices, num_bytes = layout(outputs)
                buffer = leases.enter_context(buffers.lease(num_bytes, transport.device))
                pieces = [
                    buffer[where].view(tensor.dtype).view(tensor.shape)
                    for where, tensor in zip(slices, outputs, strict=True)
                ]
            if is_root:
                for piece, tensor in zip(pieces, inputs, strict=True):
                    if piece.data_ptr() != tensor.data_ptr():
                        piece.copy_(tensor)
        since_s = time.monotonic()
        works = [transport.broadcast(buffer, root_index)] if buffer.numel() else []
        yield Stage(works, f"{transport.name}_BCAST", since_s)
        if not in_place:
            with recorder.phase(names, "MEMCPY_OUT_FUSION_BUFFER"):
                for output, piece in zip(outputs, pieces, strict=True):
                    output.copy_(piece)
    return results
