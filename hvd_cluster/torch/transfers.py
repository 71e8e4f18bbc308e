"""Gradients on their way: each request remembers where its results belong."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.request import Kind, ReduceOp
from hvd_cluster.errors import HorovodInternalError, RanksDisagreeError
from hvd_cluster.torch import wire
from hvd_cluster.torch.collectives.sparse import sparse_allreduce_async
from hvd_cluster.torch.compression import Compression, Compressor, wire_of
from hvd_cluster.torch.submission import submit, synchronize


class Manner(NamedTuple):
    """How gradients travel; see :func:`hvd_cluster.torch.optimizer.DistributedOptimizer`."""

    compression: type[Compressor]
    op: ReduceOp
    predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def keeps_sparse(self) -> bool:
        """Sparse gradients are gathered, not made dense."""
        return not self.sparse_as_dense and self.op in (ReduceOp.AVERAGE, ReduceOp.SUM)


class Mark(NamedTuple):
    """A gradient as it was at some time; another one, or a changed one, does not match."""

    gradient: torch.Tensor | None
    version: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Mark:
        """The gradient of ``parameter`` as it is now."""
        gradient = parameter.grad
        return cls(gradient, 0 if gradient is None else gradient._version)

    def matches(self, parameter: torch.Tensor) -> bool:
        """Since then the gradient was neither replaced nor written by anything but a reduction."""
        gradient = parameter.grad
        return gradient is self.gradient and (gradient is None or gradient._version == self.version)


@dataclass(eq=False)
class _Sent:
    """A request under way."""

    name: str
    wait: Callable[[], Any]
    parameters: Sequence[torch.Tensor]
    #: What each parameter's gradient was when it was sent.
    marks: Sequence[Mark]
    #: What was sent for each parameter; None for a sparse gradient.
    parcels: list[wire.Parcel] | None
    #: What was done to them.
    compression: type[Compressor]
    #: False if the gradients were discarded: the other ranks wait for the request, but its result is not used.
    is_wanted: bool


class Transfers:
    """The requests of one step.

    Args:
        manner: how gradients travel.
        is_sparse_only: the optimizer takes sparse gradients only; what travelled as dense is made sparse again.
    """

    def __init__(self, manner: Manner, is_sparse_only: bool) -> None:
        self._manner = manner
        self._is_sparse_only = is_sparse_only
        self._sent: list[_Sent] = []
        #: Names of the requests that have failed because the ranks had sent different things; the same on all ranks.
        self.mismatched: list[str] = []
        #: Parameters whose gradients were changed or replaced while they were being reduced.
        self.changed: list[torch.Tensor] = []

    def send(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        labels: Sequence[str],
        *,
        members: int = -1,
        is_wanted: bool = True,
    ) -> None:
        """Reduce the dense gradients of some parameters in place; zeros stand in for those that are not there.

        Args:
            name: what the ranks are matched by.
            parameters: whose gradients. Without any the request is made all the same, over nothing: other ranks may not
                have frozen what this one has, and would wait for it.
            labels: what the timeline calls them.
            members: a number that says which parameters these are, where the name does not.
            is_wanted: False sends zeros, and leaves the gradients alone.
        """
        manner = self._manner
        gradients = [_dense(parameter) if is_wanted else torch.zeros_like(parameter) for parameter in parameters]
        # What is a conversion and no more is left to the engine: it converts while it copies.
        wire_dtype = wire_of(manner.compression)
        compression = manner.compression if wire_dtype is None else Compression.none
        parcels = [wire.pack(gradient, compression, gradients[0].device) for gradient in gradients]
        handle = submit(
            Kind.ALLREDUCE,
            [parcel.tensor for parcel in parcels] or [torch.empty(0, device="cpu")],
            process_set=manner.process_set,
            name=name,
            in_place=True,
            op=manner.op,
            members=members,
            prescale=1.0 / manner.predivide_factor,
            postscale=manner.predivide_factor,
            wire=wire_dtype,
            finish=lambda _: None,
            labels=labels,
        )
        marks = [Mark.of(parameter) for parameter in parameters]
        wait = partial(synchronize, handle)
        self._sent.append(_Sent(name, wait, parameters, marks, parcels, compression, is_wanted))

    def send_sparse(self, name: str, parameter: torch.Tensor, sparse_dim: int, *, is_wanted: bool = True) -> None:
        """Gather the sparse gradient of a parameter; without one this rank has no entries."""
        manner = self._manner
        gradient = parameter.grad if is_wanted else None
        if gradient is None:
            gradient = wire.empty(parameter, sparse_dim)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(sparse_dim)
        packed, context = wire.compress_sparse(gradient, manner.compression)
        wait = sparse_allreduce_async(packed, name, manner.op, manner.process_set)
        self._sent.append(
            _Sent(
                name,
                lambda: wire.decompress_sparse(wait(), manner.compression, context),
                [parameter],
                [Mark.of(parameter)],
                None,
                manner.compression,
                is_wanted,
            )
        )

    def give_up(self) -> None:
        """Discard the results of all requests in flight."""
        for sent in self._sent:
            sent.is_wanted = False

    def wait(self, but: Container[str] = ()) -> None:
        """Wait for all requests but those of some names, and put their results in place.

        Raises:
            HorovodInternalError: the first error; raised when none of them is under way any more.
        """
        error: HorovodInternalError | None = None
        self.mismatched = []
        while sent := next((sent for sent in self._sent if sent.name not in but), None):
            try:
                result = sent.wait()
                if sent.is_wanted:
                    self._note_changes(sent)
                    self._write_back(sent, result)
            except HorovodInternalError as failure:
                error = error or failure
                if isinstance(failure, RanksDisagreeError):
                    self.mismatched.append(sent.name)
            self._sent.remove(sent)
        if error is not None:
            raise error

    def clear(self) -> None:
        """Forget what is under way."""
        self._sent.clear()
        self.changed.clear()

    def _note_changes(self, sent: _Sent) -> None:
        pairs = zip(sent.parameters, sent.marks, strict=True)
        self.changed += [parameter for parameter, mark in pairs if not mark.matches(parameter)]

    def _write_back(self, sent: _Sent, result: Any) -> None:
        if sent.parcels is None:
            (parameter,) = sent.parameters
            if parameter.requires_grad or parameter.grad is not None or result._nnz():
                parameter.grad = result
            return
        for parameter, parcel in zip(sent.parameters, sent.parcels, strict=True):
            gradient = wire.unpack(parcel, sent.compression)
            if parameter.grad is None:
                # Frozen on this rank: where it is so on the others too, zeros would move it by its momentum.
                if parameter.requires_grad or gradient.any():
                    parameter.grad = gradient
            elif parameter.grad.is_sparse:
                parameter.grad = gradient
            elif parameter.grad.data_ptr() != gradient.data_ptr():
                with torch.no_grad():
                    parameter.grad.copy_(gradient)
            if self._is_sparse_only and parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse(1)


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter, requires_grad=False)
        if parameter.requires_grad:
            parameter.grad = gradient
    elif gradient.is_sparse:
        gradient = parameter.grad = gradient.to_dense()
    return gradient
