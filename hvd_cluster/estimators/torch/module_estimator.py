"""What the estimators of modules share: optimizer, loss, metrics, fitted model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.errors import DataError, LaunchError
from hvd_cluster.estimators.backend import Backend
from hvd_cluster.estimators.column_roles import as_group, wrong_counts
from hvd_cluster.estimators.estimator import DistributedEstimator
from hvd_cluster.estimators.fit_data import FitData
from hvd_cluster.estimators.model_factory import name_of
from hvd_cluster.estimators.run.checkpoint import unpacked
from hvd_cluster.estimators.spec import Inputs, MakeObjective, TrainResult
from hvd_cluster.estimators.torch.arguments import label_keywords, with_arguments
from hvd_cluster.estimators.torch.changed_module import trained_module
from hvd_cluster.estimators.torch.checkpoint import shards_of
from hvd_cluster.estimators.torch.model import TorchModel
from hvd_cluster.estimators.torch.model_pickling import copied, make_picklable, module_on_cpu, unpicklable_text
from hvd_cluster.estimators.torch.model_source import ModelSource, is_lazy
from hvd_cluster.estimators.torch.optimizer_state import OptimizerState
from hvd_cluster.estimators.torch.output_scales import output_scales
from hvd_cluster.estimators.torch.probe import TrialResult, scoring_text, with_rows
from hvd_cluster.estimators.torch.strategies.checks import (
    require_divisible,
    require_store,
    wrong_communication,
    wrong_sharding,
)
from hvd_cluster.estimators.torch.train_state import TrainState
from hvd_cluster.estimators.trial_rows import TrialRows

_LBFGS_TEXT = "optimizer: LBFGS needs a closure in each step, which distributed training does not have; use another"
_OPTIMIZER_FUNCTION = "a function that makes it, such as lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4)"
#: A smaller frozen part is not worth a factory.
_MIN_FROZEN_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class ModuleEstimator(DistributedEstimator):
    """Base of TorchEstimator and LightningEstimator."""

    _made: tuple[ModelSource, torch.nn.Module] | None

    def _fit_data(self, data: FitData, names: list[str], backend: Backend) -> Any:
        if self._saves_shards:
            require_store(self._value("store"), data.keeps_with_driver)
        try:
            return super()._fit_data(data, names, backend)
        finally:
            self._made = None

    def _fit_fields(self, *args: Any) -> dict[str, Any]:
        fields = super()._fit_fields(*args)
        return {**fields, "torch_backend": "hvd"} if self._saves_shards else fields

    @property
    def _saves_shards(self) -> bool:
        """Whether workers hold different tensors, and train on our process group."""
        return bool(self._value("sharding") != "none" or self._value("communication") != "every_step")

    def _check_picklable(self) -> None:
        for name in ("model", "loss", "metrics"):
            make_picklable(self._value(name))
        model = self._value("model")
        if isinstance(model, torch.nn.Module) and (text := unpicklable_text("model", model)):
            raise LaunchError(text)
        super()._check_picklable()
        if isinstance(model, torch.nn.Module):
            self._say_frozen(model)

    def _say_frozen(self, model: torch.nn.Module) -> None:
        """Name ModelFactory if most of a large module is frozen: all of it is stored."""
        sizes = {True: 0, False: 0}
        for parameter in model.parameters():
            if not torch.nn.parameter.is_lazy(parameter):
                sizes[parameter.requires_grad] += parameter.nbytes
        if sizes[False] > max(sizes[True], _MIN_FROZEN_BYTES):
            self._say(
                f"model: {sizes[False] / sum(sizes.values()):.0%} of its bytes are frozen, and each checkpoint holds "
                "all of it; model=ModelFactory(fn, *args) sends and stores only what trains"
            )

    def _as_saved(self, name: str, value: Any) -> Any:
        make_picklable(value)
        return super()._as_saved(name, value)

    @property
    def _has_model(self) -> bool:
        """Whether ``model`` is a module or a function that makes one."""
        return callable(self._value("model"))

    def _given_module(self) -> torch.nn.Module:
        """The model, to copy before changes; a factory makes it once, before workers run.

        Raises:
            DataError: the factory failed, or returned something else.
        """
        given = self._value("model")
        if isinstance(given, torch.nn.Module):
            return given
        if self._made is None or self._made[0].factory is not given:
            self._made = ModelSource.of(given, self._value("random_seed") or 0)
        return self._made[1]

    def _module(self) -> torch.nn.Module:
        """The same on the CPU."""
        return module_on_cpu(self._given_module())

    def _sent_model(
        self, inputs: Inputs, first_rows: Callable[[], Mapping[str, torch.Tensor]]
    ) -> torch.nn.Module | ModelSource:
        """What workers get their model from: a module, or a factory that they call.

        Args:
            inputs: with the dtypes that the trial found.
            first_rows: returns a few rows as in training, which give lazy layers of a factory's module their shapes.
        """
        model = self._module()
        if self._made is None:
            return model
        if is_lazy(model):
            self._made = self._made[0].sized(inputs.features(with_rows(first_rows(), 2), torch.device("cpu")))
        return self._made[0]

    def _optimizer_state(self) -> OptimizerState:
        """The optimizer for the workers.

        Raises:
            ValueError: it does not hold parameters of the model, or does not work with ``sharding=``, or the function
                of ``optimizer=`` makes no optimizer.
        """
        given, model = self._value("optimizer"), self._given_module()
        optimizer = given if isinstance(given, torch.optim.Optimizer) else made_optimizer(given, model)
        require_divisible(self._value("sharding"), optimizer)
        return OptimizerState.of(optimizer, model)

    def _optimizer_mistakes(self) -> list[str]:
        given, model = self._value("optimizer"), self._value("model")
        is_module = isinstance(model, torch.nn.Module)
        if isinstance(given, torch.optim.LBFGS):
            return [_LBFGS_TEXT]
        if _is_class(given, torch.optim.Optimizer):
            return [f"optimizer has the class {given.__name__}: give {_OPTIMIZER_FUNCTION}"]
        if not callable(given) and self._has_model and not is_module:
            return [f"optimizer: {name_of(model)} makes the parameters on each worker, so give {_OPTIMIZER_FUNCTION}"]
        if not isinstance(given, torch.optim.Optimizer) and not callable(given):
            what = "optimizer is required" if given is None else f"optimizer={given!r} is not an optimizer"
            return [f"{what}: give a torch.optim.Optimizer over model.parameters()"]
        if not self._has_model or (not is_module and is_lazy(self._given_module())):
            return []  # the trial's rows give lazy parameters of a factory's module their shapes
        if is_module and (wrong := unsized(model)):
            return wrong
        try:
            self._optimizer_state()
        except ValueError as error:
            return [str(error)]
        return []

    def _sharding_mistakes(self) -> list[str]:
        known = self._known_module()
        return wrong_sharding(self._value, known, self._outer_names) + wrong_communication(
            self._value, known, self._scaled_precision
        )

    @property
    def _scaled_precision(self) -> tuple[str, str] | None:
        """The param with which a scaler skips steps, and the value instead; or None."""
        return None

    def _outer_names(self, model: torch.nn.Module) -> Sequence[str]:
        """Names of modules that a step calls from outside, which full sharding divides."""
        return ("",)

    def _known_module(self) -> torch.nn.Module | None:
        return self._given_module() if self._has_model else None

    def _objective_mistakes(self) -> list[str]:
        """Mistakes in optimizer, loss and metrics."""
        value = self._value
        wrong = self._optimizer_mistakes()
        if value("loss") is not None and value("loss_constructors") is not None:
            wrong.append("only one of loss_constructors and loss parameters can be specified.")
        if value("loss") is None and value("loss_constructors") is None:
            if not self._label_keywords():
                wrong.append(
                    "loss is required: give fn(output, label) -> scalar tensor, or a model whose forward() takes the "
                    "labels, as 'labels' or by their columns' names, and returns its own loss"
                )
            wrong += [
                f"{name} has no effect on the loss that the model computes itself: give loss="
                for name in ("loss_weights", "sample_weight_col", "class_weights")
                if name in self.param_rows and value(name) is not None
            ]
        return wrong + _classes({"loss": value("loss"), "metrics": value("metrics")})

    def _count_mistakes(self) -> list[str]:
        """Lists that do not have one entry for each column."""
        value = self._value
        labels = value("label_cols") or []
        for_labels = {name: value(name) for name in ("loss", "loss_constructors", "loss_weights", "label_shapes")}
        for_labels.update({f"metrics[{name!r}]": group for name, group in self._metrics_given()})
        wrong = wrong_counts(for_labels, len(labels), "label columns") if labels else []
        if value("feature_cols"):
            wrong += wrong_counts(
                {"input_shapes": value("input_shapes")}, len(value("feature_cols")), "feature columns"
            )
        return wrong

    def _label_keywords(self) -> tuple[str, ...]:
        """The parameters by which the model gets labels, if the only loss is its own."""
        if self._value("loss") is not None or self._value("loss_constructors") is not None:
            return ()
        return label_keywords(self._given_module(), self._value("label_cols") or []) if self._has_model else ()

    def _module_inputs(self, dataset: Dataset, batch: Mapping[str, torch.Tensor], model: torch.nn.Module) -> Inputs:
        """The inputs of a module, of which the trial then finds the dtypes.

        Args:
            batch: a few rows as in training.
        """
        inputs = dataclasses.replace(
            self._inputs(dataset),
            input_shapes=as_tuples(self._value("input_shapes")),
            label_keywords=self._label_keywords(),
        )
        if self._value("preprocess") is None:
            return inputs
        made = {name: tensor for name, tensor in batch.items() if name not in self._stored_columns()}
        for keyword, label in zip(inputs.label_keywords, inputs.label_cols, strict=False):
            if keyword in made:
                raise DataError(
                    f"preprocess returned {keyword!r}, by which the model gets the label column {label!r} to compute "
                    "its loss: leave it out, or give loss="
                )
        return with_arguments(inputs, model, made)

    def _try_scoring(self, trial: TrialRows, model: torch.nn.Module, found: TrialResult) -> None:
        """Call ``preprocess`` and model as ``transform`` will; warn if the model fails.

        Raises:
            DataError: ``preprocess`` fails, or returns other names than in training.
        """
        if self._value("preprocess") is None:
            return
        if text := scoring_text(model, found, trial.scored(found.inputs), self._value("output_fn")):
            logger.warning("the model can be trained, but transform would fail or give other outputs: %s", text)

    def _objective(self) -> MakeObjective:
        value = self._value
        count, make = len(value("label_cols")), value("loss_constructors")
        given = make if make is not None else value("loss")
        return MakeObjective(
            losses=() if given is None else tuple(module_on_cpu(one) for one in as_group(given, count)),
            constructed=make is not None,
            loss_weights=tuple(value("loss_weights") or [1 / count] * count),
            label_shapes=as_tuples(value("label_shapes")),
            output_fn=value("output_fn"),
            label_cols=tuple(value("label_cols")),
        )

    def _metric_groups(self) -> tuple[tuple[Any, ...], ...]:
        groups = (as_group(group, len(self._value("label_cols"))) for _, group in self._metrics_given())
        return tuple(tuple(module_on_cpu(metric) for metric in group) for group in groups)

    def _metric_names(self) -> tuple[tuple[str, ...], ...]:
        """A name for each metric of each group: given, or Horovod's ``group_0_<label>``."""
        labels = self._value("label_cols")

        def names(key: str | int) -> tuple[str, ...]:
            if isinstance(key, int):
                return tuple(f"group_{key}_{label}" for label in labels)
            return (key,) if len(labels) == 1 else tuple(f"{key}_{label}" for label in labels)

        return tuple(names(key) for key, _ in self._metrics_given())

    def _metrics_given(self) -> list[tuple[str | int, Any]]:
        """Each entry of ``metrics``, with its name or its index."""
        given = self._value("metrics") or []
        return list(given.items() if isinstance(given, dict) else enumerate(given))

    def _create_model(self, results: list[TrainResult], spec: Any) -> Any:
        state = unpacked(results[0].state)
        if (changed := trained_module(state)) is not None:
            model, optimizer = changed[0], None
            if spec.optimizer is not None and changed[1] is not None:
                optimizer = spec.optimizer.at(changed[1]).build(model)
                optimizer.load_state_dict(state["optimizer"])
        else:
            model = self._untrained_copy(spec, state).cpu()
            optimizer = None if spec.optimizer is None else spec.optimizer.build(model)
            made = spec.model.made if isinstance(spec.model, ModelSource) else None
            trained = TrainState(model, optimizer, made=made)
            shards = shards_of(spec.store, spec.run_id, state)
            trained.load(state["model"], state["optimizer"], shards)
            if shards is not None and state.get("deletes_shards"):
                with contextlib.suppress(OSError):  # no checkpoint names them
                    shards.delete()
        if isinstance(spec.model, ModelSource):
            self._made = (spec.model, model)
        spec = self._as_called(spec, model, state)
        scales = output_scales(model, self._objective()().losses, len(spec.output_shapes))
        metadata = {**self._metadata_of(spec), "output_scales": scales}
        arguments = self._get_model_kwargs(model.eval(), results[0].history, optimizer, spec.run_id, metadata)
        if isinstance(spec.model, ModelSource):
            arguments["model_factory"] = spec.model
        return self.get_model_class()(**arguments)

    def _untrained_copy(self, spec: Any, state: dict[str, Any]) -> torch.nn.Module:
        """A copy of the spec's model that the weights of ``state`` fit."""
        return spec.model.built_again() if isinstance(spec.model, ModelSource) else copied(spec.model)

    def _as_called(self, spec: Any, model: torch.nn.Module, state: dict[str, Any]) -> Any:
        """The spec, with the dtypes in which the trained model is to be called."""
        return spec

    def get_model_class(self) -> type[Any]:
        return TorchModel

    def _get_model_kwargs(
        self,
        model: torch.nn.Module,
        history: list[dict[str, Any]],
        optimizer: Any,
        run_id: str,
        metadata: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            **super()._get_model_kwargs(model, history, optimizer, run_id, metadata),
            "optimizer": optimizer,
            "input_shapes": self._value("input_shapes"),
            "loss": self._value("loss"),
            "loss_constructors": self._value("loss_constructors"),
            "output_fn": self._value("output_fn"),
        }


def made_optimizer(make: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """What the user's function ``optimizer=`` makes for the model.

    Raises:
        ValueError: it failed, or returned something else.
    """
    try:
        optimizer = make(model)
    except Exception as error:  # the user's own code, which may raise anything
        raise ValueError(f"optimizer: {name_of(make)} failed: {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer: {name_of(make)} must return a torch.optim.Optimizer, not an object of type "
            f"{type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(_LBFGS_TEXT)
    return optimizer


def _is_class(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _classes(params: dict[str, Any]) -> list[str]:
    """A mistake for each class of modules among functions: calls would make modules."""
    return [
        f"{name} has the class {one.__name__}: give an instance of it, {one.__name__}()"
        for name, value in params.items()
        for one in _flat(value)
        if _is_class(one, torch.nn.Module)
    ]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [one for entry in value for one in _flat(entry)] if isinstance(value, (list, tuple)) else [value]


def unsized(model: torch.nn.Module) -> list[str]:
    """A mistake if parameters have no shape yet: workers cannot make them equal."""
    lazy = [name for name, one in model.named_parameters() if isinstance(one, torch.nn.UninitializedParameter)]
    if not lazy:
        return []
    remedy = "call the model once with rows like those of the data, and build the optimizer after that"
    return [f"model: {', '.join(lazy)} have no shape yet, as in LazyLinear: {remedy}"]


def as_tuples(shapes: list[list[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    """Shapes as a spec has them."""
    return None if shapes is None else tuple(tuple(shape) for shape in shapes)
