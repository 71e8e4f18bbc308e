"""Two ranks on the first GPU: one host, whose GPU tensors go through its memory, or two hosts, which NCCL connects.

NCCL refuses two ranks of one host on one GPU. ``NCCL_HOSTID`` says which host a rank is on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from hvd_cluster.launch.local import Executor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENV = {
    "OMP_NUM_THREADS": "1",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    "HOROVOD_TIMELINE": "DYNAMIC",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # otherwise torch.compile leaves processes behind
}
OnRanks = Callable[..., list[Any]]


def use_gpu(transport: str) -> None:
    """To be called in a worker before ``init()``."""
    import torch

    if transport == "nccl":
        os.environ["NCCL_HOSTID"] = str(os.getpid())
    torch.cuda.set_device(0)


def _call(fn: Callable[..., Any], transport: str, args: tuple[Any, ...]) -> Any:
    import hvd_cluster.torch as hvd

    use_gpu(transport)
    hvd.init()
    return fn(hvd, *args)


@pytest.fixture(params=["shm", "nccl"])
def transport(request: pytest.FixtureRequest) -> str:
    """What connects the GPU tensors of two ranks."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", params=["shm", "nccl"])
def pair(request: pytest.FixtureRequest) -> Iterator[OnRanks]:
    """Call ``pair(fn, *args)``: runs ``fn(hvd, *args)`` on two ranks of one GPU; returns the results."""
    with Executor(2, env=ENV) as executor:

        def on_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
            return executor.run(_call, (fn, request.param, args))

        on_ranks.transport = request.param  # type: ignore[attr-defined]
        yield on_ranks
