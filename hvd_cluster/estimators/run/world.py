"""The world of a fit: what it uses of ``hvd_cluster.torch``, and a rank's device."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from hvd_cluster.settings import Settings
from hvd_cluster.topology import export

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec


class Collectives(Protocol):
    """The part of ``hvd_cluster.torch`` that training code is given."""

    Average: Any
    Max: Any
    Sum: Any

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def local_rank(self) -> int: ...
    def barrier(self) -> None: ...
    def allreduce(self, tensor: torch.Tensor, *, name: str, op: Any) -> torch.Tensor: ...
    def allgather(self, tensor: torch.Tensor, *, name: str) -> torch.Tensor: ...
    def allgather_object(self, obj: Any, *, name: str) -> list[Any]: ...
    def broadcast(self, tensor: torch.Tensor, *, root_rank: int, name: str) -> torch.Tensor: ...
    def broadcast_object(self, obj: Any, *, root_rank: int = 0, name: str) -> Any: ...


@contextlib.contextmanager
def initialized(spec: FitSpec) -> Iterator[Collectives]:
    """``hvd_cluster.torch`` after ``init()``.

    It is shut down at the end unless it was initialised before.
    """
    import hvd_cluster.torch as hvd

    if spec.mp_start_method is not None:
        multiprocessing.set_start_method(spec.mp_start_method, force=True)
    was_initialized = hvd.is_initialized()
    with reporting_steps():
        hvd.init()
    has_group = spec.torch_backend is not None and hvd.distributed.begin(spec.torch_backend)
    try:
        yield cast("Collectives", hvd)  # mypy does not follow `__all__ += ops.__all__`
    finally:
        if has_group:
            hvd.distributed.end()
        if not was_initialized:
            hvd.shutdown()


@contextlib.contextmanager
def reporting_steps() -> Iterator[None]:
    """Let ``init()`` report ranks' steps to rank 0 unless ``HOROVOD_MONITOR`` is set."""
    before = {} if "monitor" in Settings.given() else export({"HOROVOD_REPORT_STEPS": "1"})
    try:
        yield
    finally:
        export(before)


def choose_device(use_gpu: bool, hvd: Collectives) -> torch.device:
    """The GPU at this rank's local_rank, or the CPU; the same kind on all ranks.

    Raises:
        RuntimeError: the ranks differ, or a rank would have to share a GPU; on every rank, with all their devices.
    """
    local_rank = hvd.local_rank()
    count = torch.cuda.device_count() if use_gpu and torch.cuda.is_available() else 0
    mine = "cpu" if count == 0 else "cuda" if local_rank < count else "none left"
    kinds = hvd.allgather_object(mine, name="hvd_cluster.devices")
    if len(set(kinds)) > 1:
        listed = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise RuntimeError(
            f"All ranks don't have same device type! ({listed}) Each worker needs a GPU of its own: "
            "give the job as many GPUs as workers, lower num_proc, or set use_gpu=False."
        )
    if mine == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
