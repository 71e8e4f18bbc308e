"""Numbers for the parameters of an optimizer, equal on all ranks.

Ranks may list the parameters in different orders.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property

import torch

from hvd_cluster.torch.buckets import plan_buckets
from hvd_cluster.torch.gradient_layout import Gradient, fingerprint
from hvd_cluster.torch.wire import gradient_dtype

#: How many parameters an error names.
_MAX_NAMED = 5


class ParameterIndex:
    """Parameters and their names; a name's index among the sorted ones is the number.

    Args:
        names: a unique name for each parameter, equal on all ranks, in this rank's order.
        groups: parameters whose gradients travel together.
    """

    def __init__(self, names: dict[torch.Tensor, str], groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self.named = names
        self.ids = {id(parameter) for parameter in names}
        self.groups = groups
        ordered = sorted(names.items(), key=lambda entry: entry[1])
        self.parameters = [parameter for parameter, _ in ordered]
        self.names = [name for _, name in ordered]
        self.fingerprint = fingerprint(self.names)
        self.number_of = {parameter: number for number, parameter in enumerate(self.parameters)}
        self._own_order = [self.number_of[parameter] for parameter in names]
        self._groups = [[self.number_of[parameter] for parameter in group] for group in self.groups]
        self._grouped = {number for group in self._groups for number in group}

    def __len__(self) -> int:
        return len(self.parameters)

    @cached_property
    def spec_fingerprints(self) -> list[int]:
        """The fingerprint of each parameter's shape and dtype, by number.

        A lazy module has a shape only after it has run.
        """
        return [fingerprint([_spec(parameter)]) for parameter in self.parameters]

    def require_equal_specs(self, mismatched: Iterable[int]) -> None:
        """Check that no parameter differs from rank to rank.

        Raises:
            ValueError: some do; the message has this rank's shapes and dtypes.
        """
        named = [f"{self.names[number]!r} is {_spec(self.parameters[number])}" for number in sorted(mismatched)]
        if named:
            more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
            raise ValueError(
                "the parameters of a DistributedOptimizer have different shapes or dtypes on different ranks; on this "
                f"rank {', '.join(named[:_MAX_NAMED])}{more}: make the same model on all ranks"
            )

    def listed(self, numbers: Sequence[int]) -> str:
        """The names of parameters for an error: "'a', 'b' and of 2 more parameters"."""
        names = ", ".join(repr(self.names[number]) for number in numbers[:_MAX_NAMED])
        return names + (f" and of {len(numbers) - _MAX_NAMED} more parameters" if len(numbers) > _MAX_NAMED else "")

    def unfrozen(self, numbers: Iterable[int]) -> list[int]:
        """Those of ``numbers`` that require a gradient."""
        parameters = self.parameters
        return [number for number in numbers if parameters[number].requires_grad]

    def gradients(
        self, keeps_sparse: bool, last_passes: Mapping[int, int], ready: Container[int]
    ) -> list[Gradient | None]:
        """This rank's gradients, by number; sparse ones to be made dense count as dense.

        Args:
            keeps_sparse: sparse gradients outside groups stay sparse.
            last_passes: the last backward pass that reached a parameter in this step.
            ready: parameters whose gradients have had all passes of the step.
        """
        found: list[Gradient | None] = []
        for number, parameter in enumerate(self.parameters):
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is None:
                found.append(None)
            else:
                stays_sparse = gradient.is_sparse and keeps_sparse and number not in self._grouped
                last_pass = last_passes.get(number, 0)
                is_partial = last_pass > 0 and number not in ready
                found.append(Gradient(gradient.sparse_dim() if stays_sparse else 0, last_pass, is_partial))
        return found

    def assign_buckets(
        self, ready: Iterable[int], threshold_bytes: int, among: Container[int] | None = None
    ) -> list[list[int]]:
        """Parameters in buckets: ``ready`` in order, then the others from last to first.

        Args:
            ready: those whose gradients are ready.
            threshold_bytes: the largest bucket.
            among: the parameters; None for all.
        """
        order = list(dict.fromkeys([*ready, *reversed(self._own_order)]))
        order = [number for number in order if among is None or number in among]
        devices = list(dict.fromkeys(parameter.device for parameter in self.parameters))
        return plan_buckets(
            order,
            [parameter.numel() * gradient_dtype(parameter).itemsize for parameter in self.parameters],
            [(gradient_dtype(parameter), devices.index(parameter.device)) for parameter in self.parameters],
            self._groups,
            threshold_bytes,
        )


def _spec(parameter: torch.Tensor) -> str:
    own, gradient = (str(dtype).removeprefix("torch.") for dtype in (parameter.dtype, gradient_dtype(parameter)))
    return f"{own} {list(parameter.shape)}" + (f" with gradients of {gradient}" if gradient != own else "")
