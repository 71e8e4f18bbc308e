"""How scoring loads and calls PyTorch models."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_cluster.estimators.scoring.scorer import Framework
from hvd_cluster.estimators.spec import Features, called
from hvd_cluster.estimators.torch.arguments import with_arguments
from hvd_cluster.estimators.torch.objective import as_outputs


def predict(
    model: torch.nn.Module,
    features: Features,
    output_fn: Callable[[Any], Any] | None = None,
    order: Sequence[str] = (),
) -> list[torch.Tensor]:
    """The outputs of ``model`` as a list, without gradients.

    They are in ``order`` if it has their names.
    """
    with torch.no_grad():
        return as_outputs(called(model, features), output_fn, order)


@dataclass
class _Evaluated:
    """A module that threads hold in evaluation mode."""

    was_training: bool
    num_users: int = 0


_lock = threading.Lock()
#: By the id of the module, which lives as long as its users.
_evaluated: dict[int, _Evaluated] = {}


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Keep the model in evaluation mode in the block.

    The last of the threads that score with a module restores its mode.
    """
    modules = list(model.modules())
    with _lock:
        for module in modules:
            _evaluated.setdefault(id(module), _Evaluated(module.training)).num_users += 1
    try:
        model.eval()
        yield
    finally:
        with _lock:
            for module in modules:
                found = _evaluated[id(module)]
                found.num_users -= 1
                if not found.num_users:
                    del _evaluated[id(module)]
                    module.training = found.was_training or module.training


TORCH = Framework(predict=predict, mode=evaluating, with_arguments=with_arguments)


def load(folder: str) -> torch.nn.Module:
    """The model in the folder of an MLflow model, on the CPU."""
    import mlflow.pytorch

    # It is the user's own model, and so is any code in it.
    model: torch.nn.Module = mlflow.pytorch.load_model(folder, map_location="cpu", weights_only=False)
    return model
