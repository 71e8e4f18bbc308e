"""Training with Keras on one worker; it imports Keras once the backend is chosen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from hvd_cluster.estimators.keras.best_file import KerasBestFile
from hvd_cluster.estimators.keras.data import as_taken
from hvd_cluster.estimators.keras.framework import choose_backend
from hvd_cluster.estimators.keras.model_source import KerasModelSource
from hvd_cluster.estimators.keras.spec import Extras, KerasSpec
from hvd_cluster.estimators.keras.state import as_array, capture, restore
from hvd_cluster.estimators.run.checkpoint import packed
from hvd_cluster.estimators.run.finite_check import FiniteCheck
from hvd_cluster.estimators.run.readers import Readers
from hvd_cluster.estimators.run.run_files import keep_with_run, local_folder
from hvd_cluster.estimators.run.scalars import scalar_log
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.run.world import Collectives, choose_device, initialized
from hvd_cluster.estimators.spec import TrainResult
from hvd_cluster.estimators.torch.made_state import require_same
from hvd_cluster.topology import export


def train(spec: KerasSpec) -> TrainResult:
    """Train on this worker's shard with ``model.fit``, along with the job's others.

    A run that has a checkpoint continues from it.

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
    import keras

    from hvd_cluster.estimators.keras.callback_states import CallbackStates
    from hvd_cluster.estimators.keras.callbacks import FitProgress
    from hvd_cluster.keras import Compression, DistributedOptimizer

    extras: Extras = cloudpickle.loads(spec.extras)
    distributed = functools.partial(
        DistributedOptimizer,
        compression=extras.gradient_compression or Compression.none,
        backward_passes_per_step=spec.backward_passes_per_step,
        average_aggregated_gradients=True,
    )
    factor = float(hvd.size()) if spec.scale_lr else 1.0
    model = spec.model.load(distributed, rate_factor=factor)
    if isinstance(spec.model, KerasModelSource):
        spec.model.require_same_on_ranks(model, hvd)
    scaled_rate = float(as_array(model.optimizer.learning_rate))
    run = WorkerRun(spec, hvd)
    found = run.resumed
    if found is not None:
        if spec.model.made is not None:
            require_same(found.state, spec.model.made, spec.run_id)
        restore(model, found.state, spec.run_id, factor)
    with contextlib.ExitStack() as opened:
        readers = opened.enter_context(Readers.of(spec, hvd.rank(), hvd.size()))
        run.padding_rows = readers.padding_rows
        log = opened.enter_context(scalar_log(spec)) if hvd.rank() == 0 else None
        states = CallbackStates(extras.callbacks, found.state["callbacks"] if found is not None else None)
        ends_at_nan = any(isinstance(one, keras.callbacks.TerminateOnNaN) for one in extras.callbacks)
        losses = FiniteCheck(spec.terminate_on_nan and not ends_at_nan, hvd, spec.run_id, look=readers.not_finite)
        keeper = _checkpoint_callback(spec, extras, folder) if hvd.rank() == 0 else None
        best = KerasBestFile(run, keeper, model) if keeper is not None and keeper.save_best_only else None
        progress = FitProgress(run, readers, factor, states, losses, best)
        if found is not None and found.is_over(spec):
            model.optimizer.finalize_variable_values(model.trainable_weights)  # as Keras does at the end of a fit
            states.finish(model)
        else:
            _fit(model, progress, _callbacks(extras, progress, keeper, log, scaled_rate, folder))
    state = b""
    if hvd.rank() == 0:
        if best is not None and best.path.exists():
            model.load_weights(str(best.path))
        state = packed(capture(model, factor, spec.model.made))
        keep_with_run(spec, folder)
    hvd.barrier()
    return TrainResult(rank=hvd.rank(), size=hvd.size(), state=state, history=run.history)


def _training_items(run: WorkerRun[KerasSpec], readers: Readers, done: int) -> Iterator[tuple[Any, ...]]:
    """The items of all epochs from the run's current one, without its first ``done``."""
    first_epoch = run.epoch
    for epoch in range(first_epoch, run.spec.epochs):
        skipped = done if epoch == first_epoch else 0
        batches = run.timed(readers.train_batches(epoch, skipped), epoch, skipped)
        yield from map(run.spec.columns.item, batches)  # Keras and tf.data read ahead of the epoch


def _fit(model: Any, progress: Any, callbacks: list[Any]) -> None:
    from hvd_cluster.estimators.keras.callbacks import ResumedCallbackList

    spec, data = progress.run.spec, _training_items(progress.run, progress.readers, progress.done)
    example = next(data)  # the first batch, which a data module yields only once
    if spec.model.backend == "tensorflow" and progress.rank_state is not None:
        model.test_on_batch(*example)  # makes the metrics, whose values are to be restored; elsewhere fit makes them
    model.fit(
        as_taken(spec.model.backend, example, data, spec.prefetch),  # iterated once: the steps of an epoch are given
        steps_per_epoch=progress.steps,
        shuffle=False,  # the readers do
        initial_epoch=progress.run.epoch,
        epochs=spec.epochs,
        callbacks=ResumedCallbackList(callbacks, progress, model),
        verbose=0,
    )


def _callbacks(extras: Extras, progress: Any, keeper: Any, log: Any, scaled_rate: float, folder: str) -> list[Any]:
    """The user's callbacks, between those of this package."""
    import keras

    import hvd_cluster.keras as hvd
    from hvd_cluster.estimators.keras.callbacks import GlobalEpochNumbers, SaveRun, StartEqual, StopOnAllRanks

    spec, hvd_torch = progress.run.spec, progress.run.hvd
    own = []
    for callback in extras.callbacks:
        if isinstance(callback, hvd.callbacks.LearningRateScheduleCallback) and spec.scale_lr:
            callback.initial_lr = scaled_rate
        if isinstance(callback, keras.callbacks.TensorBoard):
            if hvd_torch.rank() != 0:
                continue
            callback.log_dir = str(Path(folder) / spec.store.get_logs_subdir())
        own.append(callback)
    return [
        StartEqual(progress.run),
        GlobalEpochNumbers(progress),
        *own,
        *([keeper] if keeper is not None else []),
        StopOnAllRanks(extras.callbacks, hvd_torch),
        SaveRun(progress, log),
    ]


def _checkpoint_callback(spec: KerasSpec, extras: Extras, folder: str) -> Any:
    """The user's ModelCheckpoint, writing to the run's folder; or None."""
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
            "none of the modules that they import"
        )
    from hvd_cluster.keras.device import use_device

    use_device(gpu)
