"""Training with Lightning, as one worker does it. Importing this needs Lightning only once it trains."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.estimators.lightning.checkpoint_file import plain_checkpoint
from hvd_cluster.estimators.lightning.data import OwnBatches, TrainBatches, ValidationBatches
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.run.data_module import arguments, steps_of
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.readers import Readers
from hvd_cluster.estimators.run.run_files import RunFiles, keep_with_run, local_folder
from hvd_cluster.estimators.run.snapshot import Snapshot
from hvd_cluster.estimators.run.world import Collectives, choose_device, initialized
from hvd_cluster.estimators.spec import TrainResult
from hvd_cluster.estimators.torch.cpu_copies import on_cpu
from hvd_cluster.estimators.torch.model_pickling import copied

logger = logging.getLogger(__name__)


def train(spec: LightningSpec) -> TrainResult:
    """Train ``spec.model`` on this worker's shard with a Lightning Trainer, together with the other workers.

    Where the run has a checkpoint, go on from there.

    Raises:
        RuntimeError: some ranks have a GPU and some have none.
        DataError: the run's checkpoint is of other data, or it cannot be written.
        HorovodInternalError: another worker has died.
    """
    with initialized(spec) as hvd, local_folder(spec) as folder:
        return _train(spec, hvd, folder)


def _train(spec: LightningSpec, hvd: Collectives, folder: str) -> TrainResult:
    from hvd_cluster.estimators.lightning.best_file import BestFile
    from hvd_cluster.estimators.lightning.callbacks import Epochs
    from hvd_cluster.estimators.lightning.module import LossModule

    module: Any = copied(spec.model) if spec.objective is None else LossModule(spec)
    found = Snapshot.shared(RunFiles.of(spec), hvd)
    if found is not None:
        found.require_data(spec.run_id, Fingerprint.of(spec.dataset, spec.inputs))
        logger.info("run %s goes on after epoch %d", spec.run_id, found.epochs)
    best = BestFile(spec, folder)
    epochs = Epochs(spec, hvd, best, found)
    trainer = _trainer(spec, hvd, folder, epochs, best)
    if found is not None and found.is_over(spec):
        trainer.fit_loop.max_epochs = found.epochs  # then fit() loads everything and trains nothing
    with _unpacked(found) as checkpoint, _data(spec, hvd, epochs) as data:
        trainer.fit(module, **data, ckpt_path=checkpoint)
    state = b""
    if hvd.rank() == 0:
        best.load(trainer, module)
        state = _pack(module if spec.objective is None else module.net, trainer, epochs.hooks)
        keep_with_run(spec, folder)
    hvd.barrier()
    return TrainResult(rank=hvd.rank(), size=hvd.size(), state=state, history=epochs.history)


@contextlib.contextmanager
def _data(spec: LightningSpec, hvd: Collectives, epochs: Any) -> Iterator[dict[str, Any]]:
    """What brings the batches, as arguments of ``Trainer.fit``: the user's own LightningDataModule, or our readers."""
    from hvd_cluster.lightning.installed import lightning

    kind = spec.data_module
    if isinstance(kind, type) and issubclass(kind, lightning().LightningDataModule):
        given = arguments(spec, hvd.rank(), hvd.size(), *steps_of(spec, hvd.size()))
        module: Any = kind(**given, floating_dtype=spec.floating_dtype)
        if spec.checkpoint_every_steps is not None or epochs.is_interrupted:
            made = module.train_dataloader
            module.train_dataloader = lambda: _savable(made(), spec, epochs)
        yield {"datamodule": module}
        return
    with Readers.of(spec, hvd.rank(), hvd.size()) as readers:
        epochs.padding_rows = readers.padding_rows
        validation = None
        if spec.validation_is_there:
            validation = ValidationBatches(readers, spec.floating_dtype, _validation_steps(spec, hvd.size()))
        yield {
            "train_dataloaders": TrainBatches(readers, epochs, spec.floating_dtype),
            "val_dataloaders": validation,
        }


def _validation_steps(spec: LightningSpec, size: int) -> int | None:
    """Batches of our own reader's validation, where ``limit_val_batches`` may be a share of them."""
    if spec.data_module is not None or spec.dataset.validation is None:
        return None
    steps = -(-spec.dataset.validation.rows // (spec.val_batch_size * size))
    return min(steps, spec.validation_steps_per_epoch or steps)


def _savable(loader: Any, spec: LightningSpec, epochs: Any) -> Any:
    """A loader of the user's own as one that a run can be saved and resumed within; as it is where that cannot be."""
    is_one = hasattr(loader, "__len__") and not isinstance(loader, (list, tuple, Mapping))
    if is_one and not _is_combined(loader) and not spec.trainer_args.get("use_distributed_sampler"):
        return OwnBatches(loader, epochs)
    logger.warning(
        "run %s is saved after epochs only: checkpoint_every_steps needs a train_dataloader() that returns one loader "
        "with a length, and brings its own sampler",
        spec.run_id,
    )
    return loader


def _is_combined(loader: Any) -> bool:
    from hvd_cluster.lightning.installed import submodule

    return isinstance(loader, submodule("utilities.combined_loader").CombinedLoader)


def _trainer(spec: LightningSpec, hvd: Collectives, folder: str, epochs: Any, best: Any) -> Any:
    from hvd_cluster.estimators.lightning.callbacks import AgreeOnLogged
    from hvd_cluster.lightning import HorovodStrategy
    from hvd_cluster.lightning.installed import lightning
    from hvd_cluster.torch import Compression

    pl = lightning()
    more = dict(spec.trainer_args)
    more.pop("enable_checkpointing", None)  # of the user's checkpoints: to Lightning, our own callback is one too
    callbacks = [*spec.callbacks, *_as_list(more.pop("callbacks", None))]
    best.place(callbacks)
    device = choose_device(spec.use_gpu, hvd)
    arguments = {
        "strategy": HorovodStrategy(compression=spec.gradient_compression or Compression.none, scale_lr=spec.scale_lr),
        "accelerator": "gpu" if device.type == "cuda" else "cpu",
        "devices": 1,
        "callbacks": [AgreeOnLogged(hvd), *callbacks, epochs],
        "max_epochs": spec.epochs,
        "logger": _logger(spec, pl, folder),
        "log_every_n_steps": spec.log_every_n_steps,
        "profiler": spec.profiler,
        "accumulate_grad_batches": spec.backward_passes_per_step,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # the readers share the rows out
        "enable_progress_bar": False,
        "enable_model_summary": spec.verbose > 1,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**arguments, **more})


def _logger(spec: LightningSpec, pl: Any, folder: str) -> Any:
    """The user's logger; else TensorBoard's, in the run's folder, where TensorBoard is installed."""
    if spec.logger is not None:
        return spec.logger
    if not spec.store.saving_runs:
        return False
    try:
        return pl.loggers.TensorBoardLogger(folder, name=spec.store.get_logs_subdir(), version="")
    except ImportError:
        return False


def _pack(model: torch.nn.Module, trainer: Any, hooks: Sequence[str]) -> bytes:
    from hvd_cluster.lightning.optimizers import scale_rates

    optimizers = [on_cpu(optimizer.state_dict()) for optimizer in trainer.optimizers]
    groups = [group for state in optimizers for group in state["param_groups"]]
    scale_rates(groups, (), 1 / getattr(trainer.strategy, "rate_factor", 1.0))  # those of one worker
    buffer = io.BytesIO()
    torch.save({"model": on_cpu(model.state_dict()), "optimizers": optimizers, "hooks": list(hooks)}, buffer)
    return buffer.getvalue()


@contextlib.contextmanager
def _unpacked(found: Snapshot | None) -> Iterator[str | None]:
    """A checkpoint as the file that Lightning reads; plain data, whatever lay in the store.

    Raises:
        DataError: it holds something else.
    """
    if found is None:
        yield None
        return
    with scratch_folder("ckpt") as folder:
        path = Path(folder) / "resume.ckpt"
        path.write_bytes(found.body)
        torch.save(plain_checkpoint(path), path)
        yield str(path)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
