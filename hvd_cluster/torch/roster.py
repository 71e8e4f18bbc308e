"""The parameters of an optimizer by number: the same number on all ranks, in whatever order each of them lists them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property

import torch

from hvd_cluster.torch.buckets import plan_buckets
from hvd_cluster.torch.census import Gradient, fingerprint

#: Of parameters that differ, in an error.
_MOST_TOLD = 5


class Roster:
    """Parameters and their names; a parameter's number is the place of its name among all names.

    Args:
        names: a unique name for each parameter, equal on all ranks, in this rank's order.
        groups: parameters whose gradients travel together.
    """

    def __init__(self, names: dict[torch.Tensor, str], groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self.named = names
        self.groups = groups
        ordered = sorted(names.items(), key=lambda entry: entry[1])
        self.parameters = [parameter for parameter, _ in ordered]
        self.names = [name for _, name in ordered]
        self.fingerprint = fingerprint(self.names)
        self._number_of = {parameter: number for number, parameter in enumerate(self.parameters)}
        self._own_order = [self._number_of[parameter] for parameter in names]
        self._groups = [[self._number_of[parameter] for parameter in group] for group in groups]
        self._grouped = {number for group in self._groups for number in group}

    def __len__(self) -> int:
        return len(self.parameters)

    @cached_property
    def prints_of_forms(self) -> list[int]:
        """The fingerprint of each parameter's shape and dtype, by number; lazy modules have none before they ran."""
        return [fingerprint([_form(parameter)]) for parameter in self.parameters]

    def require_equal_forms(self, misfits: Iterable[int]) -> None:
        """Check that no parameter differs from rank to rank.

        Raises:
            ValueError: some do; those of this rank are told.
        """
        told = [f"{self.names[number]!r} is {_form(self.parameters[number])}" for number in sorted(misfits)]
        if told:
            more = f" and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
            raise ValueError(
                "the parameters of a DistributedOptimizer have different shapes or dtypes on different ranks; on this "
                f"rank {', '.join(told[:_MOST_TOLD])}{more}: make the same model on all ranks"
            )

    def unfrozen(self, numbers: Iterable[int]) -> list[int]:
        """Those of ``numbers`` that require a gradient."""
        parameters = self.parameters
        return [number for number in numbers if parameters[number].requires_grad]

    def gradients(
        self, keeps_sparse: bool, last_passes: Mapping[int, int], ready: Container[int]
    ) -> list[Gradient | None]:
        """What there is on this rank, by number; a sparse gradient is reported as dense where it will be made so.

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

    def deal(self, ready: Iterable[int], threshold_bytes: int) -> list[list[int]]:
        """All parameters in buckets: those of ``ready`` in its order, then the others from the last to the first."""
        order = list(dict.fromkeys([*ready, *reversed(self._own_order)]))
        devices = list(dict.fromkeys(parameter.device for parameter in self.parameters))
        return plan_buckets(
            order,
            [parameter.numel() * parameter.element_size() for parameter in self.parameters],
            [(parameter.dtype, devices.index(parameter.device)) for parameter in self.parameters],
            self._groups,
            threshold_bytes,
        )


def _form(parameter: torch.Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
