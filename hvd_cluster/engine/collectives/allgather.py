"""Allgather: every rank gets all tensors, concatenated in the first dimension."""

from __future__ import annotations

import time

import torch

from hvd_cluster.engine.buffers import BufferPool, as_bytes
from hvd_cluster.engine.collectives.stage import Stage, Stages
from hvd_cluster.engine.request import Request
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport, Work


def allgather(requests: list[Request], transport: Transport, buffers: BufferPool, recorder: Recorder) -> Stages:
    """Gather a bucket; ranks first exchange the first dimensions, which may differ."""
    if requests[0].outputs:
        return (yield from _gather_into(requests[0], transport))
    names = [name for request in requests for name in request.tensor_names]
    inputs = [tensor.to(transport.device) for request in requests for tensor in request.inputs]
    sizes_transport = transport.for_sizes
    mine = torch.tensor([tensor.shape[0] for tensor in inputs], dtype=torch.int64, device=sizes_transport.device)
    sizes = torch.empty(transport.num_ranks, len(inputs), dtype=torch.int64, device=sizes_transport.device)
    since_s = time.monotonic()
    exchange = sizes_transport.allgather(as_bytes(sizes), as_bytes(mine))
    yield Stage([exchange], f"{sizes_transport.name}_ALLGATHER_SIZES", since_s, is_last=False)
    since_s = time.monotonic()
    gathers = [_Gather(tensor, rows, transport) for tensor, rows in zip(inputs, sizes.t().tolist(), strict=True)]
    yield Stage([work for gather in gathers for work in gather.works], f"{transport.name}_ALLGATHER", since_s)
    with recorder.phase(names, "COPY_ALLGATHER_OUTPUT"):
        outputs = [gather.finish() for gather in gathers]
    position = 0
    results = []
    for request in requests:
        group = outputs[position : position + len(request.inputs)]
        results.append([out.to(tensor.device) for out, tensor in zip(group, request.inputs, strict=True)])
        position += len(group)
    return results


def _gather_into(request: Request, transport: Transport) -> Stages:
    """Gather tensors of equal size into the outputs; no sizes are exchanged."""
    outputs = [_on(transport, output) for output in request.outputs]
    since_s = time.monotonic()
    works = [
        transport.allgather(as_bytes(output), as_bytes(tensor.to(transport.device)))
        for output, tensor in zip(outputs, request.inputs, strict=True)
        if output.numel()
    ]
    yield Stage(works, f"{transport.name}_ALLGATHER", since_s)
    for output, place in zip(request.outputs, outputs, strict=True):
        if output is not place:
            output.copy_(place)
    return [request.outputs]


def _on(transport: Transport, output: torch.Tensor) -> torch.Tensor:
    """``output``, or a tensor like it where the transport works."""
    return output if output.device == transport.device else torch.empty_like(output, device=transport.device)


class _Gather:
    """One tensor that is sent to all ranks.

    Args:
        tensor: this rank's part, of shape (rows[index], ...).
        rows: first dimension of each rank's part.
        transport: moves it.
    """

    def __init__(self, tensor: torch.Tensor, rows: list[int], transport: Transport) -> None:
        self._rows = rows
        self.works: list[Work] = []
        self._padded: torch.Tensor | None = None
        most, total = max(rows), sum(rows)
        self._output = tensor.new_empty((total, *tensor.shape[1:]))
        if not self._output.numel():
            return
        if most * len(rows) == total:
            self.works = [transport.allgather(as_bytes(self._output), as_bytes(tensor))]
        elif most * len(rows) <= 2 * total:
            # A ring over padded parts moves at most twice the bytes, in one call.
            self._padded = tensor.new_empty((len(rows) * most, *tensor.shape[1:]))
            part = tensor.new_zeros((most, *tensor.shape[1:]))
            part[: tensor.shape[0]] = tensor
            self.works = [transport.allgather(as_bytes(self._padded), as_bytes(part))]
        else:
            # A few ranks hold most of it: each part is broadcast into the output.
            self.works = list(self._broadcasts(tensor, transport))

    def finish(self) -> torch.Tensor:
        """The concatenation, of shape (sum(rows), ...); the works are done."""
        if self._padded is not None:
            most = max(self._rows)
            parts = [self._padded[i * most : i * most + count] for i, count in enumerate(self._rows)]
            torch.cat(parts, out=self._output)
        return self._output

    def _broadcasts(self, tensor: torch.Tensor, transport: Transport) -> list[Work]:
        works = []
        start = 0
        for index, count in enumerate(self._rows):
            part = self._output[start : start + count]
            start += count
            if index == transport.index:
                part.copy_(tensor)
            if count:
                works.append(transport.broadcast(as_bytes(part), index))
        return works
