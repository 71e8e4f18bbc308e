"""The module that a rank begins with."""

from __future__ import annotations

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.torch.made_model import MadeModel
from hvd_cluster.estimators.torch.model_pickling import copied


def initial_model(given: torch.nn.Module | MadeModel, hvd: Collectives) -> torch.nn.Module:
    """A copy of a module, or what a factory makes here; every rank takes part.

    Raises:
        DataError: on some rank the factory makes another model than in the driver; the text names the rank and the
            first tensor that differs.
    """
    if not isinstance(given, MadeModel):
        return copied(given)  # a backend may run us in the process that made it
    model = given.build()
    differences = hvd.allgather_object(given.difference(model), name="hvd_cluster.made")
    for rank, text in enumerate(differences):
        if text:
            raise DataError(f"rank {rank}: {given.refusal(text)}")
    return model
