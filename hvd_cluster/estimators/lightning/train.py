"""Training with Lightning on one worker, which imports Lightning when it starts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.data.reading.to_device import ToDevice
from hvd_cluster.estimators.lightning.checkpoint_file import plain_checkpoint
from hvd_cluster.estimators.lightning.data import BatchLoader, ResumableLoader, floating, saved_batches, with_whole
from hvd_cluster.estimators.lightning.layer_hooks import makes_layers
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.run.checkpoint import Checkpoint, packed
from hvd_cluster.estimators.run.data_module import arguments, steps_of
from hvd_cluster.estimators.run.readers import Readers
from hvd_cluster.estimators.run.run_files import keep_with_run, local_folder
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.run.world import Collectives, choose_device, initialized
from hvd_cluster.estimators.spec import TrainResult
from hvd_cluster.estimators.torch import made_state
from hvd_cluster.estimators.torch.initial_model import initial_model
from hvd_cluster.estimators.torch.model_pickling import on_cpu, state_within
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.estimators.torch.strategies.communication import PowerSGD
from hvd_cluster.estimators.torch.strategies.fsdp2 import FSDP2

if TYPE_CHECKING:
    from hvd_cluster.estimators.lightning.best_file import LightningBestFile
    from hvd_cluster.estimators.lightning.callbacks import SaveRun

logger = logging.getLogger(__name__)


def train(spec: LightningSpec) -> TrainResult:
    """Train ``spec.model`` on this worker's shard with a Lightning Trainer.

    The other workers train together with it. A run that has a checkpoint continues from it.

    Raises:
        RuntimeError: some ranks have a GPU and some have none.
        DataError: the run's checkpoint is of other data, or it cannot be written.
        HorovodInternalError: another worker has died.
    """
    with initialized(spec) as hvd, local_folder(spec) as folder:
        return _train(spec, hvd, folder)


def _train(spec: LightningSpec, hvd: Collectives, folder: str) -> TrainResult:
    from hvd_cluster.estimators.lightning.best_file import LightningBestFile
    from hvd_cluster.estimators.lightning.callbacks import SaveRun
    from hvd_cluster.estimators.lightning.module import LossModule
    from hvd_cluster.estimators.lightning.structure_check import StructureCheck

    own = _empty_model(spec) or initial_model(spec.model, hvd)
    module: Any = own if spec.objective is None else LossModule(spec, own)
    run = WorkerRun(spec, hvd)
    found = run.resumed
    if isinstance(spec.model, ModelSource) and found is not None:
        made_state.require_same(found.state, spec.model.made, spec.run_id)
    best = LightningBestFile(run, folder)
    saving = SaveRun(run, best, StructureCheck(spec, own))
    trainer = _trainer(run, folder, saving, best)
    if found is not None and found.is_over(spec):
        trainer.fit_loop.max_epochs = found.epochs  # then fit() loads everything and trains nothing
    with _checkpoint_path(found) as checkpoint, _data(saving, trainer, module) as data:
        if spec.objective is not None:
            module.checks_batches = "datamodule" in data
        trainer.fit(module, **data, ckpt_path=checkpoint)
    state = _sharded_result(spec, trainer, best, saving) if spec.saves_shards else b""
    if hvd.rank() == 0:
        if not spec.saves_shards:
            best.load(trainer, module)
            state = _packed_model(spec, own, trainer, saving)
        keep_with_run(spec, folder)
    hvd.barrier()
    return TrainResult(rank=hvd.rank(), size=hvd.size(), state=state, history=run.history)


def _empty_model(spec: LightningSpec) -> torch.nn.Module | None:
    """A module on the meta device; None if the factory makes another.

    It gets its values when it is divided.
    """
    if not isinstance(spec.model, ModelSource) or not isinstance(spec.sharding, FSDP2):
        return None
    model = spec.model.without_values()
    return None if model is None or makes_layers(model) else model


@contextlib.contextmanager
def _data(saving: SaveRun, trainer: Any, module: Any) -> Iterator[dict[str, Any]]:
    """The data for ``Trainer.fit``: the user's LightningDataModule, or our readers."""
    from hvd_cluster.lightning.installed import lightning

    run = saving.run
    spec, hvd = run.spec, run.hvd
    kind = spec.data_module
    if isinstance(kind, type) and issubclass(kind, lightning().LightningDataModule):
        given = arguments(spec, hvd.rank(), hvd.size(), *steps_of(spec, hvd.size()))
        data_module: Any = kind(**given, floating_dtype=spec.floating_dtype)
        if spec.checkpoint_every_steps is not None or run.partial_epoch is not None:
            made = data_module.train_dataloader
            data_module.train_dataloader = lambda: _resumable(made(), saving)
        yield {"datamodule": data_module}
        return
    device = torch.device("cpu") if _moves_batches(module) else trainer.strategy.root_device
    with Readers.of(spec, hvd.rank(), hvd.size()) as readers, ToDevice(device) as to_device:
        run.padding_rows, saving.look = readers.padding_rows, readers.not_finite

        def prepared(batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
            whole = (with_whole(batch, spec.whole_labels) for batch in batches)
            cast = (floating(batch, spec.floating_dtype) for batch in whole)
            return to_device(cast if spec.objective is None else map(spec.inputs.checked, cast), ahead=readers.ahead)

        def training() -> Iterator[dict[str, torch.Tensor]]:
            return saved_batches(prepared(readers.train_batches(run.epoch, saving.done)), saving)

        train = BatchLoader(training, readers.train_steps)
        validation = None
        if spec.has_validation:
            # Equally many on every rank, so that modules may use collectives in each step.
            steps = _validation_steps(spec, hvd.size())
            validation = BatchLoader(lambda: run.validated(prepared(readers.validation_batches())), steps)
        yield {"train_dataloaders": train, "val_dataloaders": validation}


def _moves_batches(module: Any) -> bool:
    """Whether hooks of the user's module expect batches not yet on the device."""
    from hvd_cluster.lightning.installed import lightning

    hooks = ("on_before_batch_transfer", "transfer_batch_to_device")
    return any(getattr(type(module), hook) is not getattr(lightning().LightningModule, hook) for hook in hooks)


def _validation_steps(spec: LightningSpec, size: int) -> int | None:
    """Validation batches of our reader: ``limit_val_batches`` may be a share of them."""
    if spec.data_module is not None or spec.dataset.validation is None:
        return None
    steps = -(-spec.dataset.validation.rows // (spec.val_batch_size * size))
    return min(steps, spec.validation_steps_per_epoch or steps)


def _resumable(loader: Any, saving: SaveRun) -> Any:
    """A user's loader made resumable within an epoch.

    A run can save and resume it. The loader is returned as is if that is not possible.
    """
    from hvd_cluster.lightning.installed import submodule

    spec, several = saving.run.spec, (list, tuple, Mapping, submodule("utilities.combined_loader").CombinedLoader)
    is_one = hasattr(loader, "__len__") and not isinstance(loader, several)
    if is_one and not spec.trainer_args.get("use_distributed_sampler"):
        return ResumableLoader(loader, saving)
    logger.warning(
        "run %s is saved after epochs only: checkpoint_every_steps needs a train_dataloader() that returns one loader "
        "with a length, and with its own sampler",
        spec.run_id,
    )
    return loader


def _trainer(run: WorkerRun[LightningSpec], folder: str, saving: SaveRun, best: LightningBestFile) -> Any:
    from hvd_cluster.estimators.lightning.callbacks import ReduceLogged
    from hvd_cluster.lightning.installed import lightning
    from hvd_cluster.torch import Compression

    pl, spec, hvd = lightning(), run.spec, run.hvd
    more = dict(spec.trainer_args)
    more.pop("enable_checkpointing", None)  # about the user's checkpoints, while SaveRun is one too
    given = more.pop("callbacks", None) or []
    callbacks = [*spec.callbacks, *(given if isinstance(given, (list, tuple)) else [given])]
    best.place(callbacks)
    device = choose_device(spec.use_gpu, hvd)
    options: dict[str, Any] = {"compression": spec.gradient_compression or Compression.none, "scale_lr": spec.scale_lr}
    arguments = {
        "strategy": _strategy(spec)(run, **options),
        "accelerator": "gpu" if device.type == "cuda" else "cpu",
        "devices": 1,
        "callbacks": [ReduceLogged(hvd), *callbacks, saving.check, saving],
        "max_epochs": spec.epochs,
        "logger": _logger(spec, pl, folder),
        "log_every_n_steps": spec.log_every_n_steps,
        "profiler": spec.profiler,
        "accumulate_grad_batches": spec.backward_passes_per_step,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # the readers shard the rows
        "enable_progress_bar": False,
        "enable_model_summary": spec.verbose > 1,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**arguments, **more})


def _strategy(spec: LightningSpec) -> Any:
    """What ``sharding=`` and ``communication=`` choose."""
    if spec.sharding != "none":
        from hvd_cluster.estimators.lightning.sharded_strategy import FSDP2Strategy, Zero1Strategy

        return Zero1Strategy if spec.sharding == "zero1" else FSDP2Strategy
    if spec.communication != "every_step":
        from hvd_cluster.estimators.lightning.communication_strategy import LowRankStrategy, RoundsStrategy

        return LowRankStrategy if isinstance(spec.communication, PowerSGD) else RoundsStrategy
    from hvd_cluster.estimators.lightning.estimator_strategy import EstimatorStrategy

    return EstimatorStrategy


def _logger(spec: LightningSpec, pl: Any, folder: str) -> Any:
    """The user's logger, or TensorBoard's in the run's folder if it is installed."""
    if spec.logger is not None:
        return spec.logger
    if not spec.store.saving_runs():
        return False
    try:
        return pl.loggers.TensorBoardLogger(folder, name=spec.store.get_logs_subdir(), version="")
    except ImportError:
        return False


def _packed_model(spec: LightningSpec, model: torch.nn.Module, trainer: Any, saving: SaveRun) -> bytes:
    made = spec.model.made if isinstance(spec.model, ModelSource) else None
    state = model.state_dict() if made is None else made_state.TrainedPart(made).of(model)
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    changed = saving.check.structure.changed(model, optimizer)
    return _packed(trainer, state, None if optimizer is None else optimizer.state_dict(), saving, **changed)


def _sharded_result(spec: LightningSpec, trainer: Any, best: LightningBestFile, saving: SaveRun) -> bytes:
    """What shards lack of the model and its optimizer, on rank 0.

    Every rank takes part.
    """
    strategy = trainer.strategy
    best.load_on_all_ranks(trainer)
    state = strategy.saved_state()
    if spec.objective is not None:
        state = state_within(state, "net")
    name, others, rests = strategy.folders.write(state, *([] if spec.optimizer is None else strategy.optimizers))
    if not trainer.is_global_zero:
        return b""
    return _packed(trainer, others, rests[0] if rests else None, saving, shards=name, deletes_shards=True)


def _packed(trainer: Any, state: Mapping[str, Any], optimizer: Any, saving: SaveRun, **more: Any) -> bytes:
    from hvd_cluster.lightning.optimizers import scale_rates

    optimizer = on_cpu(optimizer)
    if optimizer is not None:
        scale_rates(optimizer["param_groups"], (), 1 / getattr(trainer.strategy, "rate_factor", 1.0))  # of one worker
    more = {"hooks": list(saving.check.hooks), "dtypes": saving.dtypes, **more}
    return packed({"model": on_cpu(state), "optimizer": optimizer, **more})


@contextlib.contextmanager
def _checkpoint_path(found: Checkpoint | None) -> Iterator[str | None]:
    """The path of a checkpoint in Lightning's format, which holds plain data only.

    Raises:
        DataError: it holds something else.
    """
    if found is None:
        yield None
        return
    with scratch_folder("ckpt") as folder:
        path = Path(folder) / "resume.ckpt"
        found.state["lightning"].numpy().tofile(path)
        torch.save(plain_checkpoint(path), path)
        yield str(path)
