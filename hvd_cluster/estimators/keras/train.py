"""Training with Keras, as one worker does it. Keras is imported once its backend is chosen."""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from hvd_cluster.estimators.keras.best_file import BestFile
from hvd_cluster.estimators.keras.data import KerasBatches, as_taken
from hvd_cluster.estimators.keras.packed_model import choose_backend
from hvd_cluster.estimators.keras.spec import KerasSpec
from hvd_cluster.estimators.keras.state import capture, rate_of, restore
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.finite_check import FiniteCheck
from hvd_cluster.estimators.run.readers import Readers
from hvd_cluster.estimators.run.reports import Reports
from hvd_cluster.estimators.run.run_files import RunFiles, keep_with_run, local_folder
from hvd_cluster.estimators.run.scalars import scalar_log
from hvd_cluster.estimators.run.snapshot import Snapshot
from hvd_cluster.estimators.run.world import Collectives, choose_device, initialized
from hvd_cluster.estimators.spec import TrainResult
from hvd_cluster.topology import export

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Extras:
    """What of a spec cannot be unpickled without Keras."""

    callbacks: tuple[Any, ...] = ()
    #: A ``ModelCheckpoint``, or None.
    checkpoint_callback: Any = None
    #: A compressor of ``hvd_cluster.keras``, or None.
    gradient_compression: Any = None


def train(spec: KerasSpec) -> TrainResult:
    """Train the model on this worker's shard with ``model.fit``, together with the other workers of the job.

    Where the run has a checkpoint, go on from it.

    Raises:
        RuntimeError: some ranks have a GPU and some have none; or Keras was imported on another backend here.
        DataError: the run's checkpoint is of another model or of other data, or it cannot be written.
        HorovodInternalError: another worker has died.
    """
    export(spec.backend_env)
    choose_backend(spec.model.backend)
    with initialized(spec) as hvd, local_folder(spec) as folder:
        device = choose_device(spec.use_gpu, hvd)
        _use(spec.model.backend, device.index if device.type == "cuda" else None)
        return _train(spec, hvd, folder)


def _train(spec: KerasSpec, hvd: Collectives, folder: str) -> TrainResult:
    from hvd_cluster.estimators.keras.callback_states import CallbackStates
    from hvd_cluster.estimators.keras.callbacks import FitProgress

    extras: Extras = cloudpickle.loads(spec.extras)
    factor = float(hvd.size()) if spec.scale_lr else 1.0
    model = spec.model.load(_distributing(spec, extras), rate_factor=factor)
    scaled_rate = rate_of(model)
    found = Snapshot.shared(RunFiles.of(spec), hvd)
    if found is not None:
        found.require_data(spec.run_id, Fingerprint.of(spec.dataset, spec.inputs))
        restore(model, found.body, spec.run_id, factor)
        logger.info("run %s goes on after epoch %d", spec.run_id, found.epochs)
    with contextlib.ExitStack() as opened:
        readers = opened.enter_context(Readers.of(spec, hvd.rank(), hvd.size()))
        log = opened.enter_context(scalar_log(spec)) if hvd.rank() == 0 else None
        batches = KerasBatches(spec.columns, readers)
        states = CallbackStates(extras.callbacks, found.body if found is not None else None)
        history, reports = list(found.history) if found is not None else [], Reports(spec, hvd.rank())
        losses = FiniteCheck(spec.terminate_on_nan and not _ends_at_nan(extras), hvd, spec.run_id)
        progress = FitProgress(spec, hvd, batches, history, factor, states, reports, losses)
        keeper = _kept_on_rank_zero(spec, extras, folder) if hvd.rank() == 0 else None
        progress.best = BestFile.of(spec, keeper, found, model)
        if found is not None and found.running is not None:
            progress.go_on(found.running)
        if found is not None and found.is_over(spec):
            states.end(model)
        else:
            _fit(model, progress, _callbacks(spec, extras, progress, keeper, log, scaled_rate, folder))
    state = b""
    if hvd.rank() == 0:
        if progress.best is not None and progress.best.path.exists():
            model.load_weights(str(progress.best.path))
        state = capture(model, factor)
        keep_with_run(spec, folder)
    hvd.barrier()
    return TrainResult(rank=hvd.rank(), size=hvd.size(), state=state, history=progress.history)


def _fit(model: Any, progress: Any, callbacks: list[Any]) -> None:
    from hvd_cluster.estimators.keras.callback_list import StepsOfEpoch

    spec, batches = progress.spec, progress.batches
    first_epoch = len(progress.history)
    data: Any = batches.training(first_epoch, spec.epochs, progress.done)
    example = next(data)  # the first batch, which a data module gives only once
    if spec.model.backend == "tensorflow" and progress.rank_state is not None:
        model.test_on_batch(*example)  # makes the metrics, of which the epoch has values; elsewhere fit does
    model.fit(
        as_taken(spec.model.backend, example, data, spec.prefetch),  # iterated once: the steps of an epoch are given
        steps_per_epoch=batches.readers.train_steps,
        initial_epoch=first_epoch,
        epochs=spec.epochs,
        callbacks=StepsOfEpoch(callbacks, progress, model),
        verbose=0,
    )


def _ends_at_nan(extras: Extras) -> bool:
    """Whether Keras's own callback ends the fit there, with the model as it is."""
    import keras

    return any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in extras.callbacks)


def _distributing(spec: KerasSpec, extras: Extras) -> Any:
    import hvd_cluster.keras as hvd

    return functools.partial(
        hvd.DistributedOptimizer,
        compression=extras.gradient_compression or hvd.Compression.none,
        backward_passes_per_step=spec.backward_passes_per_step,
        average_aggregated_gradients=True,
    )


def _callbacks(
    spec: KerasSpec, extras: Extras, progress: Any, keeper: Any, log: Any, scaled_rate: float, folder: str
) -> list[Any]:
    """Ours around the user's."""
    import keras

    import hvd_cluster.keras as hvd
    from hvd_cluster.estimators.keras.callbacks import AfterOthers, BeforeOthers
    from hvd_cluster.estimators.keras.stops import StopsTogether

    own = []
    for callback in extras.callbacks:
        if isinstance(callback, hvd.callbacks.LearningRateScheduleCallback) and spec.scale_lr:
            callback.initial_lr = scaled_rate
        if isinstance(callback, keras.callbacks.TensorBoard):
            if progress.hvd.rank() != 0:
                continue
            callback.log_dir = str(Path(folder) / spec.store.get_logs_subdir())
        own.append(callback)
    return [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        BeforeOthers(progress),
        *own,
        *([keeper] if keeper is not None else []),
        StopsTogether(extras.callbacks, progress.hvd),
        AfterOthers(progress, log),
    ]


def _kept_on_rank_zero(spec: KerasSpec, extras: Extras, folder: str) -> Any:
    """The user's ModelCheckpoint with a file in the run's folder; None where there is none."""
    callback = extras.checkpoint_callback
    if callback is not None:
        ending = ".weights.h5" if callback.save_weights_only else ".keras"
        callback.filepath = str(Path(folder) / f"{spec.store.get_checkpoint_filename()}{ending}")
    return callback


def _use(backend: str, gpu: int | None) -> None:
    import keras

    if keras.config.backend() != backend:
        raise RuntimeError(
            f"the model was made on Keras's backend {backend!r}, and this worker has imported Keras on "
            f"{keras.config.backend()!r}: set KERAS_BACKEND={backend} in the workers' environment, or import Keras in "
            "no module that they import"
        )
    from hvd_cluster.keras.device import use_device

    use_device(gpu)
