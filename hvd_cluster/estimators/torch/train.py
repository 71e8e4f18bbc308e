"""Training, as one worker does it: knows tensors and collectives, and nothing of Spark or of launching."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import torch

from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.finite_check import FiniteCheck
from hvd_cluster.estimators.run.readers import Readers
from hvd_cluster.estimators.run.reports import Reports
from hvd_cluster.estimators.run.scalars import scalar_log
from hvd_cluster.estimators.run.schedule import is_due_within, steps_of_rows
from hvd_cluster.estimators.run.world import Collectives, choose_device, initialized
from hvd_cluster.estimators.spec import TrainResult, TrainSpec
from hvd_cluster.estimators.torch import random_state
from hvd_cluster.estimators.torch.checkpoint import Checkpoint, Running
from hvd_cluster.estimators.torch.checkpointing import Checkpointing, share_buffers
from hvd_cluster.estimators.torch.class_weights import ClassWeights
from hvd_cluster.estimators.torch.cpu_copies import on_cpu
from hvd_cluster.estimators.torch.means import Means
from hvd_cluster.estimators.torch.model_pickling import copied
from hvd_cluster.estimators.torch.objective import Objective
from hvd_cluster.estimators.torch.optimizer_state import rates, scale_initial_rates, set_rates
from hvd_cluster.estimators.torch.steps import Steps
from hvd_cluster.estimators.torch.worker import Worker

logger = logging.getLogger(__name__)


def train(spec: TrainSpec) -> TrainResult:
    """Train ``spec.model`` on this worker's shard, together with the other workers of the job.

    Where the run has a checkpoint, go on after its last epoch: the weights at the end are those of an undisturbed run.

    Raises:
        RuntimeError: some ranks have a GPU and some have none.
        DataError: the run's checkpoint is of another model or of other data, or it cannot be written; or the loss is
            not finite and ``terminate_on_nan`` is set.
        HorovodInternalError: another worker has died.
    """
    with initialized(spec) as hvd:
        return _train(spec, hvd)


def _train(spec: TrainSpec, hvd: Collectives) -> TrainResult:
    from hvd_cluster.torch import Compression, DistributedOptimizer

    device = choose_device(spec.use_gpu, hvd)
    model = copied(spec.model).to(device)  # a backend may run us in the process that made the spec
    base = spec.optimizer.build(model)
    scale = float(hvd.size()) if spec.scale_lr else 1.0
    _start_equal(model, base, scale)
    held = {id(parameter) for group in base.param_groups for parameter in group["params"]}
    optimizer = DistributedOptimizer(
        base,
        named_parameters=[(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in held],
        compression=spec.gradient_compression or Compression.none,
        backward_passes_per_step=spec.backward_passes_per_step,
    )
    steps = Steps.of(spec, hvd, device, model, optimizer, _objective(spec, device))
    saving = Checkpointing(spec, hvd, steps, scale, Fingerprint.of(spec.dataset, spec.inputs))
    found = saving.load()
    if found is not None:
        found.restore(spec.run_id, model, optimizer, hvd.size(), scale, scheduler=steps.scheduler, scaler=steps.scaler)
        logger.info("run %s goes on after epoch %d", spec.run_id, found.epochs)
    reports = Reports(spec, hvd.rank())
    with Readers.of(spec, hvd.rank(), hvd.size()) as readers:
        losses = FiniteCheck(spec.terminate_on_nan, hvd, spec.run_id, has_scaler=steps.scaler is not None)
        worker = Worker(spec, hvd, device, steps, readers, reports, losses, ClassWeights.of(spec, hvd))
        history = _epochs(worker, saving, found)
    state = b""
    if hvd.rank() == 0:
        state = _pack(saving.to_return(history))
    hvd.barrier()
    return TrainResult(rank=hvd.rank(), size=hvd.size(), state=state, history=history)


def _epochs(worker: Worker, saving: Checkpointing, found: Checkpoint | None) -> list[dict[str, Any]]:
    """Train until the last epoch, or until the spec's early stopping ends it; returns the history."""
    spec, hvd, steps = worker.spec, worker.hvd, worker.steps
    history = found.history if found is not None else []
    running = found.running if found is not None else None
    with scalar_log(spec) if hvd.rank() == 0 else contextlib.nullcontext() as log:
        while len(history) < spec.epochs and not _is_over(spec, history):
            epoch = len(history)
            random_state.seed_all(spec.seed, epoch, hvd.rank())
            done, sums = (0, None) if running is None else _take_up(running, spec, hvd)
            running = None

            def after_step(done: int, means: Means, epoch: int = epoch) -> None:
                if is_due_within(spec, done, worker.readers.train_steps):
                    worker.losses.check(epoch, worker.has_finite_weights)
                    saving.save_within(history, done, means)

            record = {"epoch": epoch, **worker.train_epoch(epoch, done, sums, after_step)}
            share_buffers(steps.model)
            if spec.validation_is_there:
                record["validation"] = worker.validate_epoch()
            if spec.lr_scheduler_interval == "epoch":
                steps.move_rates(record.get("validation", record["train"])["loss"])
            history.append(record)
            saving.save_epoch(history, len(history) == spec.epochs or _is_over(spec, history))
            worker.reports.epoch(record)
            if log is not None:
                log(record)
            for callback in spec.callbacks:
                callback(record, steps.model)
    return history


def _is_over(spec: TrainSpec, history: list[dict[str, Any]]) -> bool:
    return bool(history) and spec.early_stopping is not None and spec.early_stopping.is_over(history)


def _take_up(running: Running, spec: TrainSpec, hvd: Collectives) -> tuple[int, torch.Tensor | None]:
    """Steps that the epoch has made already, and this rank's sums; its random generators go on where they were.

    With other metrics now, the means of the epoch are those of its rest. Another number of ranks draws other random
    numbers, and may go through the rest in another order: see :func:`steps_of_rows`. Where it trains on some rows
    again, the sums are scaled to the rows that it does not, so that the means weigh as many rows as the epoch has.
    """
    done = steps_of_rows(spec, running.rows, hvd.size())
    if len(running.sums) == hvd.size():
        random_state.restore(running.random[hvd.rank()])
        return done, running.sums[hvd.rank()]
    kept = done * spec.batch_size * hvd.size() / running.rows
    return done, running.sums.sum(dim=0) * kept if hvd.rank() == 0 else None


def _objective(spec: TrainSpec, device: torch.device) -> Objective:
    """The objective; its modules, and those among the metrics, come to the device of the model."""
    objective = spec.objective()
    for one in (*objective.losses, *(metric for group in spec.metrics for metric in group)):
        if isinstance(one, torch.nn.Module):
            one.to(device)
    return objective


def _start_equal(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Bring all ranks to the same weights and optimizer state, and to the rates of all workers together."""
    from hvd_cluster.torch import broadcast_optimizer_state, broadcast_parameters

    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    broadcast_parameters(tensors, root_rank=0)
    if optimizer.state:  # it came with the optimizer that was given; an empty one is equal on all ranks
        broadcast_optimizer_state(optimizer, root_rank=0)
    set_rates(optimizer, [rate * scale for rate in rates(optimizer)])
    scale_initial_rates(optimizer.param_groups, scale)


def _pack(checkpoint: Checkpoint) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": on_cpu(checkpoint.model), "optimizer": checkpoint.unscaled_optimizer()}, buffer)
    return buffer.getvalue()
