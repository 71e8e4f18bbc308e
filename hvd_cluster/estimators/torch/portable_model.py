"""Models for other processes, without our layers or what a factory makes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import cloudpickle
import torch

from hvd_cluster.estimators.run.checkpoint import packed, unpacked
from hvd_cluster.estimators.torch import made_state, model_pickling
from hvd_cluster.estimators.torch.model_pickling import copied, make_picklable
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.estimators.torch.optimizer_state import OptimizerState


def without_our_layers(model: torch.nn.Module) -> torch.nn.Module:
    """The model, or a copy with torch's SyncBatchNorm in place of ours.

    Loading the copy does not need this package. In evaluation it does the same; unlike ``BatchNorm1d`` and others it
    takes inputs of any number of dimensions.
    """
    from hvd_cluster.torch.sync_batch_norm import SyncBatchNorm

    if not any(type(layer) is SyncBatchNorm for layer in model.modules()):
        return model
    model = copied(model)
    ours = [layer for layer in model.modules() if type(layer) is SyncBatchNorm]
    replaced: dict[torch.nn.Module | None, torch.nn.Module] = {}
    for layer in ours:
        replaced[layer] = plain = torch.nn.SyncBatchNorm.__new__(torch.nn.SyncBatchNorm)
        vars(plain).update(vars(layer), process_group=None)
        del vars(plain)["_process_set"]
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # a layer may have several names
            parent._modules[name] = replaced.get(child, child)
    return replaced.get(model, model)


def optional_imports(pickles: ModuleType) -> ModuleType:
    """A module for ``torch.save`` whose pickles load where this package is absent.

    They load even if a class or function names this package.

    Args:
        pickles: the module with cloudpickle's Pickler.
    """

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType) and obj.__name__.partition(".")[0] == "hvd_cluster":
                return model_pickling.imported_if_present, (obj.__name__,)
            return super().reducer_override(obj)

    found = ModuleType(pickles.__name__)  # by which MLflow finds what loads it
    vars(found).update({**vars(pickles), "Pickler": Pickler})
    return found


class PortableModule:
    """Pickles as a factory and the state it does not make, unpickles as the module.

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
    """Pickles as options and state, and unpickles as the optimizer of its module.

    The module is pickled with it.
    """

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
