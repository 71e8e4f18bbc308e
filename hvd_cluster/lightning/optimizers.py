"""Replaces a LightningModule's optimizers by distributed ones in a fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import hvd_cluster.torch as hvd

#: More backward passes than any step has.
_NEVER = 2**62
#: The learning rates in param groups; ``OneCycleLR`` keeps its bounds there too.
_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
#: The attributes of torch's schedulers that are learning rates.
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "_last_lr")


def distribute(
    optimizers: Sequence[Any], schedulers: Iterable[Any], module: torch.nn.Module, options: Mapping[str, Any]
) -> tuple[list[Any], list[Any]]:
    """A distributed optimizer for each optimizer, and those that reduce gradients.

    The schedulers are moved to the distributed optimizers. As with DDP, the gradient of a parameter that several
    optimizers have is reduced once: the first of them reduces it. The others take their steps as they are; what only
    they have is reduced by an optimizer that takes no steps. With Adasum they reduce their steps, not gradients.

    Args:
        optimizers: the optimizers of ``configure_optimizers``; one that is already distributed, or has nothing to
            train, is returned unchanged.
        schedulers: learning rate schedulers.
        module: the ranks match gradients by the names of its parameters.
        options: further arguments of ``hvd.DistributedOptimizer``.

    Raises:
        ValueError: an optimizer is not a ``torch.optim.Optimizer``.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    stepping, reducing, taken = [], [], set[torch.Tensor]()
    for optimizer in optimizers:
        held = _parameters(optimizer)
        if taken.isdisjoint(held) or _is_distributed(optimizer) or options.get("op") == hvd.Adasum:
            distributed = _replaced(optimizer, schedulers, names, options)
            stepping.append(distributed)
            reducing.append(distributed)
        else:
            stepping.append(optimizer)
            if rest := [parameter for parameter in held if parameter not in taken]:
                reducing.append(_replaced(torch.optim.SGD(rest, lr=0.0), (), names, options))
        taken.update(held)
    return stepping, reducing


def restore(optimizers: Sequence[Any], originals: Sequence[Any], schedulers: Iterable[Any]) -> list[Any]:
    """The optimizers that :func:`distribute` replaced, with their current state.

    Moves the schedulers back.
    """
    for optimizer, original in zip(optimizers, originals, strict=True):
        move_schedulers(schedulers, optimizer, original)
    return list(originals)


@contextmanager
def no_reduction(optimizers: Sequence[Any]) -> Iterator[None]:
    """Inside, the gradients of backward passes are accumulated on this rank only."""
    waiting = [optimizer for optimizer in optimizers if _is_distributed(optimizer)]
    for optimizer in waiting:
        optimizer.set_backward_passes_per_step(_NEVER)
    try:
        yield
    finally:
        for optimizer in waiting:
            optimizer.set_backward_passes_per_step(1)


@contextmanager
def backward_pass(optimizers: Sequence[Any]) -> Iterator[None]:
    """A context for a backward pass, whose end reduces its gradients.

    They are added to those that were reduced before.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if _is_distributed(optimizer):
                stack.enter_context(optimizer.backward_pass())
        yield


def scale_rates(groups: Iterable[dict[str, Any]], schedulers: Iterable[dict[str, Any]], factor: float) -> None:
    """Multiply learning rates, in place.

    Args:
        groups: param groups of optimizers or of their state dicts.
        schedulers: the attributes of learning rate schedulers, or their state dicts.
        factor: the factor.
    """
    for group in groups:
        group.update({name: group[name] * factor for name in _GROUP_RATES if group.get(name) is not None})
    for state in schedulers:
        state.update(
            {name: [rate * factor for rate in state[name]] for name in _SCHEDULER_RATES if state.get(name) is not None}
        )
        inner = [one if isinstance(one, dict) else vars(one) for one in state.get("_schedulers", ())]
        scale_rates((), inner, factor)


def share_state(optimizers: Iterable[Any]) -> None:
    """Broadcast the state and the options of rank 0's optimizers to all ranks."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, torch.optim.LBFGS):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"configure_optimizers() returned a {type(optimizer).__name__}, but HorovodStrategy requires a "
            "torch.optim.Optimizer"
        )
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _replaced(
    optimizer: Any, schedulers: Iterable[Any], names: Mapping[torch.Tensor, str], options: Mapping[str, Any]
) -> Any:
    held = _parameters(optimizer)
    if _is_distributed(optimizer) or not any(parameter.requires_grad or parameter in names for parameter in held):
        return optimizer
    # If the module lacks a parameter, ranks match gradients by positions in the optimizer.
    named = [(names[parameter], parameter) for parameter in held] if all(p in names for p in held) else None
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)
    move_schedulers(schedulers, optimizer, distributed)
    return distributed


def move_schedulers(schedulers: Iterable[Any], before: Any, after: Any) -> None:
    """Let the schedulers of one optimizer change another.

    It has the same param groups.
    """
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", None) is before:
            scheduler.optimizer = after


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "set_backward_passes_per_step")
