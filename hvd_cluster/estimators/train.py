"""Training, as one worker does it: knows tensors and collectives, and nothing of Spark or of launching."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import multiprocessing
from typing import Any

import torch

from hvd_cluster.estimators.checkpoint import Checkpoint, on_cpu
from hvd_cluster.estimators.fingerprint import Fingerprint
from hvd_cluster.estimators.optimizer_state import rates, set_rates
from hvd_cluster.estimators.readers import Readers
from hvd_cluster.estimators.scalars import scalar_log
from hvd_cluster.estimators.spec import TrainResult, TrainSpec
from hvd_cluster.estimators.worker import Worker

logger = logging.getLogger(__name__)


def train(spec: TrainSpec) -> TrainResult:
    """Train ``spec.model`` on this worker's shard, together with the other workers of the job.

    Where the run has a checkpoint, go on after its last epoch: the weights at the end are those of an undisturbed run.

    Raises:
        RuntimeError: some ranks have a GPU and some have none.
        DataError: the run's checkpoint is of another model or of other data, or it cannot be written.
        HorovodInternalError: another worker has died.
    """
    import hvd_cluster.torch as hvd

    if spec.mp_start_method is not None:
        multiprocessing.set_start_method(spec.mp_start_method, force=True)
    mine = not hvd.is_initialized()
    hvd.init()
    try:
        return _train(spec, hvd)
    finally:
        if mine:
            hvd.shutdown()


def _train(spec: TrainSpec, hvd: Any) -> TrainResult:
    device = choose_device(spec.use_gpu, hvd)
    model = copy.deepcopy(spec.model).to(device)  # a backend may run us in the process that made the spec
    base = spec.optimizer.build(model)
    scale = float(hvd.size()) if spec.scale_lr else 1.0
    trained_on = Fingerprint.of(spec.dataset, spec.inputs)
    history = _start(spec, hvd, model, base, scale, trained_on)
    held = {id(parameter) for group in base.param_groups for parameter in group["params"]}
    optimizer = hvd.DistributedOptimizer(
        base,
        named_parameters=[(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in held],
        compression=spec.gradient_compression or hvd.Compression.none,
        backward_passes_per_step=spec.backward_passes_per_step,
    )
    objective = spec.objective()
    for loss in objective.losses:
        if isinstance(loss, torch.nn.Module):
            loss.to(device)
    worker = Worker(spec, hvd, device, model, optimizer, objective, Readers(spec, hvd.rank(), hvd.size()))
    with scalar_log(spec) if hvd.rank() == 0 else contextlib.nullcontext() as log:
        for epoch in range(len(history), spec.epochs):
            seed_all(spec.seed, epoch, hvd.rank())
            record = {"epoch": epoch, **worker.train_epoch(epoch)}
            _share_buffers(hvd, model)
            if spec.dataset.validation is not None:
                record["validation"] = worker.validate_epoch()
            history.append(record)
            if hvd.rank() == 0:
                checkpoint = Checkpoint.of(model, optimizer, hvd.size(), scale, history, trained_on)
                checkpoint.save(spec.store, spec.run_id)
            if log is not None:
                log(record)
            for callback in spec.callbacks:
                callback(record, model)
    state = b""
    if hvd.rank() == 0:
        state = _pack(Checkpoint.of(model, optimizer, hvd.size(), scale, history))
    hvd.barrier()
    return TrainResult(rank=hvd.rank(), size=hvd.size(), state=state, history=history)


def choose_device(use_gpu: bool, hvd: Any) -> torch.device:
    """The device of this rank: the GPU at its local_rank, or the CPU; the same kind on all ranks.

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


def seed_all(seed: int, epoch: int, rank: int) -> None:
    """Seed torch for one epoch of one rank, so that a resumed run draws what an undisturbed one draws."""
    torch.manual_seed((seed * 1_000_003 + epoch * 10_007 + rank) % 2**63)


def _share_buffers(hvd: Any, model: torch.nn.Module) -> None:
    """Give all ranks the buffers of rank 0, such as running means.

    The model that is saved and returned is rank 0's: so that one is validated, and a resumed run starts as this one
    goes on.
    """
    names = {name for name, _ in model.named_buffers()}
    buffers = {name: value for name, value in model.state_dict().items() if name in names}
    if buffers:
        hvd.broadcast_parameters(buffers, root_rank=0)


def _start(
    spec: TrainSpec,
    hvd: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scale: float,
    trained_on: Fingerprint,
) -> list[dict[str, Any]]:
    """Bring all ranks to the same weights, optimizer state and rates; returns the history so far."""
    found = Checkpoint.load(spec.store, spec.run_id) if hvd.rank() == 0 else None
    blob = hvd.broadcast_object(found.to_bytes() if found is not None else b"", root_rank=0, name="hvd_cluster.resume")
    if blob:
        checkpoint = Checkpoint.from_bytes(blob, f"the checkpoint of run {spec.run_id!r}")
        checkpoint.require_data(spec.run_id, trained_on)
        checkpoint.restore(spec.run_id, model, optimizer, hvd.size(), scale)
        logger.info("run %s goes on after epoch %d", spec.run_id, checkpoint.epochs)
        return checkpoint.history
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    hvd.broadcast_parameters(tensors, root_rank=0)
    if optimizer.state:  # it came with the optimizer that was given; an empty one is equal on all ranks
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    set_rates(optimizer, [rate * scale for rate in rates(optimizer)])
    return []


def _pack(checkpoint: Checkpoint) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": on_cpu(checkpoint.model), "optimizer": checkpoint.optimizer}, buffer)
    return buffer.getvalue()
