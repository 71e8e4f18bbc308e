"""One epoch on one worker: batches in, steps of the optimizer, a record of means and speeds out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.estimators.run.epoch_timer import EpochTimer
from hvd_cluster.estimators.run.finite_check import FiniteCheck, all_finite
from hvd_cluster.estimators.run.readers import Readers, rows_of
from hvd_cluster.estimators.run.reports import Reports
from hvd_cluster.estimators.run.world import Collectives
from hvd_cluster.estimators.spec import TrainSpec
from hvd_cluster.estimators.torch.class_weights import ClassWeights
from hvd_cluster.estimators.torch.means import Means
from hvd_cluster.estimators.torch.steps import Steps

#: Called after each step with the number of steps that the epoch has made, and its means so far.
AfterStep = Callable[[int, Means], None]


@dataclass
class Worker:
    """What a worker holds while it trains."""

    spec: TrainSpec
    #: ``hvd_cluster.torch``.
    hvd: Collectives
    device: torch.device
    steps: Steps
    readers: Readers
    reports: Reports
    losses: FiniteCheck
    class_weights: ClassWeights | None = None

    def train_epoch(
        self, epoch: int, done: int = 0, sums: Tensor | None = None, after_step: AfterStep | None = None
    ) -> dict[str, Any]:
        """Go through the training batches of ``epoch``; the record without validation, the same on every rank.

        Args:
            epoch: its number.
            done: steps of it that have been made already, and ``sums`` what they have added to the means.
            after_step: called after each step.
        """
        steps = self.readers.train_steps
        timer = EpochTimer()
        means = self._means()
        if sums is not None:
            means.take_up(sums)
        self.steps.model.train()
        for step, batch in enumerate(timer.timed(self.readers.train_batches(epoch, done)), start=done):
            inputs, labels, weights = self._take(batch)
            rows = len(labels[0])
            outputs, loss = self.steps.train(inputs, labels, weights, step, steps)
            timer.rows += rows
            metrics = self._metrics(outputs, labels)
            means.add(loss, metrics, rows)
            if self.reports.is_due(last=step + 1 == steps):
                self._report(epoch, step + 1, steps, loss, metrics, timer)
            self.losses.add(step, loss)
            if step + 1 == steps:
                self.losses.check(epoch, self.has_finite_weights)
            elif self.losses.is_due(step + 1):
                self.losses.check(epoch)
            if after_step is not None:
                after_step(step + 1, means)
        speeds = torch.tensor([[timer.rows_per_s, timer.wait_share]], dtype=torch.float64)
        gathered = self.hvd.allgather(speeds, name="hvd_cluster.speeds")
        return {
            "train": means.over_ranks(self.hvd, "hvd_cluster.train_means"),
            "samples_per_s": gathered[:, 0].tolist(),
            "data_wait_share": gathered[:, 1].tolist(),
            "seconds": timer.seconds,
            "padding_rows": self.readers.padding_rows,
        }

    def has_finite_weights(self) -> bool:
        """Whether all parameters are finite numbers."""
        return all_finite(self.steps.model.parameters())

    def validate_epoch(self) -> dict[str, Any]:
        """The loss and the metrics over the validation rows, each row counted once, without training.

        Every rank makes the same number of steps.
        """
        means = self._means()
        self.steps.model.eval()
        with torch.no_grad():
            for step, batch in enumerate(self.readers.validation_batches()):
                inputs, labels, weights = self._take(batch)
                outputs, loss = self.steps.validate(inputs, labels, weights, step)
                means.add(loss, self._metrics(outputs, labels), rows_of(batch))
        return means.over_ranks(self.hvd, "hvd_cluster.validation_means")

    def _take(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        columns = self.spec.inputs
        columns.warn_of_inexact(batch)
        labels, weights = columns.labels(batch, self.device), columns.sample_weights(batch, self.device)
        if self.class_weights is not None:
            weights = self.class_weights.row_weights(labels[0], weights)
        return columns.features(batch, self.device), labels, weights

    def _means(self) -> Means:
        return Means(self.spec.metric_names, self.device)

    def _metrics(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Any]:
        if not self.spec.metrics:
            return []
        with torch.no_grad():
            shaped = self.steps.objective.transform_outputs(list(outputs), labels)[1]
            pairs = list(zip(outputs, shaped, strict=False))
            return [
                metric(output.detach(), label)
                for group in self.spec.metrics
                for metric, (output, label) in zip(group, pairs, strict=True)
            ]

    def _report(
        self, epoch: int, step: int, steps: int, loss: Tensor, metrics: Sequence[Any], timer: EpochTimer
    ) -> None:
        names = [name for group in self.spec.metric_names for name in group]
        self.reports.step(
            epoch=epoch,
            epochs=self.spec.epochs,
            step=step,
            steps=steps,
            loss=float(loss),
            metrics={name: float(value) for name, value in zip(names, metrics, strict=True)},
            samples_per_s=timer.rows_per_s * self.hvd.size(),
            data_wait_share=timer.wait_share,
        )
