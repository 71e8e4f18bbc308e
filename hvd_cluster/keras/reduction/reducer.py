"""The base class of the reductions: the steps that all backends share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from hvd_cluster.engine.basics import is_alone
from hvd_cluster.engine.gradient_presence import Presence, agree, dense_ones
from hvd_cluster.engine.membership import next_number, takes_part
from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.submission import Collective, Present
from hvd_cluster.errors import RanksDisagreeError


@dataclass
class Reduction(ABC):
    """Reduces gradients: takes them and their variables, returns reduced ones.

    None stays None, or in eager code becomes the other ranks' gradients with zeros for this rank's.
    """

    config: ReductionConfig
    #: ``id`` -> variable, for variables excluded from the reduction. The reference keeps the ``id`` valid.
    local_variables: dict[int, Any] = field(default_factory=dict)

    @staticmethod
    def key(variable: Any) -> int:
        """The identity of a variable."""
        return id(variable)

    def keep_local(self, variable: Any) -> None:
        """Exclude the gradient of a variable from the reduction."""
        self.local_variables[id(variable)] = variable

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce.

        Args:
            gradients: a tensor of the backend or None for each variable.
            variables: Keras variables.
        """
        results = list(gradients)
        if self.is_alone:
            return results
        is_local = [id(variable) in self.local_variables for variable in variables]
        for index, gradient in enumerate(results):
            if is_local[index] and gradient is not None and self.config.scale_local_gradients:
                results[index] = gradient / self.num_members(gradient.dtype)
        indices = [index for index, local in enumerate(is_local) if not local]
        own, shared = [results[index] for index in indices], [variables[index] for index in indices]
        for index, gradient in zip(indices, self._shared(own, shared), strict=True):
            results[index] = gradient
        return results

    def _shared(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce the gradients of shared variables; None where no rank has one."""
        presences = [
            None
            if gradient is None
            else Presence(is_sparse=False, dtype=keras.backend.standardize_dtype(gradient.dtype))
            for gradient in gradients
        ]
        if not self.is_eager and not any(presences):
            return gradients
        try:
            return self._reduced(gradients, variables, presences)
        except RanksDisagreeError:
            agreed = agree(presences, self.config.process_set) if self.is_eager else None
            if agreed is None:
                raise
            whole = [
                keras.ops.zeros_like(variable, dtype=presence.dtype) if presence and gradient is None else gradient
                for gradient, variable, presence in zip(gradients, variables, agreed, strict=True)
            ]
            return self._reduced(whole, variables, agreed)

    def _reduced(
        self, gradients: list[Any], variables: Sequence[Any], presences: Sequence[Presence | None]
    ) -> list[Any]:
        num_bytes = [4 * math.prod(variable.shape) for variable in variables]
        held = dense_ones(presences, num_bytes)
        pairs = [self.config.compression.compress(gradients[index]) for index in held.indices]
        groups = self.config.group_indices(variables)
        reduced = self.reduce([gradient for gradient, _ in pairs], groups, held, ends_step=True)
        results = list(gradients)
        for index, gradient, (_, context) in zip(held.indices, reduced, pairs, strict=True):
            results[index] = self.config.compression.decompress(gradient, context)
        return results

    @abstractmethod
    def reduce(
        self, tensors: Sequence[Any], groups: list[list[int]], held: Present | None = None, *, ends_step: bool = False
    ) -> list[Any]:
        """Reduce tensors of the backend, those of a group together.

        Args:
            tensors: the tensors.
            groups: indices of the tensors of each group, in the whole list.
            held: which of a list the tensors are; None if they are all of it.
            ends_step: nothing else reduces gradients of this training step later.
        """

    @property
    @abstractmethod
    def is_eager(self) -> bool:
        """Whether a call runs now, not in a compiled step or a callback."""

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank to reduce with."""
        return is_alone() or not takes_part(self.config.process_set)

    def num_members(self, dtype: Any) -> Any:
        """The number of ranks when the step runs.

        It is a number, or a tensor of ``dtype`` and shape ().
        """
        del dtype
        return self.config.process_set.size()

    def on_all_ranks(self, condition: Any) -> Any:
        """Whether a boolean is true on all ranks that take part.

        It is a tensor of the backend, of shape ().
        """
        if self.is_alone:
            return condition
        (num_against,) = self.reduce([1.0 - keras.ops.cast(condition, "float32")], [])
        return keras.ops.equal(num_against, 0.0)

    def choose(
        self, condition: Any, act: Callable[[], Any], otherwise: Callable[[], Any], variables: Sequence[Any]
    ) -> None:
        """Call one of two functions that assign variables.

        It is called now, or when the compiled step runs.

        Args:
            condition: a boolean tensor of the backend, of shape ().
            act: called if it is true.
            otherwise: called if it is false.
            variables: all variables that the two functions read or assign.
        """
        del variables  # only needed by JAX, whose functions have no side effects

        def branch(function: Callable[[], Any]) -> Callable[[], None]:
            def call() -> None:
                function()

            return call

        keras.ops.cond(condition, branch(act), branch(otherwise))

    def reduce_torch(
        self, tensors: Sequence[torch.Tensor], groups: list[list[int]], held: Present | None = None
    ) -> list[torch.Tensor]:
        """Reduce torch tensors and wait for the results."""
        config = self.config
        # A family of its own: a compiled step of JAX runs in another thread, beside what the user calls meanwhile.
        number = next_number(config.process_set, "keras")
        collective = Collective(
            kind=Kind.ALLREDUCE,
            process_set=config.process_set,
            name=f"keras.{number}",
            op=config.op,
            prescale=1.0 / config.predivide_factor,
            postscale=config.predivide_factor,
            present=held,
        )
        results: list[torch.Tensor] = collective.begin_parts(tensors, groups=groups).wait()
        return results


def _presence(gradient: Any) -> Presence:
    return Presence(is_sparse=False, dtype=keras.backend.standardize_dtype(gradient.dtype))
