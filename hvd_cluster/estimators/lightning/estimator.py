"""LightningEstimator: a DataFrame and a LightningModule in, a TorchModel out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, MissingExtraError
from hvd_cluster.estimators.lightning.layer_hooks import after_hooks, with_configured_layers, with_hooks_called
from hvd_cluster.estimators.lightning.params import HOROVOD_ROWS, LIGHTNING_ROWS
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.lightning.step_trial import whole_labels
from hvd_cluster.estimators.lightning.train import train
from hvd_cluster.estimators.params import ESTIMATOR_ROWS, with_params
from hvd_cluster.estimators.run.checkpoint import Checkpoint
from hvd_cluster.estimators.run.random_state import set_aside
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.spec import Inputs, TrainResult
from hvd_cluster.estimators.torch import made_state
from hvd_cluster.estimators.torch.arguments import floating_dtype
from hvd_cluster.estimators.torch.checkpoint import require_shards
from hvd_cluster.estimators.torch.framework import predict
from hvd_cluster.estimators.torch.model_source import ModelSource, is_lazy
from hvd_cluster.estimators.torch.module_estimator import ModuleEstimator, unsized
from hvd_cluster.estimators.torch.probe import TrialResult, probe
from hvd_cluster.estimators.torch.strategies.checks import called_modules
from hvd_cluster.estimators.torch.strategies.fsdp2 import FSDP2
from hvd_cluster.estimators.trial_rows import TrialRows
from hvd_cluster.estimators.typed_params import LightningEstimatorParams

logger = logging.getLogger(__name__)

#: Params that a LightningModule replaces.
_OF_THE_MODULE = ("optimizer", "loss", "loss_constructors", "loss_weights", "metrics")

#: Epochs of a Trainer that has no limit, and of one that is given none.
_ENDLESS, _DEFAULT_EPOCHS = 2**31 - 1, 1000

_UNCERTAIN_TEXT = (
    "transform calls the model with feature %r as %s; with %s it returns other outputs. The dtype of the training is "
    "unknown, because training_step() did not call the module itself: call self(...) there"
)


@with_params(ESTIMATOR_ROWS, LIGHTNING_ROWS)
class LightningEstimator(LightningEstimatorParams, ModuleEstimator):
    """Trains a LightningModule on the rows of a DataFrame, with several workers.

    ``fit(data)`` takes what :class:`TorchEstimator`'s takes, and returns a :class:`TorchModel`. Each worker runs a
    Trainer with ``HorovodStrategy``.

    A batch for ``training_step(self, batch, batch_idx)`` is a dict column -> tensor of shape
    ``(rows, *shape of a row)``, with floating columns in the module's dtype and others as stored. ``model.history`` has
    what the module logs (``logged`` in ``getHistory()`` has it under the module's names); names that begin with ``val``
    belong to the validation, which epochs without one lack. The result's ``transform`` calls ``model(*feature
    columns)``, in the dtypes in which the first training step does.

    ``callbacks`` are Lightning's. With a ``ModelCheckpoint`` that monitors a metric, the weights that it found best are
    returned; its files are in the run's folder in the store. After each epoch, and within epochs with
    ``checkpoint_every_steps``, the run writes a checkpoint to the store; a fit with the same ``run_id`` continues from
    it.

    A plain ``torch.nn.Module`` is trained too: then ``optimizer`` and ``loss`` are those of TorchEstimator. A function
    that makes one of them is called in the driver and in each worker, as by TorchEstimator.

    Raises (from fit, before any worker starts):
        ValueError: params that are missing or contradict each other, and columns that do not exist, all at once.
        DataError: the data or the store cannot be used.
        MissingExtraError: Lightning is not installed.
        LaunchError: something cannot be sent to the workers, or they cannot be started.
    Raises (later):
        WorkerFailedError: a worker raised or died; the text begins with the user's own traceback.
    """

    run_prefix = "lightning"

    def _fit_data(self, *args: Any) -> Any:
        given = dict(self._value("trainer_args") or {})
        if "max_epochs" not in given:
            return super()._fit_data(*args)
        # It replaces ``epochs`` in all: a run that was interrupted must know whether it is over.
        epochs = given.pop("max_epochs")
        if epochs in (None, -1):
            is_limited = given.get("max_steps", -1) != -1 or given.get("max_time") is not None
            epochs = _ENDLESS if epochs == -1 or is_limited else _DEFAULT_EPOCHS
        fit, self._made = self.copy(), None
        return fit.setEpochs(epochs).setTrainerArgs(given)._fit_data(*args)

    def _mistakes(self) -> list[str]:
        value = self._value
        wrong = []
        self._made = None
        if not self._has_model:
            wrong.append("Model parameter is required: give a LightningModule, or a torch.nn.Module with its optimizer")
        elif self._is_lightning_module():
            wrong += [
                f"{name} has no effect with a LightningModule: leave it out, and define it in the module"
                for name in _OF_THE_MODULE
                if value(name) not in (None, [])
            ]
            wrong += unsized(value("model")) if isinstance(value("model"), torch.nn.Module) else []
        else:
            wrong += self._objective_mistakes()
        return wrong + self._checkpoint_mistakes() + self._count_mistakes() + self._sharding_mistakes()

    def _sharding_mistakes(self) -> list[str]:
        wrong = super()._sharding_mistakes()
        if not self._saves_shards:
            return wrong
        param = "communication" if self._value("sharding") == "none" else "sharding"
        is_manual = self._has_model and not getattr(self._given_module(), "automatic_optimization", True)
        if is_manual and param == "communication":
            wrong.append(
                "communication is for steps that Lightning takes, and the module has automatic_optimization = False: "
                "leave one of the two out"
            )
        return wrong + [
            f"trainer_args has {name}, which does not work with {param}: leave one of the two out"
            for name in ("strategy", "sync_batchnorm")
            if (self._value("trainer_args") or {}).get(name)
        ]

    @property
    def _scaled_precision(self) -> tuple[str, str] | None:
        precision = (self._value("trainer_args") or {}).get("precision")
        is_scaled = precision in (16, "16", "16-mixed")
        return (f"trainer_args with precision={precision!r}", "'bf16-mixed'") if is_scaled else None

    def _known_module(self) -> torch.nn.Module | None:
        known = super()._known_module()
        is_divided = isinstance(self._value("sharding"), FSDP2) and self._is_lightning_module()
        return with_configured_layers(known) if known is not None and is_divided else known

    def _outer_names(self, model: torch.nn.Module) -> Sequence[str]:
        return called_modules(model) if self._is_lightning_module() else super()._outer_names(model)

    def _checkpoint_mistakes(self) -> list[str]:
        given = self._value("trainer_args") or {}
        more = given.get("callbacks") or []
        callbacks = [*(self._value("callbacks") or []), *(more if isinstance(more, (list, tuple)) else [more])]
        found = [type(one).__name__ for one in callbacks if _is_a(one, "callbacks.checkpoint.Checkpoint")]
        if not found or given.get("enable_checkpointing", True):
            return []
        return [f"trainer_args has enable_checkpointing=False, and callbacks has {found[0]}: leave one of the two out"]

    def _label_keywords(self) -> tuple[str, ...]:
        return () if self._is_lightning_module() else super()._label_keywords()

    def _is_lightning_module(self) -> bool:
        return self._has_model and _is_a(self._given_module(), "core.module.LightningModule")

    def _train_spec(self, trial: TrialRows, store: Store, run_id: str) -> LightningSpec:
        if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
            raise MissingExtraError("lightning", "lightning", "by LightningEstimator")
        value = self._value
        is_lightning, given = self._is_lightning_module(), self._given_module()
        if not is_lazy(given) and (wrong := unsized(with_configured_layers(given))):
            raise ValueError(wrong[0])
        findings = self._findings(trial, is_lightning)
        self._try_scoring(trial, with_configured_layers(self._given_module()), findings)
        shared = self._fit_fields(trial.dataset, store, run_id, trial.seed)
        passed_on = ("train_async_data_loader_queue_size", "val_async_data_loader_queue_size", "loader_num_epochs")
        shared["data_module_args"] |= {name: value(name) for name in passed_on if value(name) is not None}
        shared["data_module_args"] |= {"debug_data_loader": True} if value("debug_data_loader") else {}
        if value("num_gpus") == 0:
            shared["use_gpu"] = False
        model = self._sent_model(findings.inputs, trial.batch)
        whole = with_configured_layers(self._module())
        dtype, labels = floating_dtype(whole), findings.inputs.label_cols
        same = ("logger", "log_every_n_steps", "profiler")
        return LightningSpec(
            model=model,
            optimizer=None if is_lightning else self._optimizer_state(),
            objective=None if is_lightning else self._objective(),
            metrics=self._metric_groups(),
            metric_names=self._metric_names(),
            floating_dtype=dtype,
            whole_labels=whole_labels(whole, trial.batch(), dtype, labels) if is_lightning else (),
            inputs=findings.inputs,
            output_shapes=findings.output_shapes,
            output_names=findings.output_names,
            trainer_args=value("trainer_args") or {},
            **shared,
            **{name: value(name) for name in same},
        )

    def _inputs(self, dataset: Dataset) -> Inputs:
        found = super()._inputs(dataset)
        # training_step() takes what it needs of a batch; forward() takes what transform() reads.
        removed = [] if self._is_lightning_module() else self._value("transformation_removed_fields") or []
        return dataclasses.replace(
            found, feature_cols=tuple(name for name in found.feature_cols if name not in removed)
        )

    def _batch_columns(self, dataset: Dataset) -> tuple[str, ...]:
        return () if self._is_lightning_module() else super()._batch_columns(dataset)

    def _findings(self, trial: TrialRows, is_lightning: bool) -> TrialResult:
        """The inputs and output shapes of the model, tried on a few rows."""
        dataset, batch = trial.dataset, trial.batch()
        transformed = batch
        model = with_configured_layers(self._given_module())
        inputs = self._module_inputs(dataset, batch, model)

        def tried(rows: Mapping[str, torch.Tensor]) -> TrialResult:
            return probe(
                model,
                inputs,
                None if is_lightning else self._objective(),
                self._metric_groups(),
                rows,
                dataset.schema,
                as_stored=is_lightning,  # what training_step gets
                batch_size=self._value("batch_size"),
                output_fn=self._value("output_fn"),
            )

        output_shapes: tuple[tuple[int, ...], ...] = tuple((-1, -1) for _ in inputs.label_cols)
        try:
            if is_lightning:
                batch = {}
                batch = trial.batch(transformed=False)
            return tried(batch)
        except DataError as error:
            if not is_lightning:
                raise
            # The module can be trained nevertheless; transform would raise this error.
            logger.warning("the module cannot be called with the feature columns, as transform calls it: %s", error)
            if self._value("transformation_fn") is not None and transformed.keys() >= set(inputs.feature_cols):
                with suppress(DataError):  # a subclass of the model that predicts by itself has outputs of this shape
                    output_shapes = tried(transformed).output_shapes
        floating = floating_dtype(model)
        dtypes = {name: floating if one.is_floating_point() else _name(one.dtype) for name, one in batch.items()}
        known = dataclasses.replace(
            inputs,
            feature_dtypes=tuple(dtypes.get(name, floating) for name in inputs.feature_cols),
            label_dtypes=tuple(dtypes.get(name, floating) for name in inputs.label_cols),
        )
        return TrialResult(known, output_shapes)

    def _checkpoint(self, store: Store, run_id: str) -> Checkpoint | None:
        found = Checkpoint.load(RunFiles(store, run_id), "lightning")
        if self._saves_shards:
            require_shards(found, run_id)
        if found is not None and not is_lazy(self._given_module()) and self._made is not None:
            made_state.require_same(found.state, self._made[0].made, run_id)
        return found

    def _as_called(self, spec: LightningSpec, model: torch.nn.Module, state: dict[str, Any]) -> LightningSpec:
        if len(dtypes := state["dtypes"]) == len(spec.inputs.arguments):
            return dataclasses.replace(spec, inputs=dataclasses.replace(spec.inputs, feature_dtypes=tuple(dtypes)))
        if spec.objective is None:
            with suppress(Exception):  # transform reports what fails
                rows = self._trial_rows(spec.dataset, spec.seed).batch(transformed=False)
                for found in _uncertain(model.eval(), spec, rows, self._value("output_fn")):
                    logger.warning(_UNCERTAIN_TEXT, *found)
        return spec

    def _train_fn(self) -> Callable[[LightningSpec], TrainResult]:
        return train

    def _untrained_copy(self, spec: LightningSpec, state: dict[str, Any]) -> torch.nn.Module:
        if isinstance(spec.model, ModelSource):
            return with_hooks_called(spec.model.built_again(), state["hooks"])  # type: ignore[no-any-return]
        return after_hooks(spec.model, state["hooks"])  # type: ignore[no-any-return]


@with_params(ESTIMATOR_ROWS, LIGHTNING_ROWS, HOROVOD_ROWS)
class HorovodLightningEstimator(LightningEstimator):
    """:class:`LightningEstimator` of ``horovod.spark.lightning``.

    Learning rates are scaled by default.
    """


def _is_a(one: Any, name: str) -> bool:
    """Whether an object has a class of Lightning, without importing Lightning.

    The class may be that of either package of Lightning.
    """
    return any(f"{cls.__module__}.{cls.__name__}".endswith(name) for cls in type(one).__mro__)


def _uncertain(
    model: torch.nn.Module, spec: LightningSpec, rows: Mapping[str, torch.Tensor], output_fn: Any
) -> Iterator[tuple[str, str, str]]:
    """Features whose dtype changes the outputs: name, dtype, another dtype."""
    inputs = spec.inputs
    dtypes = dict(zip(inputs.arguments, inputs.feature_dtypes, strict=True))

    def outputs(**changed: str) -> list[torch.Tensor]:
        tried = dataclasses.replace(inputs, feature_dtypes=tuple({**dtypes, **changed}.values()))
        with set_aside():
            found = predict(model, tried.features(rows, torch.device("cpu")), output_fn, spec.output_names)
        return [output.double() for output in found]

    for name, dtype in dtypes.items():
        stored = rows[name].dtype
        for other in () if stored.is_floating_point else (_name(stored), "int64", spec.floating_dtype):
            with suppress(Exception):  # the model does not take it
                pairs = zip(outputs(), outputs(**{name: other}), strict=True)
                if not all(torch.allclose(*pair, rtol=1e-3, equal_nan=True) for pair in pairs):
                    yield name, dtype, other
                    break


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
