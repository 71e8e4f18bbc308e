"""TorchEstimator: a DataFrame and a ``torch.nn.Module`` in, a TorchModel out."""

from __future__ import annotations

from collections.abc import Callable

from hvd_cluster.data.store import Store
from hvd_cluster.estimators.params import ESTIMATOR_ROWS, TORCH_ROWS, with_params
from hvd_cluster.estimators.run.checkpoint import Checkpoint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.spec import TrainResult, TrainSpec
from hvd_cluster.estimators.torch.checkpoint import require_shards, shards_of
from hvd_cluster.estimators.torch.class_weights import ClassWeights
from hvd_cluster.estimators.torch.model_pickling import copied
from hvd_cluster.estimators.torch.model_source import is_lazy
from hvd_cluster.estimators.torch.module_estimator import ModuleEstimator
from hvd_cluster.estimators.torch.probe import probe
from hvd_cluster.estimators.torch.train import train
from hvd_cluster.estimators.torch.train_state import TrainState, kept_text
from hvd_cluster.estimators.trial_rows import TrialRows
from hvd_cluster.estimators.typed_params import TorchEstimatorParams


@with_params(ESTIMATOR_ROWS, TORCH_ROWS)
class TorchEstimator(TorchEstimatorParams, ModuleEstimator):
    """Trains a PyTorch model on the rows of a DataFrame, with several workers.

    ``fit(data)`` returns a :class:`TorchModel`. It takes a Spark DataFrame (classic or Connect), with workers on the
    Spark cluster; or a pandas DataFrame, a pyarrow Table or the path of Parquet files, with workers on this machine.

    Each feature column becomes one positional argument of the model, a tensor of shape ``(rows, *shape of a row)``;
    the loss compares each label column with one output. Columns have the model's floating dtype; integers are int64 and
    bools are bool if only that works (embeddings, class labels). The learning rate is multiplied by the number of
    workers unless ``scale_lr=False``.

    ``model`` may be a function without parameters (or :class:`ModelFactory`) that makes the module: the driver and each
    worker call it, with the same seed, and ``optimizer`` is ``fn(model)``. Rank 0 sends its trainable parameters to the
    others. Frozen ones (``requires_grad=False``) are neither sent nor stored: the factory makes them again, and a hash
    checks that they are the same everywhere.

    An epoch uses all training rows; its last global batch is padded with earlier rows (``padding_rows`` in
    ``getHistory()``). After each epoch rank 0 writes a checkpoint to the store; a fit with the same ``run_id``
    continues from it with a warning, and refuses other columns or another number of rows. When a worker dies, all
    workers start again from the last checkpoint, up to ``max_restarts`` times, and the final weights are those of an
    undisturbed fit. Without a store the rows of a Spark DataFrame go directly to the workers' disks.

    Raises (from fit, before any worker starts):
        ValueError: params that are missing or contradict each other, and columns that do not exist, all at once.
        DataError: the data or the store cannot be used, or the model, the loss or a metric does not fit the columns.
        LaunchError: something cannot be sent to the workers, or they cannot be started.
    Raises (later):
        WorkerFailedError: a worker raised or died; the text begins with the user's own traceback.
    """

    run_prefix = "pytorch"

    @property
    def _scaled_precision(self) -> tuple[str, str] | None:
        return ("mixed_precision='fp16'", "'bf16'") if self._value("mixed_precision") == "fp16" else None

    def _mistakes(self) -> list[str]:
        value = self._value
        wrong = []
        self._made = None
        if not self._has_model:
            wrong.append("Model parameter is required: give a torch.nn.Module, or a function that makes one")
        wrong += self._objective_mistakes()
        if value("class_weights") is not None and len(value("label_cols") or []) > 1:
            wrong.append("class_weights needs a single label column: use sample_weight_col with several")
        if value("train_minibatch_fn") is not None:
            wrong += [
                f"{name} has no effect with train_minibatch_fn: clip there, between "
                "optimizer.synchronize() and optimizer.step() in `with optimizer.skip_synchronize()`"
                for name in ("gradient_clip_norm", "gradient_clip_value")
                if value(name) is not None
            ]
            if value("mixed_precision") == "fp16":
                wrong.append(
                    "mixed_precision='fp16' needs a scaled loss, which train_minibatch_fn does not get: use 'bf16', "
                    "or leave it out and use torch.amp.GradScaler there"
                )
        if not all(callable(callback) for callback in value("callbacks") or []):
            wrong.append("callbacks: must be a list of functions (record, model)")
        return wrong + self._count_mistakes() + self._sharding_mistakes()

    def _train_spec(self, trial: TrialRows, store: Store, run_id: str) -> TrainSpec:
        value, dataset = self._value, trial.dataset
        model, objective, metrics = self._module(), self._objective(), self._metric_groups()
        batch = trial.batch()
        findings = probe(
            model,
            self._module_inputs(dataset, batch, model),
            objective if value("train_minibatch_fn") is None else None,
            metrics,
            batch,
            dataset.schema,
            weighted=value("class_weights") is not None,
            batch_size=value("batch_size"),
            output_fn=value("output_fn"),
        )
        self._try_scoring(trial, model, findings)
        if value("early_stopping") is not None:
            value("early_stopping").require_monitor(self._metric_names())
        if value("class_weights") is not None:
            name = findings.inputs.label_cols[0]
            ClassWeights.require_numbers(name, batch[name])
        same = (
            "train_minibatch_fn", "validation_minibatch_fn", "lr_scheduler", "lr_scheduler_interval", "mixed_precision",
            "gradient_clip_norm", "gradient_clip_value", "class_weights",
        )  # fmt: skip
        return TrainSpec(
            model=self._sent_model(findings.inputs, lambda: batch),
            optimizer=self._optimizer_state(),
            inputs=findings.inputs,
            output_shapes=findings.output_shapes,
            output_names=findings.output_names,
            objective=objective,
            metrics=metrics,
            metric_names=self._metric_names(),
            **self._fit_fields(dataset, store, run_id, trial.seed),
            **{name: value(name) for name in same},
        )

    def _checkpoint(self, store: Store, run_id: str) -> Checkpoint | None:
        found = Checkpoint.load(RunFiles(store, run_id), "model")
        if self._saves_shards:
            require_shards(found, run_id)
        if found is not None and not is_lazy(self._given_module()):  # otherwise the workers find out
            trial = copied(self._given_module())
            optimizer = self._optimizer_state().build(trial)
            made = None if self._made is None else self._made[0].made
            TrainState(trial, optimizer, made=made).restore(
                found, run_id, size=1, scale=1.0, shards=shards_of(store, run_id, found.state)
            )
        return found

    def _kept_text(self, found: Checkpoint, spec: TrainSpec, num_proc: int) -> str:
        return kept_text(found, spec, num_proc)

    def _train_fn(self) -> Callable[[TrainSpec], TrainResult]:
        return train
