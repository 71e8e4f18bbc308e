"""From gradients that become ready one by one, in every rank's own time, to requests that all ranks make alike.

The first backward pass shows in which order gradients become ready and which of them are sparse; the ranks agree on it
(:mod:`hvd_cluster.torch.census`). From then on each bucket (:mod:`hvd_cluster.torch.buckets`) is one request, made when
its last gradient is ready, while the backward pass goes on. What is not ready when the step comes is sent as zeros.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.request import Kind, ReduceOp
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.settings import Settings
from hvd_cluster.torch import wire
from hvd_cluster.torch.backward import in_checkpoint
from hvd_cluster.torch.buckets import plan_buckets
from hvd_cluster.torch.census import Census, Gradient, fingerprint, take_census
from hvd_cluster.torch.collectives.sparse import sparse_allreduce_async
from hvd_cluster.torch.compression import Compressor
from hvd_cluster.torch.submission import running_engine, submit, synchronize

_numbers = itertools.count()


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


@dataclass(eq=False)
class _Bucket:
    """Gradients that travel as one request."""

    name: str
    members: list[int]
    #: The members that took part when the step's first gradient came: those that were not frozen.
    active: list[int] = field(default_factory=list)
    #: How many of them are not ready yet.
    num_waiting: int = 0
    is_sent: bool = False


@dataclass
class _Plan:
    """What the ranks have agreed on."""

    label: str
    buckets: list[_Bucket]
    bucket_of: dict[int, _Bucket]
    #: Number of sparse dimensions of the gradients that are gathered.
    sparse: dict[int, int]
    #: Parameters that no rank has had a gradient for; a census is taken at every step until there are none.
    unknown: set[int]

    def append(self, members: Sequence[int]) -> None:
        """Parameters of which a first gradient was seen get a bucket of their own."""
        bucket = _Bucket(f"{self.label}.bucket.{len(self.buckets)}", list(members))
        self.buckets.append(bucket)
        self.bucket_of |= dict.fromkeys(members, bucket)


@dataclass
class _Sent:
    """A request under way."""

    wait: Callable[[], Any]
    parameters: list[torch.Tensor]
    #: What was sent for each parameter; None for a sparse gradient.
    parcels: list[wire.Parcel] | None
    #: False where the gradients were given up: the other ranks wait for the request, and nobody for its result.
    is_wanted: bool = True


class GradientReducer:
    """Reduces the gradients of some parameters over all ranks, in place.

    Args:
        names: a unique name for each parameter, equal on all ranks.
        groups: parameters whose gradients travel together.
        passes_per_step: gradients of so many backward passes are summed before they are reduced.
        manner: how they travel.
        is_sparse_only: the optimizer takes sparse gradients only.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        groups: Sequence[Sequence[torch.Tensor]],
        passes_per_step: int,
        manner: Manner,
        is_sparse_only: bool = False,
    ) -> None:
        self.manner = manner
        self.passes_per_step = passes_per_step
        self.groups = groups
        self._is_sparse_only = is_sparse_only
        self._number = next(_numbers)
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._index_of: dict[torch.Tensor, int] = {}
        self._position_of: dict[int, int] = {}
        self._hooks: list[Any] = []
        self._is_attached = False
        self._plan: _Plan | None = None
        self._engine: Callable[[], Engine | None] = lambda: None
        #: Parameters that a re-entrant checkpoint accumulates several times in one backward pass.
        self._repeated: set[int] = set()
        # The present step: gradients that are ready, in their order, and what is on its way.
        self._ready: dict[int, torch.Tensor] = {}
        self._active: set[int] = set()
        self._sent: list[_Sent] = []
        self._sent_sparse: set[int] = set()
        self._is_reduced = False
        self._adopt(names)

    # ---- what the optimizer asks for --------------------------------------------------------------------------------

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter, in the order of the optimizer."""
        indices = sorted(self._position_of, key=self._position_of.__getitem__)
        return {self._parameters[index]: self._names[index] for index in indices}

    @property
    def is_attached(self) -> bool:
        """Gradients are reduced; False in a world of one, and outside the process set."""
        return self._is_attached

    @property
    def has_ready(self) -> bool:
        """Gradients wait for the step, and may be on their way."""
        return bool(self._ready)

    @property
    def is_reduced(self) -> bool:
        """They were reduced already, because somebody was about to use them."""
        return self._is_reduced

    def attach(self) -> None:
        """Hook into the backward pass, for frozen parameters too: they may be unfrozen later."""
        self.detach()
        self._is_attached = True
        # An optimizer that is gone must not go on sending the gradients of parameters that live on.
        this = weakref.ref(self)
        for index, parameter in enumerate(self._parameters):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # it has no gradient, and cannot have one
            was_frozen = not parameter.requires_grad
            parameter.requires_grad_(True)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_on_gradient, this, index)))
            parameter.requires_grad_(not was_frozen)

    def detach(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._is_attached = False

    def add(self, names: dict[torch.Tensor, str]) -> None:
        """Take in more parameters; all ranks do so at the same step."""
        is_attached = self._is_attached
        self._adopt(self.names | names)
        if is_attached:
            self.attach()

    def set_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of so many backward passes before they are reduced."""
        self.passes_per_step = passes
        self._passes_left = [passes] * len(self._parameters)

    def synchronize(self) -> None:
        """Send what is missing, wait for everything, and leave the reduced gradients in place."""
        try:
            self.finish()
        finally:
            self.clear()

    def finish(self) -> None:
        """Reduce what there is; the step is not over."""
        if not self._is_attached or self._is_reduced:
            return
        try:
            self._send_rest()
        finally:
            self._wait()
        self._is_reduced = bool(self._ready)

    def reset(self) -> None:
        """Forget the gradients that are on their way."""
        for sent in self._sent:
            sent.is_wanted = False
        try:
            self._wait()
        except HorovodInternalError:
            pass  # the world has broken, and an elastic job goes on with the state that is loaded now
        finally:
            self.clear()

    def clear(self) -> None:
        """The step is over."""
        self._ready.clear()
        self._sent.clear()
        self._sent_sparse.clear()
        self._is_reduced = False
        self._passes_left = [self.passes_per_step] * len(self._parameters)
        for bucket in self._plan.buckets if self._plan is not None else ():
            bucket.is_sent = False

    # ---- the backward pass ------------------------------------------------------------------------------------------

    def note(self, index: int, parameter: torch.Tensor) -> None:
        """The backward pass has accumulated the gradient of a parameter."""
        left = self._passes_left[index]
        if left <= 0 or self._is_reduced:
            if not self._begins_anew(index, parameter):
                return
            left = self.passes_per_step
        self._passes_left[index] = left - 1
        gradient = parameter.grad
        if left > 1 or gradient is None:
            return
        if not self._ready:
            self._begin()
        self._ready[index] = gradient
        plan = self._plan
        if plan is None or index in self._repeated:
            return
        bucket = plan.bucket_of.get(index)
        if bucket is not None:
            if index in self._active:
                bucket.num_waiting -= 1
            elif not bucket.is_sent:  # unfrozen in the middle of the step
                bucket.active.append(index)
            if bucket.num_waiting == 0 and not bucket.is_sent:
                self._send(bucket, bucket.active)
        elif index in plan.sparse:
            self._send_sparse(index, plan)

    def _begin(self) -> None:
        """The first gradient of a step is there."""
        self._check_world()
        if self._plan is None:
            return
        active = self._active = {i for i, parameter in enumerate(self._parameters) if parameter.requires_grad}
        for bucket in self._plan.buckets:
            bucket.active = [index for index in bucket.members if index in active]
            bucket.num_waiting = len(bucket.active)

    def _begins_anew(self, index: int, parameter: torch.Tensor) -> bool:
        """A gradient comes that nobody waits for: True if it is the first of a new step, False if it counts already.

        Raises:
            AssertionError: neither; the user has forgotten the step.
        """
        if self._is_reduced:
            # The step was left out, as GradScaler does where the gradients have overflowed.
            self.clear()
            return True
        if in_checkpoint() and (self._plan is None or index in self._repeated):
            self._repeated.add(index)
            return False
        if self._engine() is not running_engine():
            self.reset()
            return True
        if self._ready.get(index) is not parameter.grad:
            # The user has cleared the gradients, not through the optimizer: another model's loss has made them (a GAN).
            self._give_up()
            return True
        raise AssertionError(
            "Gradients were computed more than backward_passes_per_step times before call to step(). "
            f"Increase backward_passes_per_step (now {self.passes_per_step}) to accumulate gradients locally. If this "
            f"was one backward pass, {self._names[index]!r} is used in several re-entrant checkpoints: pass "
            "use_reentrant=False."
        )

    def _give_up(self) -> None:
        """Nobody wants the gradients of this step any more, but the other ranks wait for what this one has begun."""
        if self._plan is not None:
            for bucket in self._plan.buckets:
                if not bucket.is_sent:
                    self._send(bucket, bucket.active, is_wanted=False)
            for index in self._plan.sparse:
                if index not in self._sent_sparse and self._parameters[index].requires_grad:
                    self._send_sparse(index, self._plan, is_wanted=False)
        for sent in self._sent:
            sent.is_wanted = False
        try:
            self._wait()
        finally:
            self.clear()

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def _adopt(self, names: dict[torch.Tensor, str]) -> None:
        # Ranks may list the parameters in different orders; by name they are the same.
        ordered = sorted(names.items(), key=lambda entry: entry[1])
        self._parameters = [parameter for parameter, _ in ordered]
        self._names = [name for _, name in ordered]
        self._index_of = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._position_of = {self._index_of[parameter]: position for position, parameter in enumerate(names)}
        self._fingerprint = fingerprint(self._names)
        self._plan = None
        self.clear()

    def _check_world(self) -> None:
        """What was agreed on holds for one world: new ranks of an elastic job know nothing of it."""
        engine = running_engine()
        if self._engine() is not engine:
            self._engine = weakref.ref(engine)
            self._plan = None

    def _agreed(self) -> tuple[_Plan, list[int]]:
        """The plan for this step, and the parameters whose gradients are known to be zero on all ranks."""
        parameters = self._parameters
        plan = self._plan
        if plan is not None and not any(parameters[index].requires_grad for index in plan.unknown):
            return plan, []
        census = self._take_census()
        known = census.dense | census.sparse.keys()
        if plan is None:
            plan = self._planned(census)
            if census.is_complete:
                self._plan = plan
        else:
            if not census.is_complete:
                plan = _Plan(plan.label, list(plan.buckets), dict(plan.bucket_of), dict(plan.sparse), set(plan.unknown))
            found = plan.unknown & known
            plan.sparse |= {index: dim for index, dim in census.sparse.items() if index in found}
            plan.unknown -= found
            if found & census.dense:
                plan.append(sorted(found & census.dense))
        return plan, [index for index in plan.unknown if parameters[index].requires_grad]

    def _take_census(self) -> Census:
        gradients: list[Gradient | None] = []
        grouped = {self._index_of[parameter] for group in self.groups for parameter in group}
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad if parameter.requires_grad else None
            is_sparse = gradient is not None and gradient.is_sparse and self.manner.keeps_sparse
            dim = gradient.sparse_dim() if gradient is not None and is_sparse and index not in grouped else 0
            gradients.append(None if gradient is None else Gradient(dim))
        return take_census(
            gradients,
            self._own_buckets(),
            number=self._number,
            print_of_names=self._fingerprint,
            process_set=self.manner.process_set,
        )

    def _own_buckets(self) -> list[list[int]]:
        """How this rank would deal the parameters: as they became ready, what is accumulated repeatedly last."""
        rest = sorted(self._position_of, key=self._position_of.__getitem__, reverse=True)
        order = list(dict.fromkeys([*(i for i in self._ready if i not in self._repeated), *self._ready, *rest]))
        devices = list(dict.fromkeys(parameter.device for parameter in self._parameters))
        return plan_buckets(
            order,
            [parameter.numel() * parameter.element_size() for parameter in self._parameters],
            [(parameter.dtype, devices.index(parameter.device)) for parameter in self._parameters],
            [[self._index_of[parameter] for parameter in group] for group in self.groups],
            Settings.from_env().fusion_threshold_bytes,
        )

    def _planned(self, census: Census) -> _Plan:
        # Without the first rank there is no number to tell optimizers apart, but this step's requests are made at its
        # end, and those of two optimizers do not meet.
        label = f"DistributedOptimizer.{census.number if census.number >= 0 else 'alone'}"
        indices = range(len(self._parameters))
        dealt = census.buckets or [[index for index in indices if self._parameters[index].requires_grad]]
        unknown = {index for index in indices if index not in census.dense and index not in census.sparse}
        plan = _Plan(label, [], {}, dict(census.sparse), unknown)
        for members in dealt:
            present = [index for index in members if index in census.dense]
            if present:
                plan.append(present)
        return plan

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _send_rest(self) -> None:
        """Send what is not on its way yet; a gradient that this rank did not compute takes part as zeros."""
        if not self._ready:
            self._begin()
        plan, missing = self._agreed()
        parameters = self._parameters
        for bucket in plan.buckets:
            if bucket.is_sent:
                late = [i for i in bucket.members if parameters[i].requires_grad and i not in bucket.active]
                if late:  # unfrozen since the bucket was sent
                    self._send(_Bucket(f"{bucket.name}.late", late), late)
            else:
                self._send(bucket, [i for i in bucket.members if parameters[i].requires_grad or i in self._ready])
        for index in plan.sparse:
            if index not in self._sent_sparse and parameters[index].requires_grad:
                self._send_sparse(index, plan)
        for index in missing:
            if parameters[index].grad is None:
                parameters[index].grad = wire.empty(parameters[index], 1 if self._is_sparse_only else 0)

    def _send(self, bucket: _Bucket, members: Iterable[int], *, is_wanted: bool = True) -> None:
        bucket.is_sent = True
        parameters = [self._parameters[index] for index in members]
        if not parameters:
            return
        gradients = [self._dense(parameter) if is_wanted else torch.zeros_like(parameter) for parameter in parameters]
        parcels = [wire.pack(gradient, self.manner.compression, gradients[0].device) for gradient in gradients]
        handle = submit(
            Kind.ALLREDUCE,
            [parcel.tensor for parcel in parcels],
            process_set=self.manner.process_set,
            name=bucket.name,
            in_place=True,
            op=self.manner.op,
            prescale=1.0 / self.manner.predivide_factor,
            postscale=self.manner.predivide_factor,
            finish=lambda _: None,
            labels=[f"allreduce.{self._names[index]}" for index in members],
        )
        self._sent.append(_Sent(partial(synchronize, handle), parameters, parcels, is_wanted))

    def _send_sparse(self, index: int, plan: _Plan, *, is_wanted: bool = True) -> None:
        self._sent_sparse.add(index)
        parameter = self._parameters[index]
        gradient = parameter.grad if is_wanted else None
        if gradient is None:
            gradient = wire.empty(parameter, plan.sparse[index])
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(plan.sparse[index])
        compression, manner = self.manner.compression, self.manner
        packed, context = wire.compress_sparse(gradient, compression)
        wait = sparse_allreduce_async(packed, f"{plan.label}.{self._names[index]}", manner.op, manner.process_set)
        self._sent.append(
            _Sent(lambda: wire.decompress_sparse(wait(), compression, context), [parameter], None, is_wanted)
        )

    def _dense(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            gradient = parameter.grad = gradient.to_dense()
        return gradient

    def _wait(self) -> None:
        """Wait for all requests and put their results in place; the first error is raised when nothing is under way."""
        error: Exception | None = None
        while self._sent:
            sent = self._sent[0]
            try:
                result = sent.wait()
                if sent.is_wanted:
                    self._write_back(sent, result)
            except HorovodInternalError as failure:
                error = error or failure
            self._sent.pop(0)
        if error is not None:
            raise error

    def _write_back(self, sent: _Sent, result: Any) -> None:
        if sent.parcels is None:
            sent.parameters[0].grad = result
            return
        for parameter, parcel in zip(sent.parameters, sent.parcels, strict=True):
            gradient = wire.unpack(parcel, self.manner.compression)
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = gradient
            elif parameter.grad.data_ptr() != gradient.data_ptr():
                with torch.no_grad():
                    parameter.grad.copy_(gradient)


def _on_gradient(reducer: Callable[[], GradientReducer | None], index: int, parameter: torch.Tensor) -> None:
    this = reducer()
    if this is not None:
        this.note(index, parameter)
