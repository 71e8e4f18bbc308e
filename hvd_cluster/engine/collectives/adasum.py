"""Adasum: a sum that counts only once what gradients share (arXiv:2006.02924).

Two vectors a and b become ``a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)``: their sum when they are orthogonal, their
mean when they are equal. More are combined pairwise along a binary tree; rank r meets rank r XOR 2^level, so the
number of ranks is a power of two. Each tensor has its own coefficients, and dot products are taken in float64.
"""

from __future__ import annotations

import time

import torch

from hvd_cluster.engine.buffers import BufferPool, layout
from hvd_cluster.engine.collectives.stage import Stage, Stages
from hvd_cluster.engine.request import Request
from hvd_cluster.engine.scaling import copy_scaled
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport


def adasum(requests: list[Request], transport: Transport, buffers: BufferPool, recorder: Recorder) -> Stages:
    """Combine a bucket; a rank exchanges all of it with a partner at each level."""
    signature = requests[0].signature
    results = [request.outputs or [torch.empty_like(tensor) for tensor in request.inputs] for request in requests]
    inputs = [tensor for request in requests for tensor in request.inputs]
    slices, num_bytes = layout(inputs, torch.float64.itemsize)
    with buffers.lease(num_bytes, transport.device) as mine, buffers.lease(num_bytes, transport.device) as theirs:
        ours = _pieces(mine, slices, inputs)
        others = _pieces(theirs, slices, inputs)
        for piece, tensor in zip(ours, inputs, strict=True):
            copy_scaled(piece, tensor, signature.prescale)
        level = 1
        while level < transport.num_ranks:
            partner = transport.index ^ level
            sizes = [num_bytes if index == partner else 0 for index in range(transport.num_ranks)]
            since_s = time.monotonic()
            work = transport.alltoall(theirs, mine, sizes, sizes)
            level *= 2
            yield Stage([work], f"{transport.name}_ADASUM_ALLREDUCE", since_s, is_last=level >= transport.num_ranks)
            for piece, other in zip(ours, others, strict=True):
                # Both partners compute the same expression of the same operands, so they stay equal to the last bit.
                piece.copy_(_combined(piece, other) if transport.index < partner else _combined(other, piece))
        if transport.num_ranks == 1:
            yield Stage([], f"{transport.name}_ADASUM_ALLREDUCE", time.monotonic())
        outputs = [tensor for result in results for tensor in result]
        for output, piece in zip(outputs, ours, strict=True):
            copy_scaled(output, piece, signature.postscale)
    return results


def _pieces(buffer: torch.Tensor, slices: list[slice], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor's place in the bucket, in float64 to combine and send unrounded."""
    return [buffer[where].view(torch.float64).view(tensor.shape) for where, tensor in zip(slices, tensors, strict=True)]


def _combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot = (a * b).sum()
    return a * _coefficient(dot, (a * a).sum()) + b * _coefficient(dot, (b * b).sum())


def _coefficient(dot: torch.Tensor, norm_squared: torch.Tensor) -> torch.Tensor:
    """``1 - dot / 2|x|^2``, and 1 for a vector too small to have a direction."""
    tiny = torch.finfo(norm_squared.dtype).tiny
    return torch.where(norm_squared > tiny, 1 - dot / (2 * norm_squared.clamp_min(tiny)), torch.ones_like(dot))
