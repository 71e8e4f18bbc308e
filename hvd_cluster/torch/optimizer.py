"""DistributedOptimizer: an optimizer whose gradients are reduced over all ranks while the backward pass still runs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.engine import basics
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import ReduceOp
from hvd_cluster.settings import Settings
from hvd_cluster.torch.collectives.allreduce import allreduce_async_, grouped_allreduce_async_
from hvd_cluster.torch.collectives.sparse import sparse_allreduce_async
from hvd_cluster.torch.compression import Compression, Compressor
from hvd_cluster.torch.functions import broadcast_object
from hvd_cluster.torch.submission import synchronize

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that ``step()`` uses gradients reduced over all ranks.

    Each gradient is submitted as soon as the backward pass has accumulated it, so communication overlaps with the rest
    of the backward pass. The result is an instance of a subclass with the same name as ``optimizer``'s class and shares
    its parameter groups and state, so schedulers, ``isinstance`` and state dicts work as before.

    Args:
        optimizer: any optimizer of ``torch.optim``'s kind.
        named_parameters: ``model.named_parameters()``; the names match the ranks' gradients. Without it the position
            in the parameter groups does.
        compression: how gradients travel.
        backward_passes_per_step: gradients of so many backward passes are summed before they are reduced.
        op: Average or Sum.
        gradient_predivide_factor: divides the gradients before the sum and multiplies them afterwards; Average only.
        num_groups: deprecated, use ``groups``.
        groups: reduce gradients in groups, all of one or none: a number of groups of about equal length, or lists of
            parameters (the others go one by one).
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: whose ranks take part; others get an optimizer that reduces nothing.

    Raises:
        ValueError: the arguments contradict each other or do not describe the parameters.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if num_groups < 0:
        raise ValueError(f"num_groups={num_groups} must be >= 0")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be > 0")
    op = ReduceOp(op)
    if gradient_predivide_factor != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotImplementedError(f"op={op.name} is not available in this version: use hvd.Average or hvd.Sum")
    names = _named(optimizer, named_parameters)
    # A subclass of the wrapped class with our methods in front, so that isinstance() and the class name stay.
    cls: Any = type(type(optimizer).__name__, (_DistributedOptimizer, type(optimizer)), {})
    wrapped = cls.__new__(cls)
    # Instance attributes are shared, but not the step() that a scheduler has put in front of the original's own.
    wrapped.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in ("step", "zero_grad")})
    wrapped._reducer = _Reducer(
        names=names,
        compression=compression,
        passes_per_step=backward_passes_per_step,
        op=op,
        predivide_factor=gradient_predivide_factor,
        groups=_resolve_groups(groups, names, process_set),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    wrapped._should_synchronize = True
    wrapped._is_synchronized = False
    elastic = Settings.from_env().elastic
    if (basics.size() > 1 or elastic) and process_set.included():
        wrapped._reducer.attach()
    return wrapped


class _DistributedOptimizer(_Base):
    """What is put in front of the wrapped optimizer's class."""

    _reducer: _Reducer
    _should_synchronize: bool
    _is_synchronized: bool

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. A gradient that this rank did not compute takes part as zeros."""
        self._reducer.synchronize(p for group in self.param_groups for p in group["params"])
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` inside does not synchronize: use it after :meth:`synchronize`, e.g. to clip gradients between."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of ``passes`` backward passes before they are reduced."""
        self._reducer.set_passes_per_step(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize and take a step. With a closure, each of its evaluations is synchronized."""
        if not self._should_synchronize:
            self._is_synchronized = False
            return super().step(closure)
        if self._is_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown. You may want to consider "
                "using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                stacklevel=2,
            )
        if closure is None or self._reducer.has_submitted:
            self.synchronize()
        self._is_synchronized = False
        if closure is None:
            return super().step()

        def synchronized_closure() -> Any:
            loss = closure()
            self._reducer.synchronize(p for group in self.param_groups for p in group["params"])
            return loss

        return super().step(synchronized_closure)

    # torch wraps step() of every optimizer class once, to run the step hooks; the wrapped class's step() has that.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: gradients are being reduced.
        """
        if self._reducer.has_submitted:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer or of an unwrapped one; gradients under way are finished and forgotten."""
        self._reducer.reset()
        super().load_state_dict(state_dict)


@dataclass
class _Submitted:
    """A gradient, or a group of them, on its way."""

    #: A handle, or what waits for a sparse gradient.
    handle: int | Callable[[], torch.Tensor]
    parameters: list[torch.Tensor]
    #: What was sent for each parameter, and what decompress() needs.
    sent: list[tuple[torch.Tensor, Any]]
    is_sparse: bool = False


class _Reducer:
    """Submits gradients as they become ready, and writes the reduced ones back."""

    def __init__(
        self,
        *,
        names: dict[torch.Tensor, str],
        compression: type[Compressor],
        passes_per_step: int,
        op: ReduceOp,
        predivide_factor: float,
        groups: list[list[torch.Tensor]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._names = names
        self._compression = compression
        self._passes_per_step = passes_per_step
        self._op = op
        self._prescale = 1.0 / predivide_factor
        self._postscale = predivide_factor
        self._group_of = {parameter: index for index, group in enumerate(groups) for parameter in group}
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._passes_left = dict.fromkeys(names, passes_per_step)
        self._ready: set[torch.Tensor] = set()
        self._submitted: list[_Submitted] = []
        self._is_attached = False

    @property
    def has_submitted(self) -> bool:
        """True while gradients are on their way."""
        return bool(self._submitted)

    def attach(self) -> None:
        """Hook into the backward pass, for frozen parameters too: they may be unfrozen later."""
        self._is_attached = True
        for parameter in self._names:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # it has no gradient, and cannot have one
            was_frozen = not parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            parameter.requires_grad_(not was_frozen)

    def set_passes_per_step(self, passes: int) -> None:
        self._passes_per_step = passes
        self._passes_left = dict.fromkeys(self._names, passes)

    def reset(self) -> None:
        try:
            for submitted in self._submitted:
                self._wait(submitted)
        finally:  # also where the world has broken: an elastic job goes on with the state that is loaded now
            self._clear()

    def synchronize(self, parameters: Iterable[torch.Tensor]) -> None:
        """Submit what is missing, wait for everything, and write the reduced gradients back."""
        if not self._is_attached:
            return
        done = {parameter for submitted in self._submitted for parameter in submitted.parameters}
        missing = [p for p in parameters if p.requires_grad and p in self._names and p not in done]
        for parameter in missing:
            if parameter.grad is None:
                # Another rank may have computed it, and all have to take part.
                parameter.grad = torch.zeros_like(parameter)
            self._submit([parameter])
        try:
            for submitted in self._submitted:
                self._write_back(submitted, self._wait(submitted))
        finally:
            self._clear()

    def _clear(self) -> None:
        self._submitted.clear()
        self._ready.clear()
        self._passes_left = dict.fromkeys(self._names, self._passes_per_step)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] > 0:
            return
        index = self._group_of.get(parameter)
        if index is None:
            self._submit([parameter])
            return
        self._ready.add(parameter)
        group = self._groups[index]
        if self._ready.issuperset(group):
            self._submit(group)

    def _submit(self, parameters: list[torch.Tensor]) -> None:
        gradients = [self._gradient(parameter) for parameter in parameters]
        name = self._names[parameters[0]]
        if len(parameters) == 1 and gradients[0].is_sparse:
            wait = sparse_allreduce_async(gradients[0], name, self._op, self._process_set)
            self._submitted.append(_Submitted(wait, parameters, [], is_sparse=True))
            return
        sent = [self._compression.compress(gradient) for gradient in gradients]
        tensors = [tensor.contiguous() for tensor, _ in sent]
        arguments = (None, name, self._op, self._prescale, self._postscale, self._process_set)
        handle = (
            allreduce_async_(tensors[0], *arguments)
            if len(tensors) == 1
            else grouped_allreduce_async_(tensors, *arguments)
        )
        contexts = [(tensor, ctx) for tensor, (_, ctx) in zip(tensors, sent, strict=True)]
        self._submitted.append(_Submitted(handle, list(parameters), contexts))

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError(f"the gradient of {self._names[parameter]!r} vanished before it was reduced")
        if gradient.is_sparse and (self._sparse_as_dense or parameter in self._group_of):
            gradient = parameter.grad = gradient.to_dense()
        return gradient

    def _wait(self, submitted: _Submitted) -> Any:
        handle = submitted.handle
        return synchronize(handle) if isinstance(handle, int) else handle()

    def _write_back(self, submitted: _Submitted, result: Any) -> None:
        if submitted.is_sparse:
            (parameter,) = submitted.parameters
            parameter.grad = result
            return
        for parameter, (tensor, ctx) in zip(submitted.parameters, submitted.sent, strict=True):
            gradient = self._compression.decompress(tensor, ctx)
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = gradient
            elif parameter.grad.data_ptr() != gradient.data_ptr():
                with torch.no_grad():
                    parameter.grad.copy_(gradient)


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """A unique name for every parameter of the optimizer, in the order of its groups."""
    if named_parameters is None:
        return {
            parameter: f"noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        }
    pairs: list[Any] = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(repeated)}")
    names = {parameter: name for name, parameter in pairs}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unnamed = sum(parameter not in names for parameter in parameters)
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {unnamed} of the optimizer's {len(parameters)} parameters were not "
            "named in it: pass model.named_parameters() of the whole model, or nothing."
        )
    return {parameter: names[parameter] for parameter in parameters}


def _resolve_groups(
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    names: dict[torch.Tensor, str],
    process_set: ProcessSet,
) -> list[list[torch.Tensor]]:
    """The groups as lists of parameters; parameters outside of them are reduced one by one."""
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups={groups} must be >= 0, or a list of lists of parameters")
        return _equal_groups(groups, names, process_set)
    if not isinstance(groups, (list, tuple)):  # what follows raises ValueError as Horovod does
        raise ValueError(f"groups should be a non-negative integer or a list of lists of tensors, not {groups!r}")
    members: set[torch.Tensor] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"groups must consist of lists of tensors; one holds a {type(parameter).__name__}")
            if parameter not in names:
                raise ValueError("groups holds a tensor that is no parameter of the optimizer")
            if parameter in members:
                raise ValueError(f"a tensor can only appear once in groups; {names[parameter]!r} is twice")
            members.add(parameter)
    return [list(group) for group in groups if len(group) > 1]


def _equal_groups(count: int, names: dict[torch.Tensor, str], process_set: ProcessSet) -> list[list[torch.Tensor]]:
    """``count`` runs of about equal length, in rank 0's order of the parameters."""
    by_name = {name: parameter for parameter, name in names.items()}
    order = list(by_name)
    if basics.size() > 1 and process_set.included():
        root = process_set.ranks[0] if process_set.ranks else 0
        order = broadcast_object(order, root, process_set=process_set)
    length, longer = divmod(len(order), min(count, len(order)))
    groups = []
    start = 0
    for index in range(min(count, len(order))):
        end = start + length + (index < longer)
        groups.append([by_name[name] for name in order[start:end]])
        start = end
    return [group for group in groups if len(group) > 1]
