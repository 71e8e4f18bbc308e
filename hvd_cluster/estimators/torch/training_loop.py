"""One epoch on one worker: batches, steps, and a record of means and speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.data.reading.to_device import ToDevice
from hvd_cluster.estimators.run.finite_check import FiniteCheck, FiniteWeights
from hvd_cluster.estimators.run.readers import Readers, rows_of
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.spec import Features, TrainSpec
from hvd_cluster.estimators.torch.class_weights import ClassWeights
from hvd_cluster.estimators.torch.means import Means, Sums, reset_states
from hvd_cluster.estimators.torch.steps import Steps

#: Called after each step with the number of steps that the epoch has made, and its means so far.
AfterStep = Callable[[int, Means], None]


@dataclass
class TrainingLoop:
    """What a worker holds while it trains."""

    run: WorkerRun[TrainSpec]
    steps: Steps
    readers: Readers
    to_device: ToDevice
    losses: FiniteCheck
    class_weights: ClassWeights | None = None

    def __post_init__(self) -> None:
        #: Whether all weights that this rank holds are finite numbers.
        self.has_finite_weights = FiniteWeights(self.steps.model)

    def train_epoch(self, after_step: AfterStep, done: int = 0, sums: Sums | None = None) -> dict[str, Any]:
        """Train on the current epoch's batches; return its record without validation.

        The record is the same on every rank.

        Args:
            after_step: called after each step.
            done: steps of the epoch that an earlier start has made, and ``sums`` what they have added to the means.
            sums: what :meth:`Means.restore` takes.
        """
        run, steps = self.run, self.readers.train_steps
        epoch = run.epoch
        run.start_epoch()
        means = self._means()
        if sums is not None:
            means.restore(*sums)
        self.steps.model.train()
        batches = run.timed(self._on_device(self.readers.train_batches(epoch, done)), epoch, done)
        for step, batch in enumerate(batches, start=done):
            inputs, labels, weights = self._arguments(batch)
            rows = len(labels[0])
            outputs, loss = self.steps.train(inputs, labels, weights, step, steps)
            run.timer.rows += rows
            metrics = self._metrics(outputs, labels)
            means.add(loss, metrics, rows)
            names = (name for group in run.spec.metric_names for name in group)
            run.report_step(step, steps, loss, dict(zip(names, metrics, strict=True)))
            self.losses.add(step, loss)
            if step + 1 == steps:
                self.losses.check(epoch, self.has_finite_weights)
            elif self.losses.is_due(step + 1):
                self.losses.check(epoch)
            after_step(step + 1, means)
        self._reset_metrics()
        return {**run.record(), "train": means.over_ranks(run.hvd, "hvd_cluster.train_means")}

    def validate_epoch(self) -> dict[str, Any]:
        """The loss and metrics over the validation rows, without training.

        Each row counts once. Every rank makes the same number of steps.
        """
        means = self._means()
        self.steps.model.eval()
        with torch.no_grad():
            batches = self.run.validated(self._on_device(self.readers.validation_batches()))
            for step, batch in enumerate(batches):
                inputs, labels, weights = self._arguments(batch)
                outputs, loss = self.steps.validate(inputs, labels, weights, step)
                means.add(loss, self._metrics(outputs, labels), rows_of(batch))
        self._reset_metrics()
        return means.over_ranks(self.run.hvd, "hvd_cluster.validation_means")

    def _on_device(self, batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        return self.to_device(map(self.run.spec.inputs.checked, batches), ahead=self.readers.ahead)

    def _arguments(self, batch: Mapping[str, Tensor]) -> tuple[Features, list[Tensor], Tensor | None]:
        """Features, labels and row weights of a batch on the device."""
        columns, device = self.run.spec.inputs, self.steps.device
        labels, weights = columns.labels(batch, device), columns.sample_weights(batch, device)
        if self.class_weights is not None:
            weights = self.class_weights.row_weights(labels[0], weights)
        return columns.features(batch, device), labels, weights

    def _means(self) -> Means:
        return Means(self.run.spec.metric_names, self.steps.device)

    def _metrics(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Any]:
        groups = self.run.spec.metrics
        if not groups:
            return []
        with torch.no_grad():
            shaped = self.steps.objective.shaped_labels(outputs, labels)
            pairs = list(zip(outputs, shaped, strict=False))
            return [
                metric(output.detach(), label)
                for group in groups
                for metric, (output, label) in zip(group, pairs, strict=True)
            ]

    def _reset_metrics(self) -> None:
        reset_states(metric for group in self.run.spec.metrics for metric in group)
