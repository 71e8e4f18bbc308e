"""The module that a rank begins with, and its weights."""

from __future__ import annotations

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch.made_state import equal_names
from hvd_cluster.estimators.torch.model_pickling import copied
from hvd_cluster.estimators.torch.model_source import ModelSource


def initial_model(
    given: torch.nn.Module | ModelSource, hvd: Collectives, empty: torch.nn.Module | None = None
) -> torch.nn.Module:
    """A copy of a module, or what a factory makes here; every rank takes part.

    Args:
        empty: returned instead on all ranks but the first.

    Raises:
        DataError: on some rank the factory makes another model than in the driver; the text names the rank and the
            first tensor that differs.
    """
    if not isinstance(given, ModelSource):
        return copied(given)  # a backend may run us in the process that made it
    model = given.build() if empty is None or hvd.rank() == 0 else empty
    difference = "" if model is empty else given.difference(model)
    differences = hvd.allgather_object(difference, name="hvd_cluster.made")
    for rank, text in enumerate(differences):
        if text:
            raise DataError(f"rank {rank}: {given.refusal(text)}")
    return model


def share_weights(model: torch.nn.Module, given: torch.nn.Module | ModelSource) -> None:
    """Give all ranks rank 0's weights, except those that a factory makes equal."""
    from hvd_cluster.torch import broadcast_parameters

    equal = equal_names(given.made) if isinstance(given, ModelSource) else set[str]()
    state = model.state_dict().items()
    tensors = {name: value for name, value in state if isinstance(value, torch.Tensor) and name not in equal}
    broadcast_parameters(tensors, root_rank=0)
