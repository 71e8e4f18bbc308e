"""Optimizers that train apart in rounds, by torch's ``model_averaging``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch.strategies.communication import DiLoCo, LocalSGD
from hvd_cluster.estimators.torch.strategies.parts import SHARED_NAME
from hvd_cluster.estimators.torch.strategies.strategy import Exchange, ReadyGradients, Replicated
from hvd_cluster.monitor.step_clock import step_clock
from hvd_cluster.torch.wrapper import wrap


class InRounds(Replicated):
    """The strategy of workers that each train the whole model apart.

    The parameters become equal at the end of a round.
    """

    def _distributed(self, base: torch.optim.Optimizer, model: torch.nn.Module, hvd: Collectives) -> Any:
        return rounds_of(self._spec.communication, base, hvd.rank())

    def equalize(self, optimizer: Any) -> None:
        optimizer.exchange.end()


class Rounds(PeriodicModelAverager, Exchange):
    """Averages the parameters of all ranks at the end of each round.

    Args:
        every: steps of a round.
        parameters: equal on all ranks. Those that require a gradient take part; a fit may freeze and unfreeze them.
    """

    def __init__(self, every: int, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(period=every, warmup_steps=every - 1)  # the first mean after that many steps
        self._parameters: list[Any] = list(parameters)
        #: The positions of those that steps of this round have trained.
        self._trained: set[int] = set()

    def begin_step(self) -> None:
        """A step begins: note what it trains."""
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._trained:
                self._trained.add(index)
                self._begin_round(index)

    def _begin_round(self, index: int) -> None:
        """Prepare for the first training of the parameter at ``index`` in this round."""

    def average_parameters(self, params: Any = None) -> None:
        """End the round if this was its last step."""
        self.step += 1
        if self.step == self.period:
            self.end()

    def end(self) -> None:
        """End the round now; every rank takes part."""
        if self.step:
            self.step = 0
            self._exchange(sorted(self._trained))
            self._trained.clear()

    def _exchange(self, trained: Sequence[int]) -> None:
        if trained:
            average_parameters(iter([self._parameters[index] for index in trained]), self.process_group)


class OuterRounds(Rounds):
    """Takes a step of an outer optimizer at the end of each round."""

    def __init__(self, config: DiLoCo, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(config.every, parameters)
        #: The parameters when the round began; empty for those that are not trained.
        self._outer = [parameter.detach().new_empty(0) for parameter in self._parameters]
        self._optimizer = torch.optim.SGD(
            self._outer, config.outer_lr, momentum=config.outer_momentum, nesterov=config.outer_momentum > 0
        )

    def _begin_round(self, index: int) -> None:
        self._outer[index].data = self._parameters[index].detach().clone()

    def _exchange(self, trained: Sequence[int]) -> None:
        super()._exchange(trained)
        pairs = [(self._outer[index], self._parameters[index]) for index in trained]
        with torch.no_grad():
            for outer, parameter in pairs:
                outer.grad = outer - parameter
            with step_clock.update(ends_step=False):
                self._optimizer.step()
            for outer, parameter in pairs:
                outer.grad = None
                parameter.copy_(outer)
        for index in set(range(len(self._outer))).difference(trained):  # they were frozen
            self._outer[index].data = self._outer[index].new_empty(0)
            self._optimizer.state.pop(self._outer[index], None)

    def state(self) -> dict[str, torch.Tensor]:
        entries = self._optimizer.state_dict()["state"].items()
        return {str(index): entry["momentum_buffer"] for index, entry in entries if "momentum_buffer" in entry}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        entries = {int(index): {"momentum_buffer": buffer} for index, buffer in state.items()}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": entries})


class TrainsApart(ReadyGradients):
    """The methods of an optimizer whose steps use the gradients of this rank only."""

    exchange: Rounds
    #: The name of its state in a checkpoint; see :mod:`.parts`.
    state_name: str

    @step_clock.update()
    def step(self, closure: Any = None) -> Any:
        self.exchange.begin_step()
        loss = super().step(closure)
        self.exchange.average_parameters()
        self.mark_stepped()
        return loss

    # A scheduler that was made for the original must not warn about another step().
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def rounds_of(config: LocalSGD | DiLoCo, base: torch.optim.Optimizer, rank: int) -> Any:
    """The optimizer ``base`` of this rank, which trains in rounds."""
    parameters = [one for group in base.param_groups for one in group["params"]]
    optimizer = wrap(base, TrainsApart)
    optimizer.state_name = f"{SHARED_NAME}-{rank}" if rank else SHARED_NAME
    if isinstance(config, DiLoCo):
        optimizer.exchange = OuterRounds(config, parameters)
    else:
        optimizer.exchange = Rounds(config.every, parameters)
    return optimizer
