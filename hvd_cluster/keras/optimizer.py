"""Keras optimizers that reduce gradients over all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from hvd_cluster.elastic.keras_model import origin_of_optimizer, variables_of_layers
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.reduction_config import Groups, ReductionConfig
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.keras.compression import Compression, Compressor
from hvd_cluster.keras.gradient_accumulation import GradientAccumulator
from hvd_cluster.keras.loss_scale import distribute_loss_scale, patch_loss_scale_optimizer
from hvd_cluster.keras.naming import subclass_saved_as
from hvd_cluster.keras.pickling import PickledDistribution, patch_models
from hvd_cluster.keras.reduction import reduction_of_backend
from hvd_cluster.keras.reduction.reducer import Reduction
from hvd_cluster.keras.timed_calls import time_calls_of_keras
from hvd_cluster.monitor.step_clock import step_clock
from hvd_cluster.torch.timed_calls import time_calls_of_torch


@none_is_default
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer like ``optimizer`` that applies gradients reduced over all ranks.

    It has the state of ``optimizer``. A compiled model saves the optimizer under its original class, so that the model
    loads without this package. On TensorFlow, XLA cannot compile a step with a reduction: ``jit_compile="auto"`` means
    False, and ``jit_compile=True`` raises at the first step.

    Args:
        optimizer: a Keras optimizer, built or not. With a ``LossScaleOptimizer``, inside or outside (``model.compile``
            creates one for mixed_float16), either all ranks skip a step or none.
        name: the name of the new optimizer; by default that of ``optimizer``.
        device_dense: accepted and ignored.
        device_sparse: accepted and ignored.
        compression: how gradients are compressed for transfer.
        sparse_as_dense: convert ``tf.IndexedSlices`` to dense gradients first.
        gradient_predivide_factor: divides an average by this before the sum and by the rest after it.
        op: Average or Sum.
        backward_passes_per_step: backward passes whose gradients each rank accumulates before they are reduced and
            applied.
        average_aggregated_gradients: divide the accumulated gradients by the number of passes.
        num_groups: an older name for ``groups`` as a number.
        groups: the number of groups, or lists of variables whose gradients are reduced together. By default as few
            requests as possible.
        process_set: the ranks that take part; other ranks apply their own gradients.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.

    Raises:
        ValueError: ``optimizer`` is not a Keras optimizer, ``op`` is neither Average nor Sum, or the options contradict
            each other.
    """
    del device_dense, device_sparse
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer expects a Keras optimizer, got {origin_of_optimizer(optimizer)}")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"op={op} is not supported: use hvd.Average or hvd.Sum")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be >= 1")
    config = ReductionConfig(
        op=ReduceOp(op),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return _distributed_by(config, backward_passes_per_step, average_aggregated_gradients, optimizer, name)


def _distributed_by(config: ReductionConfig, steps: int, average: bool, optimizer: Any, name: str | None = None) -> Any:
    accumulator = GradientAccumulator(steps, average=average)
    wrapped = _distributed(optimizer, name, _Distribution(reduction_of_backend()(config), accumulator))
    patch_loss_scale_optimizer(_DistributedOptimizer)
    patch_models(_distribution_of_model, _unpickled)
    _time_calls()
    if keras.backend.backend() == "tensorflow":
        _disable_auto_jit()
    return wrapped


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`DistributedOptimizer` that does not reduce the gradients of some layers.

    Args:
        local_layers: a Keras layer or a list of them, built, whose trainable weights are excluded from the reduction.

    Raises:
        ValueError: ``local_layers`` contains something else, or as for :func:`DistributedOptimizer`.
    """
    variables = variables_of_layers(local_layers)
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in variables:
        wrapped.register_local_var(variable)
    return wrapped


#: The attribute of an optimizer whose variables a distributed one uses.
_IS_TAKEN = "_hvd_is_taken"


class _DistributedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc,unused-ignore]
    """The methods that precede those of the wrapped optimizer's class."""

    _hvd: _Distribution
    #: That of the optimizer for which the class was made.
    _class_distribution: _Distribution

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Distribute a new optimizer of this class, made by ``from_config``, alike."""
        super().__init__(*args, **kwargs)
        self.__dict__["_hvd"] = self._class_distribution.fresh_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A distributed copy, without state, which belongs to this one's variables.

        Keras's own method would copy the wrapped optimizer, which is what it saves.
        """
        return type(self).from_config(self.get_config())

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle of a distributed optimizer, without state, as Keras's is."""
        plain: Any = type(self).__bases__[1]
        return _unpickled, (plain.from_config, (self.get_config(),), self._hvd.pickled(None))

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the reduction; its gradient may be scaled."""
        self._hvd.reduction.keep_local(var)

    @property
    def variables(self) -> Any:
        """The optimizer's variables, as a list that older programs may also call."""
        return _Variables(self._hvd.accumulator.visible(super().variables))

    def build(self, variables: Any) -> None:
        """Create the optimizer's variables."""
        super().build(variables)
        self._hvd.accumulator.build(self, variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce and apply gradients; only add them if more passes make a step."""
        gradients = list(grads)
        if not gradients:
            return
        if trainable_variables is None and not (self.built and len(gradients) == len(self._trainable_variables)):
            super().apply(gradients)  # raises an explanation
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        self._hvd.passes.is_compiled = not self._hvd.reduction.is_eager
        if self._hvd.accumulator.steps == 1:
            self._apply_reduced(self._hvd.reduction(gradients, variables), trainable_variables)
            return
        if not self.built:
            self.build(variables)
        self._hvd.accumulator.add(
            gradients, variables, self, self._hvd.reduction, lambda reduced: self._apply_reduced(reduced, variables)
        )

    def _apply_reduced(self, gradients: list[Any], trainable_variables: Any) -> None:
        """Apply gradients; a compiled step ends with the callback that reduced them."""
        if not self._hvd.reduction.is_eager:
            super().apply(gradients, trainable_variables)
            return
        with step_clock.update():
            super().apply(gradients, trainable_variables)

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        """Update the averages of ``use_ema``; Keras calls this in each step."""
        super()._update_model_variables_moving_average(trainable_variables)
        self._hvd.accumulator.start_averages(self)

    def has_made_silent_step(self) -> bool:
        """Whether the last pass ended a step that no callback has reported."""
        passes = self._hvd.passes
        if not passes.is_compiled or not self._hvd.reduction.is_alone:
            return False
        passes.count += 1
        return passes.count % self._hvd.accumulator.steps == 0

    def _allreduce(self, grads: Any, vars: Any = None) -> list[Any]:
        """The reduced gradients, for programs that override ``apply_gradients``."""
        return self._hvd.reduction(list(grads), list(self._trainable_variables if vars is None else vars))

    _allreduce_grads = _allreduce

    def complete_passes(self) -> None:
        """Take a step with the passes since the last one, at the end of an epoch.

        They are averaged if gradients are. Call it outside compiled functions, on every rank.
        """
        base, variables = super().apply, self._trainable_variables
        self._hvd.accumulator.complete(variables, self, self._hvd.reduction, lambda reduced: base(reduced, variables))

    def on_all_ranks(self, condition: Any) -> Any:
        """Whether ``condition``, a boolean tensor of shape (), holds on all ranks."""
        return self._hvd.reduction.on_all_ranks(condition)

    def without_accumulators(self) -> AbstractContextManager[None]:
        """Limit ``variables`` to the wrapped optimizer's, to save or load a model."""
        return self._hvd.accumulator.hide()

    def save_own_variables(self, store: Any) -> None:
        """Save the wrapped optimizer's variables."""
        with self.without_accumulators():
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the wrapped optimizer's variables."""
        with self.without_accumulators():
            super().load_own_variables(store)


@dataclass
class _Passes:
    """The passes of an optimizer, for the step clock."""

    #: Whether the last one was traced.
    is_compiled: bool = False
    #: The number of compiled ones of a single rank.
    count: int = 0


@dataclass(frozen=True)
class _Distribution:
    """What a distributed optimizer has in addition to the wrapped one."""

    reduction: Reduction
    accumulator: GradientAccumulator
    passes: _Passes = field(default_factory=_Passes)

    def pickled(self, weights: Any) -> PickledDistribution:
        """The same, to be pickled with a model's ``weights``; None for an optimizer."""
        return PickledDistribution.of(
            self.reduction.config,
            list(self.reduction.local_variables.values()),
            self.accumulator.steps,
            self.accumulator.average,
            weights=weights,
            key=self.reduction.key,
        )

    def fresh_copy(self) -> _Distribution:
        """The same for another optimizer, without any pass so far."""
        local = dict(self.reduction.local_variables)
        return _Distribution(replace(self.reduction, local_variables=local), self.accumulator.fresh_copy())


def _distributed(optimizer: Any, name: str | None, distribution: _Distribution) -> Any:
    """An optimizer like ``optimizer`` that reduces by ``distribution``.

    It takes over the state; one that is made of the same optimizer later has none.
    """
    if isinstance(getattr(optimizer, "inner_optimizer", optimizer), _DistributedOptimizer):
        raise ValueError("this optimizer is already distributed")
    optimizer = _taken(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return distribute_loss_scale(_distributed(optimizer.inner_optimizer, None, distribution), optimizer, name)
    kind = subclass_saved_as(type(optimizer), _DistributedOptimizer)
    kind._class_distribution = distribution
    wrapped = object.__new__(kind)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__["_hvd"] = distribution
    if name is not None:
        wrapped.name = name
    if wrapped.built:
        distribution.accumulator.build(wrapped, wrapped._trainable_variables)
    return wrapped


def _distribution_of_model(model: Any) -> PickledDistribution | None:
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner._hvd.pickled(model.weights) if isinstance(inner, _DistributedOptimizer) else None


def _unpickled(make: Any, arguments: tuple[Any, ...], distribution: PickledDistribution) -> Any:
    """What ``make`` makes, distributed, unless it is a model that is not compiled."""
    made = make(*arguments)
    is_model = isinstance(made, keras.Model)
    plain = getattr(made, "optimizer", None) if is_model else made
    if plain is None:
        return made
    weights = made.weights if is_model else []
    config = distribution.config_for(weights)
    optimizer = _distributed_by(config, distribution.steps, distribution.average, plain)
    for position in distribution.local:
        optimizer.register_local_var(weights[position])
    if is_model:
        replace_optimizer(made, optimizer)
    return made if is_model else optimizer


def replace_optimizer(model: Any, optimizer: Any) -> None:
    """Let a compiled model train and be saved with a distributed ``optimizer``."""
    model.optimizer = optimizer
    compilation = getattr(model, "_compile_config", None)
    if compilation is not None:
        compilation.config["optimizer"] = optimizer
    if keras.backend.backend() == "tensorflow":
        model.jit_compile = False


def _taken(optimizer: Any) -> Any:
    """``optimizer``, or one like it if its variables are another one's already."""
    if optimizer.__dict__.get(_IS_TAKEN):
        optimizer = type(optimizer).from_config(optimizer.get_config())
    optimizer.__dict__[_IS_TAKEN] = True
    return optimizer


def _time_calls() -> None:
    time_calls_of_keras(_silent_steps)
    backend = keras.backend.backend()
    if backend == "torch":
        time_calls_of_torch()
    elif backend == "tensorflow":
        from hvd_cluster.tensorflow.timed_calls import time_calls_of_tensorflow

        time_calls_of_tensorflow()


def _silent_steps(optimizer: Any) -> Any:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner.has_made_silent_step if isinstance(inner, _DistributedOptimizer) else None


class _Variables(list[Any]):
    def __call__(self) -> list[Any]:
        return self


def _disable_auto_jit() -> None:
    """Let ``jit_compile="auto"`` mean False with a distributed optimizer.

    Models with other optimizers are not affected. XLA does not call back into Python. Keras resolves "auto" in a method
    of the model without asking the optimizer. An explicit ``jit_compile=True`` is left alone: the collective rejects it
    when the step is traced.
    """
    resolve: Any = keras.Model._resolve_auto_jit_compile
    if getattr(resolve, "asks_optimizer", False):
        return

    def resolved(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        if isinstance(getattr(optimizer, "inner_optimizer", optimizer), _DistributedOptimizer):
            return False
        return bool(resolve(model))

    resolved.asks_optimizer = True  # type: ignore[attr-defined]
    keras.Model._resolve_auto_jit_compile = resolved
