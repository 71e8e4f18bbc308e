"""Alltoall: every rank sends a slice to each rank, and gets those meant for it."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence

import torch

from hvd_cluster.engine.buffers import BufferPool, as_bytes
from hvd_cluster.engine.collectives.stage import Stage, Stages
from hvd_cluster.engine.request import Request
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport


def alltoall(requests: list[Request], transport: Transport, buffers: BufferPool, recorder: Recorder) -> Stages:
    """Execute a request: concatenate the slices, and count the rows of each rank."""
    (request,) = requests
    if request.outputs:
        return (yield from _exchange_into(request, transport))
    (given,) = request.inputs
    tensor = given.to(transport.device)
    received = yield from _sizes_from_others(request.splits, transport.for_sizes)
    rows = received.tolist()
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    # The rows after the last split are not sent.
    outgoing = as_bytes(tensor[: sum(request.splits)])
    since_s = time.monotonic()
    work = transport.alltoall(
        as_bytes(output),
        outgoing,
        [count * row_bytes for count in rows],
        [count * row_bytes for count in request.splits],
    )
    yield Stage([work], f"{transport.name}_ALLTOALL", since_s)
    return [[output.to(given.device), _moved(received.to(torch.int32), given.device)]]


def _moved(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``counts`` on ``device``; the host does not wait for a GPU in the exchange."""
    if counts.is_cpu and device.type == "cuda":
        return counts.pin_memory().to(device, non_blocking=True)
    return counts.to(device)


def _sizes_from_others(sizes: Sequence[int], transport: Transport) -> Generator[Stage, None, torch.Tensor]:
    """What each rank sends to this one, shape (ranks,); this one sends ``sizes``."""
    sent = torch.tensor(sizes, dtype=torch.int64, device=transport.device)
    received = torch.empty_like(sent)
    word_sizes = [sent.element_size()] * transport.num_ranks
    since_s = time.monotonic()
    exchange = transport.alltoall(as_bytes(received), as_bytes(sent), word_sizes, word_sizes)
    yield Stage([exchange], f"{transport.name}_ALLTOALL_SIZES", since_s, is_last=False)
    return received


def _exchange_into(request: Request, transport: Transport) -> Stages:
    """Exchange slices whose sizes both ends know, in elements of flat tensors."""
    (tensor,), (output,) = request.inputs, request.outputs
    is_there = output.device == transport.device
    place = output if is_there else torch.empty_like(output, device=transport.device)
    itemsize = tensor.element_size()
    expected = [count * itemsize for count in request.output_splits]
    sizes = [count * itemsize for count in request.splits]
    # Sizes that the signature contains are equal on all ranks.
    if transport.needs_equal_sizes and -1 in request.signature.tensors[0].shape:
        sent = yield from _sizes_from_others(sizes, transport.for_sizes)
        transport.require_equal_sizes(expected, sent.tolist())
    since_s = time.monotonic()
    work = transport.alltoall(as_bytes(place), as_bytes(tensor.to(transport.device)), expected, sizes)
    yield Stage([work], f"{transport.name}_ALLTOALL", since_s)
    if not is_there:
        output.copy_(place)
    return [[output]]
