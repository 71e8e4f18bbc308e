"""Training on one worker, with tensors and collectives.

It does not depend on Spark or on a launcher.
"""

from __future__ import annotations

import contextlib

import torch

from hvd_cluster.data.reading.to_device import ToDevice
from hvd_cluster.estimators.run import random_state
from hvd_cluster.estimators.run.finite_check import FiniteCheck
from hvd_cluster.estimators.run.readers import Readers
from hvd_cluster.estimators.run.scalars import scalar_log
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.run.world import Collectives, choose_device, initialized
from hvd_cluster.estimators.spec import TrainResult, TrainSpec
from hvd_cluster.estimators.torch.checkpoint import Checkpointing
from hvd_cluster.estimators.torch.class_weights import ClassWeights
from hvd_cluster.estimators.torch.means import Means, Sums
from hvd_cluster.estimators.torch.objective import Objective
from hvd_cluster.estimators.torch.optimizer_state import scale_rates
from hvd_cluster.estimators.torch.steps import Steps
from hvd_cluster.estimators.torch.strategies.communication import PowerSGD
from hvd_cluster.estimators.torch.strategies.strategy import Replicated, ShardingStrategy
from hvd_cluster.estimators.torch.training_loop import TrainingLoop


def train(spec: TrainSpec) -> TrainResult:
    """Train ``spec.model`` on this worker's shard, together with the other workers.

    A run that has a checkpoint continues from it: the weights at the end are those of an undisturbed run.

    Raises:
        RuntimeError: some ranks have a GPU and some have none.
        DataError: the run's checkpoint is of another model or of other data, or it cannot be written; or a factory
            makes another model here than in the driver; or the loss is not finite and ``terminate_on_nan`` is set.
        HorovodInternalError: another worker has died.
    """
    with initialized(spec) as hvd:
        return _train(spec, hvd)


def _train(spec: TrainSpec, hvd: Collectives) -> TrainResult:
    device = choose_device(spec.use_gpu, hvd)
    scale = float(hvd.size()) if spec.scale_lr else 1.0
    strategy = _strategy(spec)
    model, optimizer = strategy.begin(hvd, device)
    scale_rates(optimizer, scale)
    run = WorkerRun(spec, hvd)
    steps = Steps(run, device, strategy, model, optimizer, _objective(spec, device))
    saving = _checkpointing(spec)(run, steps, scale)
    saving.restore()
    with Readers.of(spec, hvd.rank(), hvd.size()) as readers, ToDevice(device) as to_device:
        run.padding_rows = readers.padding_rows
        has_scaler = steps.scaler is not None
        losses = FiniteCheck(spec.terminate_on_nan, hvd, spec.run_id, has_scaler, readers.not_finite)
        _train_epochs(TrainingLoop(run, steps, readers, to_device, losses, ClassWeights.of(spec, hvd)), saving)
    state = saving.to_return() if hvd.rank() == 0 else b""
    hvd.barrier()
    return TrainResult(rank=hvd.rank(), size=hvd.size(), state=state, history=run.history)


def _strategy(spec: TrainSpec) -> ShardingStrategy:
    """What ``sharding=`` and ``communication=`` choose."""
    if isinstance(spec.communication, PowerSGD):
        from hvd_cluster.estimators.torch.strategies.low_rank import LowRank

        return LowRank(spec)
    if spec.communication != "every_step":
        from hvd_cluster.estimators.torch.strategies.rounds import InRounds

        return InRounds(spec)
    if spec.sharding == "zero1":
        from hvd_cluster.estimators.torch.strategies.zero1 import Zero1

        return Zero1(spec)
    if spec.sharding != "none":
        from hvd_cluster.estimators.torch.strategies.fully_sharded import FullySharded

        return FullySharded(spec)
    return Replicated(spec)


def _checkpointing(spec: TrainSpec) -> type[Checkpointing]:
    if not spec.saves_shards:
        return Checkpointing
    from hvd_cluster.estimators.torch.strategies.checkpointing import ShardedCheckpointing

    return ShardedCheckpointing


def _train_epochs(loop: TrainingLoop, saving: Checkpointing) -> None:
    """Train until the last epoch, or until the spec's early stopping ends the fit."""
    run, steps = loop.run, loop.steps
    spec, hvd = run.spec, run.hvd
    with scalar_log(spec) if hvd.rank() == 0 else contextlib.nullcontext() as log:
        while not run.is_over:
            random_state.seed_all(spec.seed, run.epoch, hvd.rank())
            done, sums = _continued(run)
            first = done + 1

            def after_step(done: int, means: Means, first: int = first) -> None:
                if done == first:
                    saving.check_structure()
                if run.is_checkpoint_due_within(done, loop.readers.train_steps):
                    loop.losses.check(run.epoch, loop.has_finite_weights)
                    saving.save_within(done, means)

            record = loop.train_epoch(after_step, done, sums)
            steps.share_model()
            if spec.has_validation:
                record["validation"] = loop.validate_epoch()
            record |= run.left_out_rows()
            if spec.lr_scheduler_interval == "epoch":
                steps.step_scheduler(record.get("validation", record["train"])["loss"])
            run.history.append(record)
            saving.save_epoch(is_last=run.is_over)
            run.reports.epoch(record)
            if log is not None:
                log(record)
            for callback in spec.callbacks:
                steps.strategy.release(steps.model)  # what the validation or the callback before has gathered
                callback(record, steps.model)


def _continued(run: WorkerRun[TrainSpec]) -> tuple[int, Sums | None]:
    """Steps that the epoch has made, and this rank's sums.

    This restores the rank's random generators. If the metrics are other ones now, the epoch's means are those of its
    remaining steps. Another number of ranks draws other random numbers. Where it trains on some rows again, the sums
    are scaled to the other rows, so that the means weigh as many rows as the epoch has.
    """
    spec, hvd = run.spec, run.hvd
    partial, run.partial_epoch = run.partial_epoch, None
    if partial is None:
        return 0, None
    done = partial.steps(spec, hvd.size())
    own = partial.rank_state(hvd.rank(), hvd.size())
    if own is not None:
        random_state.restore(own["random"])
        return done, (own["sums"], own.get("metrics"))
    kept = done * spec.batch_size * hvd.size() / partial.rows
    total = torch.stack([one["sums"] for one in partial.ranks]).sum(dim=0)
    return done, (total * kept, partial.ranks[0].get("metrics")) if hvd.rank() == 0 else None


def _objective(spec: TrainSpec, device: torch.device) -> Objective:
    """The objective, with its modules and the metrics' on the model's device."""
    objective = spec.objective()
    for one in (*objective.losses, *(metric for group in spec.metrics for metric in group)):
        if isinstance(one, torch.nn.Module):
            one.to(device)
    return objective
