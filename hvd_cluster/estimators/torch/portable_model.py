"""The forms in which a model that a factory made, and its optimizer, are pickled: without what the factory makes."""

from __future__ import annotations

from typing import Any

import torch

from hvd_cluster.estimators.run.checkpoint import packed, unpacked
from hvd_cluster.estimators.torch import made_state
from hvd_cluster.estimators.torch.model_pickling import make_picklable
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.estimators.torch.optimizer_state import OptimizerState


class PortableModule:
    """Pickles as a factory and the state that it does not make, and unpickles as the module.

    If the factory no longer makes this module, it is pickled as a whole.
    """

    def __init__(self, source: ModelSource, module: torch.nn.Module) -> None:
        self.source = source
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        state = made_state.trained_part(self.module, self.source.made)
        if state is None:
            make_picklable(self.module)
            return _as_is, (self.module,)
        return _rebuilt, (self.source, packed(state))


class PortableOptimizer:
    """Pickles as its options and state, and unpickles as the optimizer of the module that is pickled with it."""

    def __init__(self, optimizer: torch.optim.Optimizer, owner: PortableModule) -> None:
        self._optimizer = optimizer
        self._owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            state = OptimizerState.of(self._optimizer, self._owner.module)
        except ValueError:  # it has parameters of another module
            return _as_is, (self._optimizer,)
        return OptimizerState.build, (state, self._owner)


def _as_is(value: Any) -> Any:
    return value


def _rebuilt(source: ModelSource, state: bytes) -> torch.nn.Module:
    model = source.built_again()
    made_state.load(model, unpacked(state))
    return model.eval()
