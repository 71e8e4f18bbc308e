"""How scoring loads and calls PyTorch models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
    """The outputs of ``model`` as a list, without gradients; in this order, if these are their names."""
    with torch.no_grad():
        return as_outputs(called(model, features), output_fn, order)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode; the modes of its modules are restored at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


TORCH = Framework(predict=predict, mode=evaluating, with_arguments=with_arguments)


def load(folder: str) -> torch.nn.Module:
    """The model in the folder of an MLflow model, on the CPU."""
    import mlflow.pytorch

    # It is the user's own model, and so is any code in it.
    model: torch.nn.Module = mlflow.pytorch.load_model(folder, map_location="cpu", weights_only=False)
    return model
