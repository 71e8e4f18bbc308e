"""Alltoall: every rank sends a slice of its tensor to each rank, and gets the slices meant for it."""

from __future__ import annotations

import math
import time

import torch

from hvd_cluster.engine.buffers import BufferPool, as_bytes
from hvd_cluster.engine.collectives.step import Step, Steps
from hvd_cluster.engine.request import Request
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport


def alltoall(requests: list[Request], transport: Transport, buffers: BufferPool, recorder: Recorder) -> Steps:
    """Execute one request. The results are the concatenated slices, and how many rows came from each rank."""
    (request,) = requests
    if request.outputs:
        return (yield from _exchange_into(request, transport))
    (given,) = request.inputs
    tensor = given.to(transport.device)
    num_ranks = transport.num_ranks
    sizes_transport = transport.for_sizes
    sent = torch.tensor(request.splits, dtype=torch.int64, device=sizes_transport.device)
    received = torch.empty_like(sent)
    word_sizes = [sent.element_size()] * num_ranks
    since_s = time.monotonic()
    exchange = sizes_transport.alltoall(as_bytes(received), as_bytes(sent), word_sizes, word_sizes)
    yield Step([exchange], f"{sizes_transport.name}_ALLTOALL_SIZES", since_s, is_last=False)
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
    yield Step([work], f"{transport.name}_ALLTOALL", since_s)
    return [[output.to(given.device), _moved(received.to(torch.int32), given.device)]]


def _moved(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``counts`` on ``device``. The host does not wait for a GPU, which is in the middle of the exchange."""
    if counts.is_cpu and device.type == "cuda":
        return counts.pin_memory().to(device, non_blocking=True)
    return counts.to(device)


def _exchange_into(request: Request, transport: Transport) -> Steps:
    """Exchange slices whose sizes both ends know, in elements of flat tensors: no sizes are exchanged."""
    (tensor,), (output,) = request.inputs, request.outputs
    is_there = output.device == transport.device
    place = output if is_there else torch.empty_like(output, device=transport.device)
    itemsize = tensor.element_size()
    since_s = time.monotonic()
    work = transport.alltoall(
        as_bytes(place),
        as_bytes(tensor.to(transport.device)),
        [count * itemsize for count in request.output_splits],
        [count * itemsize for count in request.splits],
    )
    yield Step([work], f"{transport.name}_ALLTOALL", since_s)
    if not is_there:
        output.copy_(place)
    return [[output]]
