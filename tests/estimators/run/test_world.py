"""What training code uses of ``hvd_cluster.torch``."""

from __future__ import annotations

import inspect

import hvd_cluster.torch as hvd
from hvd_cluster.estimators.run.world import Collectives


def test_the_torch_api_has_all_that_training_code_uses() -> None:
    methods = {name: value for name, value in vars(Collectives).items() if not name.startswith("_") and callable(value)}
    assert {"rank", "allreduce", "broadcast_object"} <= methods.keys()
    for name, method in methods.items():
        used = inspect.signature(method).parameters.keys() - {"self"}
        assert used <= inspect.signature(getattr(hvd, name)).parameters.keys(), name
    assert all(hasattr(hvd, name) for name in Collectives.__annotations__)
