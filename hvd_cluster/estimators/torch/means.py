"""Means over the rows of an epoch, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.estimators.run.world import Collectives

#: :attr:`Means.sums`, and the :attr:`Means.names` of their metrics.
Sums = tuple[Tensor, Sequence[Sequence[str]] | None]


class Means:
    """Adds up loss and metrics of batches, weighted by their rows.

    It does not wait for the device.
    """

    def __init__(self, names: Sequence[Sequence[str]], device: torch.device) -> None:
        #: For each group of metrics, a name for each label column.
        self.names = [list(group) for group in names]
        #: The loss, every metric in the order of the names, and last the rows.
        self._sums = torch.zeros(2 + sum(map(len, self.names)), dtype=torch.float64, device=device)

    def add(self, loss: Tensor, metrics: Sequence[Any], rows: float) -> None:
        """Add a batch's mean loss, mean metrics, and the rows that count in it.

        Metrics are tensors or numbers.
        """
        if not rows:  # 0 times a value that is not finite is NaN
            return
        values = [torch.as_tensor(value, device=self._sums.device).detach() for value in (loss, *metrics)]
        batch = torch.stack([value.to(torch.float64).reshape(()) for value in values])
        self._sums[:-1] += batch * rows
        self._sums[-1] += rows

    @property
    def sums(self) -> Tensor:
        """The sums of this rank so far, float64 on the CPU."""
        return self._sums.cpu()

    def restore(self, sums: Tensor, names: Sequence[Sequence[str]] | None = ()) -> None:
        """Continue from earlier :attr:`sums`; from zero if their metrics had other names."""
        if names is not None and [list(group) for group in names] == self.names:
            self._sums.copy_(sums)

    def over_ranks(self, hvd: Collectives, name: str) -> dict[str, Any]:
        """``{"loss": x, "all_metrics": [{name: x, ...} for each group]}`` of all ranks.

        Every rank gets the same.
        """
        sums = hvd.allreduce(self._sums, op=hvd.Sum, name=name).tolist()
        rows = sums.pop()
        means = iter([value / rows if rows else float("nan") for value in sums])
        return {"loss": next(means), "all_metrics": [{name: next(means) for name in group} for group in self.names]}


def reset_states(metrics: Iterable[Any]) -> None:
    """Reset metrics that add up a state of their own, such as torchmetrics'."""
    for metric in metrics:
        reset = getattr(metric, "reset", None)
        if callable(reset):
            reset()
