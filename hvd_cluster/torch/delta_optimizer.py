"""Adasum for optimizers with a state: it combines the deltas of ranks' own steps.

Adasum (arXiv:2006.02924) combines descent directions. The update that Adam or momentum computes from a rank's gradient
is such a direction, but the update computed from combined gradients is not; so the ranks combine deltas.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvd_cluster.engine.process_sets import global_process_set
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import check_adasum, submit, wait_all
from hvd_cluster.monitor.step_clock import step_clock
from hvd_cluster.settings import Settings
from hvd_cluster.torch import wire
from hvd_cluster.torch.buckets import plan_buckets
from hvd_cluster.torch.compression import Compressor
from hvd_cluster.torch.gradient_layout import fingerprint
from hvd_cluster.torch.parameters import named_now
from hvd_cluster.torch.submission import checked
from hvd_cluster.torch.wrapper import Wrapper, unwrapped, wrap


class DeltaOptimizer(Wrapper):
    """The methods that precede those of the wrapped class; see :meth:`around`."""

    _names: dict[torch.Tensor, str]
    _compression: type[Compressor]
    _passes_per_step: int
    #: The wrapped optimizer applies a GradScaler's scale itself, as fused ones do.
    _scales_itself: bool
    #: Set by GradScaler during a step.
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    @staticmethod
    def around(
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        compression: type[Compressor],
        passes_per_step: int,
    ) -> Any:
        """Wrap ``optimizer``; a step sums ``passes_per_step`` backward passes' gradients.

        Raises:
            NotImplementedError: the number of ranks is not a power of two.
        """
        check_adasum(global_process_set)
        wrapped = wrap(optimizer, DeltaOptimizer)
        wrapped._names = names
        wrapped._compression = compression
        wrapped._passes_per_step = passes_per_step
        wrapped._scales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        # GradScaler then always calls step(), which a rank whose gradients have overflowed must not skip.
        wrapped._step_supports_amp_scaling = True
        return wrapped

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Each parameter's name, unique and equal on all ranks.

        Programs read this from Horovod's optimizer.
        """
        return self._names

    def synchronize(self) -> None:
        """Do nothing: gradients stay those of this rank.

        They can be clipped right after the backward pass.
        """

    def backward_pass(self) -> AbstractContextManager[None]:
        """Does nothing: the step itself computes what is reduced."""
        return nullcontext()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not supported with Adasum.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accepted for compatibility; ``step()`` always uses the gradients so far."""
        self._passes_per_step = passes

    @step_clock.update()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take this rank's step, and apply the Adasum combination of all ranks' deltas.

        If the combination fails, the parameters are as before the step, but the state of the wrapped optimizer
        (momenta, number of steps) has advanced.

        Raises:
            HorovodInternalError: the ranks disagree, for instance in what is frozen, or the job has ended.
            NotImplementedError: the number of ranks is no longer a power of two.
        """
        check_adasum(global_process_set)
        self.mark_stepped()
        self._names = named_now(self, self._names)  # the parameters may have changed since the last step
        parameters = [p for p in self._names if p.requires_grad]
        with torch.no_grad():
            starts = [parameter.detach().clone() for parameter in parameters]
        loss = self._own_step(closure, kwargs)
        with torch.no_grad():
            deltas = [parameter.detach() - start for parameter, start in zip(parameters, starts, strict=True)]
            try:
                combined = self._combined(parameters, deltas)
            except BaseException:  # raised again; the program may continue, with equal weights
                for parameter, start in zip(parameters, starts, strict=True):
                    parameter.copy_(start)
                raise
            for parameter, start, delta in zip(parameters, starts, combined, strict=True):
                parameter.copy_(start.add_(delta))
        return loss

    # torch wraps step() of every optimizer class once, to run the step hooks; the wrapped class's step() has that.
    step.hooked = True  # type: ignore[attr-defined]
    # A scheduler need not wrap it either: it sets the attribute that schedulers check itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (*self.plain(), self._names, self._compression, self._passes_per_step)

    def _own_step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        arguments = [] if closure is None else [closure]
        # GradScaler sets both during its step: the factor of the gradients (None once they are unscaled), and whether
        # they have overflowed.
        scale, overflows = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if not self._scales_itself and overflows is not None:
            if overflows.item():
                return None  # this rank contributes zeros
            if scale is not None:
                gradients = [parameter.grad for parameter in self._names if parameter.grad is not None]
                torch._foreach_div_(gradients, scale.item())
            self.grad_scale = self.found_inf = None  # the wrapped optimizer does not know them; GradScaler deletes them
        return super().step(*arguments, **kwargs)

    def _combined(self, parameters: list[torch.Tensor], deltas: list[torch.Tensor]) -> list[torch.Tensor]:
        packed = {
            parameter: wire.pack(delta, self._compression, delta.device)
            for parameter, delta in zip(parameters, deltas, strict=True)
        }
        handles = []
        for bucket in self._buckets():
            names = [self._names[parameter] for parameter in bucket if parameter in packed]
            handles.append(
                submit(
                    Kind.ALLREDUCE,
                    # An empty request if all are frozen: other ranks may not have frozen them, and would wait.
                    [packed[parameter].tensor for parameter in bucket if parameter in packed]
                    or [torch.empty(0, device="cpu")],
                    process_set=global_process_set,
                    name=f"DistributedDelta.{self._names[bucket[0]]}",
                    in_place=True,
                    op=ReduceOp.ADASUM,
                    identity=fingerprint(names) if len(names) < len(bucket) else -1,
                    prepare=checked,
                    finish=lambda _: None,
                    labels=[f"allreduce.{name}" for name in names],
                )
            )
        wait_all(handles)
        return [wire.unpack(packed[parameter], self._compression) for parameter in parameters]

    def _buckets(self) -> list[list[torch.Tensor]]:
        """Which parameters share a request: equal on all ranks, whatever is frozen."""
        parameters = sorted(
            (p for p in self._names if p.is_floating_point() or p.is_complex()), key=self._names.__getitem__
        )
        buckets = plan_buckets(
            range(len(parameters)),
            [parameter.numel() * parameter.element_size() for parameter in parameters],
            [(parameter.dtype, parameter.device) for parameter in parameters],
            [],
            Settings.from_env().fusion_threshold_bytes,
        )
        return [[parameters[number] for number in bucket] for bucket in buckets]


def _rebuilt(
    plain_class: type[torch.optim.Optimizer],
    state: dict[str, Any],
    names: dict[torch.Tensor, str],
    compression: type[Compressor],
    passes_per_step: int,
) -> Any:
    """The copy that :meth:`DeltaOptimizer.__reduce__` describes."""
    return DeltaOptimizer.around(unwrapped(plain_class, state), names, compression, passes_per_step)
