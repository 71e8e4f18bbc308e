"""A Keras model that each process makes itself, with the user's function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from hvd_cluster.engine.objects import dumps
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.keras.packed_model import PackedModel, packed_compilation
from hvd_cluster.estimators.keras.state import as_tensors, contents, weights_of
from hvd_cluster.estimators.model_factory import name_of
from hvd_cluster.estimators.run.random_state import set_aside
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.spec import error_text
from hvd_cluster.estimators.torch import made_state
from hvd_cluster.estimators.torch.model_source import GUARD_TEXT


@dataclass(frozen=True)
class KerasModelSource(PackedModel):
    """The user's function, and what it has made in the driver; ``file`` is empty."""

    #: cloudpickle of the function.
    factory: bytes = field(default=b"", repr=False)
    #: Its name and arguments.
    name: str = ""
    #: Seeds the generators of torch, NumPy and Python for the function: initializers of Keras draw their seeds there.
    seed: int = 0
    contents: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Weights that the function does not make, by their position; empty before a fit.
    trained: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def made(self) -> Mapping[str, str]:
        return self.contents

    @classmethod
    def by(
        cls,
        factory: Callable[[], Any],
        seed: int,
        model: Any,
        custom_objects: Mapping[str, Any],
        compilation: Mapping[str, Any] | None = None,
    ) -> KerasModelSource:
        """The source of ``factory`` and the ``model`` that :func:`made` returned for it.

        Args:
            compilation: as for :meth:`PackedModel.of`.
        """
        import keras

        return cls(
            keras.config.backend(),
            b"",
            dumps(dict(custom_objects)),
            *packed_compilation(model, compilation),
            factory=dumps(factory),
            name=name_of(factory),
            seed=seed,
            contents=contents(model),
        )

    def _uncompiled(self) -> Any:
        import keras

        model = made(cloudpickle.loads(self.factory), self.seed)
        if self.trained:
            self.require_same(model)
        weights = weights_of(model)
        for index, value in self.trained.items():
            weights[index].assign(keras.ops.convert_to_tensor(value.numpy(), dtype=weights[index].dtype))
        return model

    def require_same(self, model: Any) -> None:
        """Check that ``model``, not trained yet, is what the function made in the driver.

        Raises:
            DataError: it is not; the text names the first weight that differs.
        """
        if difference := made_state.first_difference(self.contents, contents(model)):
            raise DataError(self._refusal(difference))

    def require_same_on_ranks(self, model: Any, hvd: Collectives) -> None:
        """The same on every rank; every rank takes part."""
        own = made_state.first_difference(self.contents, contents(model))
        for rank, text in enumerate(hvd.allgather_object(own, name="hvd_cluster.made")):
            if text:
                raise DataError(f"rank {rank}: {self._refusal(text)}")

    def _refusal(self, difference: str) -> str:
        return f"model: {self.name} does not always make the same model: {difference}; {GUARD_TEXT}"

    def packed(self, model: Any, custom_objects: Mapping[str, Any]) -> PackedModel:
        """``model`` as function and weights it does not make; a file if it makes another."""
        now = contents(model, made_state.equal_names(self.contents))
        if not made_state.same_shapes(now, self.contents):
            return PackedModel.of(model, custom_objects)
        values = as_tensors(weights_of(model))
        changed = made_state.changed_names(now, self.contents)
        compilation, state = packed_compilation(model, None)
        return dataclasses.replace(
            self,
            custom_objects=dumps(dict(custom_objects)),
            compilation=compilation,
            optimizer_state=state,
            trained={
                index: value for index, (name, value) in enumerate(zip(now, values, strict=True)) if name in changed
            },
        )


def made(factory: Callable[[], Any], seed: int) -> Any:
    """What a factory makes, with equal random weights for equal seeds.

    Raises:
        DataError: it failed, or returned something else than a model with weights.
    """
    import keras  # noqa: F401 - importing it in the factory would draw random numbers

    from hvd_cluster.estimators.keras.params import wrong_model

    name = name_of(factory)
    with set_aside(seed):
        try:
            model = factory()
        except Exception as error:  # the user's own code, which may raise anything
            raise DataError(f"model: {name} failed: {error_text(error)}") from error
    if wrong_model(model):
        what = "None" if model is None else f"an object of type {type(model).__name__}"
        raise DataError(f"model: {name} must return a keras.Model, and returned {what}")
    if not model.built:
        raise DataError(f"model: {name} must return a model that has weights: begin it with keras.Input, or build it")
    return model
