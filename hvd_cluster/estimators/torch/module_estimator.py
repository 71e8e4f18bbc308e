"""What TorchEstimator and LightningEstimator share: optimizer, loss and metrics, and the model they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.errors import LaunchError
from hvd_cluster.estimators.column_roles import as_group, wrong_counts
from hvd_cluster.estimators.estimator import DistributedEstimator
from hvd_cluster.estimators.run.checkpoint import unpacked
from hvd_cluster.estimators.spec import Inputs, MakeObjective, TrainResult
from hvd_cluster.estimators.torch.arguments import label_keywords, with_arguments
from hvd_cluster.estimators.torch.model import TorchModel
from hvd_cluster.estimators.torch.model_pickling import copied, make_picklable, module_on_cpu, unpicklable_text
from hvd_cluster.estimators.torch.optimizer_state import OptimizerState


class ModuleEstimator(DistributedEstimator):
    """Base of TorchEstimator and LightningEstimator."""

    def _check_picklable(self) -> None:
        for name in ("model", "loss", "metrics"):
            make_picklable(self._value(name))
        if text := unpicklable_text("model", self._value("model")):
            raise LaunchError(text)
        super()._check_picklable()

    def _as_saved(self, name: str, value: Any) -> Any:
        make_picklable(value)
        return super()._as_saved(name, value)

    def _objective_mistakes(self) -> list[str]:
        """Mistakes in optimizer, loss and metrics."""
        value = self._value
        wrong = []
        if not isinstance(value("optimizer"), torch.optim.Optimizer):
            wrong.append("optimizer is required: give a torch.optim.Optimizer over model.parameters()")
        elif isinstance(value("optimizer"), torch.optim.LBFGS):
            wrong.append(
                "optimizer: LBFGS needs a closure in each step, which distributed training does not have; use another"
            )
        elif isinstance(value("model"), torch.nn.Module):
            wrong += unsized(value("model"))
            try:
                OptimizerState.of(value("optimizer"), value("model"))
            except ValueError as error:
                wrong.append(str(error))
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
        """The parameters by which the model gets the labels, if there is no other loss than its own."""
        if self._value("loss") is not None or self._value("loss_constructors") is not None:
            return ()
        model = self._value("model")
        return label_keywords(model, self._value("label_cols") or []) if isinstance(model, torch.nn.Module) else ()

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
        made = {name: tensor for name, tensor in batch.items() if name not in self._batch_columns(dataset)}
        return with_arguments(inputs, model, made)

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
        )

    def _metric_groups(self) -> tuple[tuple[Any, ...], ...]:
        groups = (as_group(group, len(self._value("label_cols"))) for _, group in self._metrics_given())
        return tuple(tuple(module_on_cpu(metric) for metric in group) for group in groups)

    def _metric_names(self) -> tuple[tuple[str, ...], ...]:
        """A name for each metric of each group: the user's, or Horovod's ``group_0_<label>``."""
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
        model = self._untrained_copy(spec, state).cpu()
        model.load_state_dict(state["model"])
        optimizer = None
        if spec.optimizer is not None:
            optimizer = spec.optimizer.build(model)
            optimizer.load_state_dict(state["optimizer"])
        arguments = self._get_model_kwargs(
            model.eval(), results[0].history, optimizer, spec.run_id, self._metadata_of(spec)
        )
        return self.get_model_class()(**arguments)

    def _untrained_copy(self, spec: Any, state: dict[str, Any]) -> torch.nn.Module:
        """A copy of the spec's model that the weights of ``state`` fit."""
        model: torch.nn.Module = copied(spec.model)
        return model

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


def _classes(params: dict[str, Any]) -> list[str]:
    """A mistake for each class of modules among functions: calling it with output and label would make a module."""
    return [
        f"{name} has the class {one.__name__}: give an instance of it, {one.__name__}()"
        for name, value in params.items()
        for one in _flat(value)
        if isinstance(one, type) and issubclass(one, torch.nn.Module)
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
