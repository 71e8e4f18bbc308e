"""DistributedOptimizer: gradients reduced over ranks during the backward pass."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvd_cluster.engine import basics
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.monitor.step_clock import COMPUTE, step_clock
from hvd_cluster.settings import Settings
from hvd_cluster.torch import backward
from hvd_cluster.torch.collectives.allreduce import allreduce
from hvd_cluster.torch.compression import Compression, Compressor
from hvd_cluster.torch.delta_optimizer import DeltaOptimizer
from hvd_cluster.torch.parameters import named, named_now, resolve_groups
from hvd_cluster.torch.reducer import GradientReducer
from hvd_cluster.torch.timed_calls import time_calls_of_torch
from hvd_cluster.torch.wrapper import Wrapper, unwrapped, wrap


@none_is_default
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Iterable[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that ``step()`` uses gradients reduced over all ranks.

    The first step shows in which order the backward pass finishes the gradients. From then on they are sent in buckets
    while the rest of the backward pass runs. When ``backward()`` returns, the gradients are reduced, as with
    ``DistributedDataParallel``; only those that a later pass of the same step reaches are not. The result is an
    instance of a subclass with the same name as ``optimizer``'s class and shares its parameter groups and state, so
    schedulers, ``isinstance`` and state dicts work as before.

    Ranks may freeze different parameters (``requires_grad``): a frozen one contributes zeros. All ranks must unfreeze a
    parameter that never had a gradient before the same step; do not unfreeze any between ``backward()`` and ``step()``.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``; the ranks match gradients by these names, or by default by their
            positions in the parameter groups.
        compression: how gradients are compressed for transfer.
        backward_passes_per_step: the number of backward passes whose gradients are summed before they are reduced.
        op: Average, or another reduction. With Adasum each rank takes its own step, and the weight deltas are combined.
        gradient_predivide_factor: divides an average by this before the sum and by the rest after it.
        num_groups: deprecated, use ``groups``.
        groups: the number of groups, or lists of parameters whose gradients are reduced together. Other gradients are
            sent in buckets of up to 25 MiB, or up to HOROVOD_FUSION_THRESHOLD if that is less.
        sparse_as_dense: convert sparse gradients to dense ones; by default the entries of all ranks are gathered.
        process_set: the ranks that take part; other ranks apply their own gradients.

    Raises:
        ValueError: the arguments contradict each other or do not describe the parameters, or ``init()`` was not called.
        NotImplementedError: Adasum with a process set, or with a number of ranks that is not a power of two.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if num_groups < 0:
        raise ValueError(f"num_groups={num_groups} must be >= 0")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be > 0")
    config = ReductionConfig(
        op=ReduceOp(op),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"DistributedOptimizer expects a torch optimizer, got {type(optimizer).__name__}")
    if not hasattr(compression, "compress"):
        raise ValueError(f"compression={compression!r} is not a compressor: use hvd.Compression.fp16 or bf16")
    if isinstance(optimizer, (_DistributedOptimizer, DeltaOptimizer)):
        raise ValueError("this optimizer is already distributed")
    time_calls_of_torch()
    names = named(optimizer, named_parameters)
    if _may_reduce() and config.op == ReduceOp.ADASUM:
        if process_set.process_set_id != global_process_set.process_set_id:
            raise NotImplementedError("Adasum does not support process sets other than the global one")
        return DeltaOptimizer.around(optimizer, names, compression, backward_passes_per_step)
    return _wrapped(optimizer, names, resolve_groups(groups, names), config, backward_passes_per_step)


def _wrapped(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    groups: Sequence[Sequence[torch.Tensor]],
    config: ReductionConfig,
    passes_per_step: int,
) -> Any:
    wrapped = wrap(optimizer, _DistributedOptimizer)
    is_sparse_only = isinstance(optimizer, torch.optim.SparseAdam)
    wrapped._reducer = GradientReducer(names, groups, passes_per_step, config, is_sparse_only)
    wrapped._should_synchronize = True
    wrapped._is_synchronized = False
    # A copy that was unpickled before init() raises at its first gradient if there is no world then.
    if not basics.is_initialized() or (_may_reduce() and config.process_set.included()):
        wrapped._reducer.attach()
    return wrapped


def _may_reduce() -> bool:
    """Whether there are or may be other ranks: an elastic job can start with one."""
    return basics.size() > 1 or Settings.from_env().elastic


def _rebuilt(
    plain_class: type[torch.optim.Optimizer],
    state: dict[str, Any],
    names: dict[torch.Tensor, str],
    groups: list[list[torch.Tensor]],
    config: ReductionConfig,
    passes_per_step: int,
) -> Any:
    """The copy that :meth:`_DistributedOptimizer.__reduce__` describes."""
    return _wrapped(unwrapped(plain_class, state), names, groups, config, passes_per_step)


class _DistributedOptimizer(Wrapper):
    """The methods that precede those of the wrapped optimizer's class."""

    _reducer: GradientReducer
    _should_synchronize: bool
    _is_synchronized: bool

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups.

        Code that scales or clips gradients through them waits until they are reduced.
        """
        if self._reducer.has_ready and backward.reads_gradients(sys._getframe(1)):
            self.finish_reduction()
        groups: list[dict[str, Any]] | None = self.__dict__.get("param_groups")
        if groups is None:  # of a class that computes them, or read by a proxy that is a subclass, such as Lightning's
            groups = super().param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Each parameter's name, unique and equal on all ranks.

        Programs read this from Horovod's optimizer.
        """
        return self._reducer.index.named

    def finish_reduction(self) -> None:
        """Wait until the last pass's gradients are reduced; the step is not over."""
        if self._reducer.has_ready and not self._reducer.is_reduced and not backward.is_running():
            self._reducer.finish()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """A context for a backward pass, at whose end its gradients are reduced.

        They are added to those reduced before.
        """
        parameters = self._reducer.index.parameters
        is_kept = self._reducer.is_reduced and self._reducer.config.op == ReduceOp.SUM
        kept = [(parameter, parameter.grad) for parameter in parameters if is_kept and parameter.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None  # a second sum would count it once for each rank
        try:
            yield
            self.finish_reduction()
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def synchronize(self) -> None:
        """Wait until all gradients are reduced.

        A gradient that this rank did not compute takes part as zeros.

        Raises:
            HorovodInternalError: the ranks disagree, or the job has ended.
        """
        self._follow_groups()
        self._reducer.synchronize()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which ``step()`` does not synchronize.

        Call :meth:`synchronize` first, for example to clip gradients.
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of ``passes`` backward passes before they are reduced.

        Raises:
            ValueError: ``passes`` is less than 1.
        """
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step={passes} must be > 0")
        self._reducer.set_passes_per_step(passes)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Synchronize and take a step; with a closure, synchronize each evaluation.

        LBFGS chooses its next step by the loss. It receives the average of the ranks' losses, or their sum with
        ``op=hvd.Sum``, so that all ranks choose the same.
        """
        self.mark_stepped()
        if not self._should_synchronize:
            self._is_synchronized = False
            return self._timed_step(*([] if closure is None else [closure]), **kwargs)
        self._follow_groups()
        # After a step that the program has skipped, for instance, the gradients may be new.
        is_reduced = self._is_synchronized and not self._reducer.has_gradients
        if is_reduced:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown. You may want to consider "
                "using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                stacklevel=2,
            )
        elif closure is None or self._reducer.has_ready:
            self._reducer.synchronize()
            is_reduced = True
        self._is_synchronized = False
        if closure is None:
            return self._timed_step(**kwargs)
        return self._timed_step(self._synchronized(closure, is_reduced), **kwargs)

    # torch wraps step() of every optimizer class once, to run the step hooks; the wrapped class's step() has that.
    step.hooked = True  # type: ignore[attr-defined]
    # A scheduler need not wrap it either: it sets the attribute that schedulers check itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _synchronized(self, closure: Callable[[], Any], is_reduced: bool) -> Callable[[], Any]:
        def synchronized_closure() -> Any:
            nonlocal is_reduced
            with step_clock.span(COMPUTE):
                loss = closure()
            if self._reducer.has_ready or not is_reduced:  # Lightning's closure of manual optimization does nothing
                self._reducer.synchronize()
            is_reduced = False
            if isinstance(self, torch.optim.LBFGS) and self._reducer.is_attached:
                process_set = self._reducer.config.process_set
                value = torch.as_tensor(loss).detach().clone()
                # A line search compares the loss with its slope along the gradients, so a sum of gradients needs a sum
                # of losses. (The other reductions of gradients are not the slope of any loss.)
                op = ReduceOp.SUM if self._reducer.config.op == ReduceOp.SUM else ReduceOp.AVERAGE
                return allreduce(value, name="DistributedOptimizer.loss", op=op, process_set=process_set)
            return loss

        return synchronized_closure

    def _timed_step(self, *args: Any, **kwargs: Any) -> Any:
        with step_clock.update():
            return super().step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: gradients are being reduced.
        """
        self._follow_groups()
        if self._reducer.is_reduced:
            self._reducer.clear()  # the step was skipped, as GradScaler does if gradients have overflowed
        if self._reducer.has_ready:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. If another model's "
                "loss has made these gradients (a GAN), freeze the parameters meanwhile with requires_grad_(False). "
                "To skip the step, or to use the gradients in another way (SAM), call optimizer.synchronize() first."
            )
        self._is_synchronized = False
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; all ranks do so at the same step."""
        super().add_param_group(param_group)
        self._reducer.follow(named_now(self, self._reducer.index.named))

    def _follow_groups(self) -> None:
        """Also reduce the gradients of parameters added without :meth:`add_param_group`."""
        index = self._reducer.index
        ids = {number for group in self.param_groups for number in map(id, group["params"])}
        if self._reducer.is_attached and not ids <= index.ids:
            self._reducer.follow(named_now(self, index.named))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this or an unwrapped optimizer; discard gradients in flight."""
        self._reducer.reset()
        self._is_synchronized = False
        super().load_state_dict(state_dict)

    def __reduce__(self) -> tuple[Any, ...]:
        reducer = self._reducer
        groups = [list(group) for group in reducer.index.groups]
        return _rebuilt, (*self.plain(), reducer.index.named, groups, reducer.config, reducer.passes_per_step)
