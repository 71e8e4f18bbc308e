"""The requests of one step, and the gradients to which their results are written."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import submit
from hvd_cluster.errors import HorovodInternalError, RanksDisagreeError
from hvd_cluster.torch import wire
from hvd_cluster.torch.collectives.sparse import begin_sparse_allreduce
from hvd_cluster.torch.compression import Compression, Compressor, wire_of
from hvd_cluster.torch.submission import checked


class GradientVersion(NamedTuple):
    """A gradient and its version at one time, to detect a change or replacement."""

    gradient: torch.Tensor | None
    version: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> GradientVersion:
        """The gradient of ``parameter`` as it is now."""
        gradient = parameter.grad
        return cls(gradient, 0 if gradient is None else gradient._version)

    def matches(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient was not replaced or changed, except by a reduction.

        Gradients that are parts of one tensor have one version, which changes with each of them and says nothing. A
        reduction uses a copy of them.
        """
        gradient = parameter.grad
        if gradient is not self.gradient or gradient is None or gradient._version == self.version:
            return gradient is self.gradient
        return wire.shares_memory(gradient)

    def was_added_to(self, parameter: torch.Tensor) -> bool:
        """Whether one backward pass has added to the gradient, and nothing else happened."""
        gradient = parameter.grad
        if gradient is None or gradient is not self.gradient:
            return is_sum(gradient)
        return gradient._version == self.version + 1


def is_sum(gradient: torch.Tensor | None) -> bool:
    """Whether autograd has added to a gradient, but not in place (``create_graph``)."""
    return gradient is not None and type(gradient.grad_fn).__name__ == "AddBackward0"


@dataclass(eq=False)
class _Sent:
    """A request in flight."""

    name: str
    wait: Callable[[], Any]
    parameters: Sequence[torch.Tensor]
    #: Each parameter's gradient when it was sent.
    versions: Sequence[GradientVersion]
    #: What was sent for each parameter; None for a sparse gradient.
    packed: list[wire.PackedGradient] | None
    #: How they were compressed.
    compression: type[Compressor]
    #: False if the gradients were discarded: the other ranks wait for the request, but its result is not used.
    is_wanted: bool
    #: For each parameter, whether a rank computes its gradient; known when the request is done. If none does, the
    #: parameter is frozen on all ranks, and keeps None: momentum would move it even for zeros.
    is_used: Callable[[], Sequence[bool]]


def takes_part(parameter: torch.Tensor) -> bool:
    """Whether this rank computes or has a parameter's gradient; not if frozen here."""
    return parameter.requires_grad or parameter.grad is not None


def _votes(parameters: Sequence[torch.Tensor], op: ReduceOp) -> tuple[torch.Tensor, Callable[[], list[bool]]]:
    """A tensor to reduce, and what it then says: which parameters some rank uses."""
    yes, no = {ReduceOp.MIN: (-1.0, 0.0), ReduceOp.PRODUCT: (0.0, 1.0)}.get(op, (1.0, 0.0))
    # Filled, and not copied from the host: the GPU's stream would have to be waited for.
    sent = torch.full((len(parameters),), yes, dtype=torch.float32, device=parameters[0].device)
    for number, parameter in enumerate(parameters):
        if not takes_part(parameter):
            sent[number] = no

    def is_used() -> list[bool]:
        return (sent != no).tolist()

    return sent, is_used


class Transfers:
    """The requests of one step.

    Args:
        config: how gradients are reduced.
        is_sparse_only: the optimizer takes sparse gradients only; dense results are made sparse again.
    """

    def __init__(self, config: ReductionConfig, is_sparse_only: bool) -> None:
        self._config = config
        self._is_sparse_only = is_sparse_only
        self._sent: list[_Sent] = []
        #: The first error of a wait that an exception of a signal handler has ended.
        self._error: HorovodInternalError | None = None
        #: Names of the requests that have failed because the ranks had sent different things; equal on all ranks.
        self.mismatched: list[str] = []
        #: Parameters whose gradients were changed or replaced while they were being reduced.
        self.changed: list[torch.Tensor] = []

    def send(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        labels: Sequence[str],
        *,
        identity: int = -1,
        is_wanted: bool = True,
        any_frozen: bool = False,
    ) -> None:
        """Reduce parameters' dense gradients in place; a missing one counts as zeros.

        Args:
            name: matches the call with those of the other ranks.
            parameters: those of the gradients. If there are none, an empty request is made, because other ranks may not
                have frozen these parameters and would wait for it.
            labels: the names in the timeline.
            identity: a number that identifies the parameters if the name does not.
            is_wanted: False sends zeros and does not change the gradients.
            any_frozen: some of these parameters may be frozen on some ranks or on all. (Otherwise each rank uses all.)
        """
        config = self._config
        votes, is_used = _votes(parameters, config.op) if any_frozen else (None, lambda: [True] * len(parameters))
        gradients = [_dense(parameter) if is_wanted else wire.empty(parameter) for parameter in parameters]
        # A compression that only converts is left to the engine, which converts while it copies.
        wire_dtype = wire_of(config.compression)
        compression = config.compression if wire_dtype is None else Compression.none
        packed = [wire.pack(gradient, compression, gradients[0].device) for gradient in gradients]
        handle = submit(
            Kind.ALLREDUCE,
            [*(each.tensor for each in packed), *(() if votes is None else (votes,))] or [torch.empty(0, device="cpu")],
            process_set=config.process_set,
            name=name,
            in_place=True,
            op=config.op,
            identity=identity,
            prescale=1.0 / config.predivide_factor,
            postscale=config.predivide_factor,
            wire=wire_dtype,
            prepare=checked,
            finish=lambda _: None,
            labels=labels if votes is None else [*labels, f"allreduce.{name}.used"],
        )
        versions = [GradientVersion.of(parameter) for parameter in parameters]
        self._sent.append(_Sent(name, handle.wait, parameters, versions, packed, compression, is_wanted, is_used))

    def send_sparse(
        self,
        name: str,
        parameter: torch.Tensor,
        sparse_dim: int,
        *,
        identity: int = -1,
        is_wanted: bool = True,
        any_frozen: bool = False,
    ) -> None:
        """Gather a parameter's sparse gradient; without one, this rank sends no entries.

        Args:
            name, identity, is_wanted: as for :meth:`send`.
            parameter: that of the gradient.
            sparse_dim: the number of sparse dimensions.
            any_frozen: the parameter may be frozen on some ranks only.
        """
        config = self._config
        is_used = takes_part(parameter)
        votes = [torch.full((1,), is_used, dtype=torch.uint8, device=parameter.device)] if any_frozen else []
        gradient = parameter.grad if is_wanted else None
        if gradient is None:
            gradient = wire.empty(parameter, sparse_dim)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(sparse_dim)
        packed, context = wire.compress_sparse(gradient, config.compression)
        wait = begin_sparse_allreduce(packed, name, config.op, config.process_set, identity, votes)
        self._sent.append(
            _Sent(
                name,
                lambda: wire.decompress_sparse(wait()[0], config.compression, context),
                [parameter],
                [GradientVersion.of(parameter)],
                None,
                config.compression,
                is_wanted,
                lambda: [bool(wait()[1][0].any())] if any_frozen else [is_used],
            )
        )

    @property
    def names(self) -> list[str]:
        """The names of the requests in flight."""
        return [sent.name for sent in self._sent]

    def discard(self) -> None:
        """Discard the results of all requests in flight."""
        for sent in self._sent:
            sent.is_wanted = False

    def wait(self, excluding: Container[str] = ()) -> None:
        """Wait for all requests but ``excluding``, and write results to the gradients.

        Raises:
            HorovodInternalError: the first error; raised when none of them is in flight any more.
        """
        if self._error is None:
            self.mismatched = []
        while sent := next((sent for sent in self._sent if sent.name not in excluding), None):
            try:
                result = sent.wait()
                if sent.is_wanted:
                    self._note_changes(sent)
                    self._write_back(sent, result)
            except HorovodInternalError as failure:
                self._error = self._error or failure
                if isinstance(failure, RanksDisagreeError) and sent.name not in self.mismatched:
                    self.mismatched.append(sent.name)
            self._sent.remove(sent)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def clear(self) -> None:
        """Forget the requests in flight."""
        self._sent.clear()
        self._error = None
        self.changed.clear()

    def _note_changes(self, sent: _Sent) -> None:
        pairs = zip(sent.parameters, sent.versions, strict=True)
        self.changed += [parameter for parameter, version in pairs if not version.matches(parameter)]

    def _write_back(self, sent: _Sent, result: Any) -> None:
        if sent.packed is None:
            (parameter,) = sent.parameters
            if parameter.grad is not None or all(sent.is_used()):
                parameter.grad = result
            return
        is_frozen = any(parameter.grad is None for parameter in sent.parameters)
        is_used = sent.is_used() if is_frozen else [True] * len(sent.parameters)
        for parameter, each, used in zip(sent.parameters, sent.packed, is_used, strict=True):
            gradient = wire.unpack(each, sent.compression)
            if parameter.grad is None:
                if used:
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
        gradient = wire.empty(parameter)
        if parameter.requires_grad:
            parameter.grad = gradient
    elif gradient.is_sparse:
        gradient = parameter.grad = gradient.to_dense()
    return gradient
