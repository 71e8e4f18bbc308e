"""KerasEstimator: a DataFrame and a Keras model in, a KerasModel out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvd_cluster.data.store import Store
from hvd_cluster.engine.objects import dumps
from hvd_cluster.estimators.column_roles import wrong_counts
from hvd_cluster.estimators.estimator import DistributedEstimator
from hvd_cluster.estimators.keras.model import KerasModel
from hvd_cluster.estimators.keras.model_source import KerasModelSource, made
from hvd_cluster.estimators.keras.output_scales import output_scales
from hvd_cluster.estimators.keras.packed_model import PackedModel, compilation_of
from hvd_cluster.estimators.keras.params import KERAS_ROWS, KerasStage, wrong_model
from hvd_cluster.estimators.keras.spec import Extras, KerasSpec
from hvd_cluster.estimators.keras.state import restore
from hvd_cluster.estimators.keras.structure import keys_of, outputs_of
from hvd_cluster.estimators.keras.train import train
from hvd_cluster.estimators.params import ESTIMATOR_ROWS, with_params
from hvd_cluster.estimators.run.checkpoint import Checkpoint, unpacked
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.spec import TrainResult
from hvd_cluster.estimators.torch.made_state import require_same
from hvd_cluster.estimators.trial_rows import TrialRows
from hvd_cluster.estimators.typed_params import KerasEstimatorParams


@with_params(ESTIMATOR_ROWS, KERAS_ROWS)
class KerasEstimator(KerasEstimatorParams, KerasStage, DistributedEstimator):
    """Train a Keras 3 model on several workers; ``fit`` makes a :class:`KerasModel`.

    ``fit(data)`` takes what :class:`TorchEstimator`'s takes. Workers run Keras on the backend that the model was made
    on: TensorFlow, torch or JAX.

    Each feature column is one input of the model, in order (by name if the model takes a dict), in the input's shape
    and dtype; each label column belongs to one output. The model may be compiled; ``optimizer``, ``loss``, ``metrics``
    and ``loss_weights`` then replace what it was compiled with. A model with its own ``compute_loss`` needs no loss.
    The learning rate is multiplied by the number of workers unless ``scale_lr=False``.

    ``model`` may be a function without parameters (or :class:`ModelFactory`) that makes a model with weights, as for
    :class:`TorchEstimator`: weights that do not train and keep the values of the function are not stored.

    ``callbacks`` are Keras's, and run on every rank. They see the means of an epoch's numbers over all ranks, and the
    validation's numbers over all its rows. With a ``checkpoint_callback`` that only saves the best epoch, the weights
    of that epoch are returned; its file is in the run's folder in the store. After each epoch, and within epochs with
    ``checkpoint_every_steps``, rank 0 writes a checkpoint to the store; a fit with the same ``run_id`` continues from
    it. ``EarlyStopping``, ``ReduceLROnPlateau`` and ``ModelCheckpoint`` keep their state; callbacks of other classes
    start from their initial state.

    Raises (from fit, before any worker starts):
        ValueError: params that are missing or contradict each other, and columns that do not exist, all at once.
        DataError: the data or the store cannot be used, or the model or its loss does not fit the columns.
        LaunchError: something cannot be sent to the workers, or they cannot be started.
    Raises (later):
        WorkerFailedError: a worker raised or died; the text begins with the user's own traceback.
    """

    run_prefix = "keras"

    def _fit_data(self, *args: Any) -> Any:
        try:
            return super()._fit_data(*args)
        finally:
            self._made = None

    @property
    def _is_factory(self) -> bool:
        return callable(self._value("model")) and bool(wrong_model(self._value("model")))

    def _given_model(self) -> Any:
        """The model; a factory makes it once before the workers start.

        Raises:
            DataError: the factory failed, or returned something else.
        """
        if not self._is_factory:
            return self._value("model")
        if self._made is None:
            self._made = made(self._value("model"), self._value("random_seed") or 0)
        return self._made

    def _packed(self) -> PackedModel:
        """The model, compiled for the fit."""
        model, objects, compilation = self._given_model(), self._value("custom_objects"), self._compilation()
        if not self._is_factory:
            return PackedModel.of(model, objects, compilation)
        return KerasModelSource.by(self._value("model"), self._value("random_seed") or 0, model, objects, compilation)

    def _mistakes(self) -> list[str]:
        value = self._value
        self._made = None
        wrong = [text for text in [wrong_model(self._given_model())] if text]
        compiled = (compilation_of(self._given_model()) or {}) if not wrong else {}
        if value("optimizer") is None and compiled.get("optimizer") is None:
            wrong.append("optimizer is required: give a Keras optimizer, or compile the model with one")
        has_loss = value("loss") is not None or compiled.get("loss") is not None
        if not has_loss and not (wrong_model(self._given_model()) == "" and _computes_loss(self._given_model())):
            wrong.append(
                "loss is required: give a Keras loss, or compile the model with one, or give a model with a "
                "compute_loss() of its own"
            )
        labels = value("label_cols") or []
        counted = {name: value(name) for name in ("loss", "loss_weights", "label_shapes")}
        wrong += wrong_counts(counted, len(labels), "label columns") if labels else []
        if value("backward_passes_per_step") > 1 and not wrong and _backend() == "jax":
            wrong.append(
                "backward_passes_per_step is not available on Keras's JAX backend: use the optimizer's own "
                "gradient_accumulation_steps"
            )
        return wrong

    def _unpickled_params(self) -> dict[str, Any]:
        # The model and the optimizer are sent in Keras's format; loading them imports the classes of the layers.
        model = self._given_model()
        layers = {type(layer) for layer in (model, *model._flatten_layers())}
        own = sorted(layers, key=lambda cls: cls.__qualname__)
        return {**self._sent_params(), "model": own, "optimizer": type(self._value("optimizer"))}

    def _compilation(self) -> dict[str, Any]:
        """The arguments of ``compile``: params, else what the model was compiled with."""
        import keras

        given = {name: self._value(name) for name in ("optimizer", "loss", "metrics", "loss_weights")}
        chosen = {name: value for name, value in given.items() if value is not None and value != []}
        if "optimizer" in chosen:
            chosen["optimizer"] = keras.optimizers.get(chosen["optimizer"])
        return {**(compilation_of(self._given_model()) or {}), **self._by_label(chosen)}

    def _by_label(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """Losses and metrics by output name, for a functional model with extra outputs."""
        labels, names = self._value("label_cols") or [], keys_of(outputs_of(self._given_model())) or ()
        if not set(labels) < set(names):
            return chosen
        given: dict[str, Any] = {name: chosen[name] for name in ("loss", "metrics") if name in chosen}
        for name, value in given.items():
            if not isinstance(value, Mapping):
                several = isinstance(value, (list, tuple)) and len(value) == len(labels) > 1
                given[name] = dict(zip(labels, value if several else [value] * len(labels), strict=True))
        return {**chosen, **given}

    def _train_spec(self, trial: TrialRows, store: Store, run_id: str) -> KerasSpec:
        from hvd_cluster.estimators.keras.trial import try_model

        value, dataset = self._value, trial.dataset
        given = self._packed()
        model = given.load(run_eagerly=True)
        shapes, batch = value("label_shapes"), trial.batch()
        others = self._batch_columns(dataset)
        columns, output_shapes = try_model(
            model,
            self._inputs(dataset),
            None if shapes is None else tuple(tuple(shape) for shape in shapes),
            batch,
            dataset.schema,
            None if value("preprocess") is None else [name for name in batch if name not in others],
        )
        if value("preprocess") is not None:
            trial.scored(columns.inputs)
        # The trial has built the weights.
        built = given if self._is_factory else PackedModel.of(model, value("custom_objects"), self._compilation())
        built.load(rate_factor=2.0 if value("scale_lr") else 1.0)  # raises if the rate cannot be multiplied
        extras = Extras(tuple(value("callbacks") or []), value("checkpoint_callback"), value("gradient_compression"))
        shared = self._fit_fields(dataset, store, run_id, trial.seed)
        # Unpickling these imports Keras.
        shared |= {"callbacks": (), "gradient_compression": None}
        return KerasSpec(
            model=built,
            columns=columns,
            extras=dumps(extras),
            backend_env=value("backend_env"),
            prefetch=value("tensorflow_dataset_prefetch_buffer_size"),
            inputs=columns.inputs,
            output_shapes=output_shapes,
            output_names=() if len(output_shapes) == len(columns.inputs.label_cols) else columns.output_keys or (),
            **shared,
        )

    def _checkpoint(self, store: Store, run_id: str) -> Checkpoint | None:
        found = Checkpoint.load(RunFiles(store, run_id), "weights")
        if found is not None and self._given_model().built:
            mine = self._packed()
            if mine.made is not None:
                require_same(found.state, mine.made, run_id)
            restore(mine.load(), found.state, run_id)
        return found

    def _train_fn(self) -> Callable[[KerasSpec], TrainResult]:
        return train

    def _create_model(self, results: list[TrainResult], spec: KerasSpec) -> Any:
        model = spec.model.load()
        if isinstance(spec.model, KerasModelSource):
            spec.model.require_same(model)
            self._made = model
        restore(model, unpacked(results[0].state), spec.run_id)
        keys, loss = spec.columns.output_keys, self._compilation().get("loss")
        scales = output_scales(model, loss, len(spec.output_shapes), keys)
        own = {"input_shapes": spec.inputs.input_shapes, "output_keys": keys, "output_scales": scales}
        metadata = {**self._metadata_of(spec), **own}
        arguments = self._get_model_kwargs(model, results[0].history, model.optimizer, spec.run_id, metadata)
        if isinstance(spec.model, KerasModelSource):
            arguments["model_factory"] = spec.model
        return self.get_model_class()(**arguments)

    def get_model_class(self) -> type[Any]:
        return KerasModel

    def _get_model_kwargs(
        self, model: Any, history: list[dict[str, Any]], optimizer: Any, run_id: str, metadata: dict[str, Any]
    ) -> dict[str, Any]:
        import keras

        return {
            **super()._get_model_kwargs(model, history, optimizer, run_id, metadata),
            "custom_objects": self._value("custom_objects"),
            "_floatx": keras.config.floatx(),
        }


def _computes_loss(model: Any) -> bool:
    import keras

    return type(model).compute_loss is not keras.Model.compute_loss


def _backend() -> str:
    import keras

    return str(keras.config.backend())
