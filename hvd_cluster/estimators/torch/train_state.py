"""What training changes, in a checkpoint: weights, optimizer, scheduler, scaler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.checkpoint import Checkpoint
from hvd_cluster.estimators.spec import TrainSpec
from hvd_cluster.estimators.torch import made_state
from hvd_cluster.estimators.torch.model_pickling import on_cpu
from hvd_cluster.estimators.torch.optimizer_state import holder, rates, scale_initial_rates, set_rates

if TYPE_CHECKING:
    from hvd_cluster.estimators.torch.strategies.shards import Shards


class TrainState:
    """A model, and everything that updates its weights.

    Args:
        model: the model.
        optimizer: of ``torch.optim``, or a ``DistributedOptimizer`` of one.
        scheduler: of ``torch.optim.lr_scheduler``, or None.
        scaler: scales the loss, so that gradients in half precision do not underflow; None if not needed.
        made: the :func:`made_state.contents` of the model as its factory makes it; None without a factory.
        saves_all: the model's state is saved, also the part of it that the factory makes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any = None,
        scaler: Any = None,
        made: Mapping[str, str] | None = None,
        saves_all: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self._made = made
        self._trained_part = None if made is None or saves_all else made_state.TrainedPart(made)

    def model_state(self) -> dict[str, Any]:
        """The part of the model's state that is saved."""
        return self.model.state_dict() if self._trained_part is None else self._trained_part.of(self.model)

    def capture(
        self,
        scale: float,
        given_rates: list[float],
        states: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """The ``state`` of a checkpoint, on the CPU.

        Args:
            scale: by what the learning rates of one worker are multiplied in the optimizer.
            given_rates: the rates that the run's optimizer was given at its beginning.
            states: of the model and of the optimizer, if not all of them.
        """
        scaled = rates(self.optimizer)
        model, state = (self.model_state(), self.optimizer.state_dict()) if states is None else states
        groups = [dict(group) for group in state["param_groups"]]
        for group, rate in zip(groups, scaled, strict=True):
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"] = torch.full_like(group["lr"], rate / scale)
            elif "lr" in group:
                group["lr"] = rate / scale
        part = self._trained_part
        return {
            **({} if part is None else {"made": dict(part.made)}),
            "model": on_cpu(model),
            # With the rates of one worker: another number of workers may resume the run.
            "optimizer": on_cpu({**state, "param_groups": groups}),
            "optimizer_class": type(holder(self.optimizer)).__name__,
            # Exactly the rates that were used, for the same number of workers.
            "scaled_rates": scaled,
            "scale": scale,
            "given_rates": given_rates,
            "scheduler": None if self.scheduler is None else on_cpu(self.scheduler.state_dict()),
            "scaler": None if self.scaler is None else on_cpu(self.scaler.state_dict()),
        }

    def restore(
        self, found: Checkpoint, run_id: str, size: int, scale: float, shards: Shards | None = None, alone: bool = True
    ) -> None:
        """Restore what :meth:`capture` gave, with learning rates for ``size`` workers.

        Args:
            shards: where the tensors of the model and the optimizer are, if they are not in ``found``.
            alone: only this process reads ``shards``.

        Raises:
            DataError: the checkpoint is of another model or optimizer.
        """
        state, optimizer = found.state, self.optimizer
        fresh = [list(one.base_lrs) for one in _with_base_rates(self.scheduler)]
        fresh_initial = [group.get("initial_lr") for group in optimizer.param_groups]
        own = type(holder(optimizer)).__name__  # a DistributedOptimizer has the name of the optimizer that it wraps
        if state["optimizer_class"] != own:  # torch would load it, and fail in the first step
            raise DataError(
                f"run_id={run_id!r} has a checkpoint of the optimizer {state['optimizer_class']}, not {own}: choose "
                "another run_id"
            )
        if self._made is not None:
            made_state.require_same(state, self._made, run_id)
        is_part = self._made is not None and "made" in state
        given = [group.get("lr") for group in optimizer.param_groups]
        try:
            self.load(state["model"], state["optimizer"], shards, alone, is_part)
            for name in ("scheduler", "scaler"):
                if getattr(self, name) is not None and state[name] is not None:
                    getattr(self, name).load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise DataError(
                f"run_id={run_id!r} has a checkpoint of another model or optimizer: choose another run_id ({error})"
            ) from error
        for group, rate in zip(optimizer.param_groups, given, strict=True):
            if isinstance(rate, torch.Tensor):  # on its device
                group["lr"] = rate.fill_(float(group["lr"]))
        if size == found.size:
            set_rates(optimizer, state["scaled_rates"])
            return
        set_rates(optimizer, [rate * scale for rate in rates(optimizer)])
        before = state["scale"]
        for one, made_with in zip(_with_base_rates(self.scheduler), fresh, strict=True):
            if one.base_lrs != made_with:  # equal ones were given to the scheduler, and do not depend on the workers
                one.base_lrs = [rate / before * scale for rate in one.base_lrs]
        for group, initial in zip(optimizer.param_groups, fresh_initial, strict=True):
            if "initial_lr" in group and group["initial_lr"] != initial:
                group["initial_lr"] = group["initial_lr"] / before * scale

    def load(
        self,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None,
        shards: Shards | None,
        alone: bool = True,
        is_part: bool = False,
    ) -> None:
        """Load the states of the model and optimizer, or what ``shards`` lacks of them.

        Args:
            is_part: ``shards`` may lack what the factory makes, even if this object saves all.

        Raises:
            RuntimeError: they are of another model.
            ValueError: they are of another optimizer.
        """
        if shards is not None:
            from hvd_cluster.estimators.torch.strategies import parts

            is_whole = self._trained_part is None and not is_part
            parts.load_model(self.model, shards, model, is_whole=is_whole, alone=alone)
            if self.optimizer is not None and optimizer is not None:
                parts.load_optimizer(self.optimizer, shards, optimizer, alone=alone)
            return
        if self._trained_part is None:
            self.model.load_state_dict(model)
        else:
            made_state.load(self.model, model)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(optimizer)


def unscaled_optimizer(state: Any) -> dict[str, Any]:
    """The optimizer of a checkpoint's ``state`` for another fit.

    That fit scales what schedulers begin from again.
    """
    groups = [dict(group) for group in state["optimizer"]["param_groups"]]
    scale_initial_rates(groups, 1 / state["scale"])
    return {**state["optimizer"], "param_groups": groups}


def kept_text(found: Checkpoint, spec: TrainSpec, size: int) -> str:
    """Which learning rate ``size`` workers continue with.

    It is empty unless the fit was given another.
    """
    then, now, scale = found.state["given_rates"], spec.optimizer.given_rates, found.state["scale"]
    if found.is_over(spec):
        return ""
    if found.size == size and scale != (size if spec.scale_lr else 1.0):
        return (
            f"run {spec.run_id!r} continues with learning rates {scale:g} times those of one worker, as it began: "
            f"scale_lr={spec.scale_lr} has no effect, choose another run_id to train with it"
        )
    if then == now:
        return ""
    began, given = (", ".join(f"{rate:g}" for rate in each) for each in (then, now))
    return (
        f"run {spec.run_id!r} continues with the learning rate that it began with, {began}: the optimizer's lr={given} "
        "has no effect, choose another run_id to train with it"
    )


def _with_base_rates(scheduler: Any) -> list[Any]:
    """A scheduler and its parts that begin from the optimizer's rates; [] for None."""
    found = [scheduler] if hasattr(scheduler, "base_lrs") else []
    return [*found, *(one for child in getattr(scheduler, "_schedulers", ()) for one in _with_base_rates(child))]
