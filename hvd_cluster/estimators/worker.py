"""One epoch on one worker: batches in, steps of the optimizer, a record of means and speeds out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.estimators.means import Means
from hvd_cluster.estimators.objective import Objective
from hvd_cluster.estimators.readers import Readers
from hvd_cluster.estimators.spec import TrainSpec
from hvd_cluster.launch import progress

#: Progress is reported at most this often.
REPORT_INTERVAL_S = 0.2


@dataclass
class Worker:
    """What a worker holds while it trains."""

    spec: TrainSpec
    #: ``hvd_cluster.torch``.
    hvd: Any
    device: torch.device
    model: torch.nn.Module
    #: A ``DistributedOptimizer``.
    optimizer: Any
    objective: Objective
    readers: Readers

    def train_epoch(self, epoch: int) -> dict[str, Any]:
        """Go through the training batches of ``epoch`` once; the record without validation, the same on every rank."""
        steps = self.readers.train_steps
        watch, report = _Watch(), _Every(REPORT_INTERVAL_S)
        means = self._means()
        self.model.train()
        for step, batch in enumerate(watch.timed(self.readers.train_batches(epoch))):
            inputs, labels, weights = self._take(batch)
            rows = len(labels[0])
            outputs, loss = self._step(inputs, labels, weights, step, steps)
            watch.rows += rows
            means.add(loss, self._metrics(outputs, labels), rows)
            if self.hvd.rank() == 0 and report.due(last=step + 1 == steps):
                self._report(epoch, step + 1, steps, float(loss.detach()), watch)
        speeds = torch.tensor([[watch.rows_per_s, watch.wait_share]], dtype=torch.float64)
        gathered = self.hvd.allgather(speeds, name="hvd_cluster.speeds")
        return {
            "train": means.over_ranks(self.hvd, "hvd_cluster.train_means"),
            "samples_per_s": gathered[:, 0].tolist(),
            "data_wait_share": gathered[:, 1].tolist(),
            "seconds": watch.seconds,
            "padding_rows": self.readers.padding_rows,
        }

    def validate_epoch(self) -> dict[str, Any]:
        """The loss and the metrics over the validation rows, each row counted once, without training."""
        means = self._means()
        self.model.eval()
        with torch.no_grad():
            for batch in self.readers.validation_batches():
                inputs, labels, weights = self._take(batch)
                outputs, shaped = self.objective.transform_outputs(self.model(*inputs), labels)
                means.add(self.objective(outputs, shaped, weights), self._metrics(outputs, shaped), len(labels[0]))
        return means.over_ranks(self.hvd, "hvd_cluster.validation_means")

    def _take(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        columns = self.spec.inputs
        return (
            columns.features(batch, self.device),
            columns.labels(batch, self.device),
            columns.sample_weights(batch, self.device),
        )

    def _step(
        self,
        inputs: Sequence[Tensor],
        labels: Sequence[Tensor],
        weights: Tensor | None,
        step: int,
        steps: int,
    ) -> tuple[Sequence[Tensor], Tensor]:
        """One batch forward and backward, and a step of the optimizer where its group of batches is complete.

        All ranks have as many rows, so the average of their gradients is that of the global batch.
        """
        group = self.spec.backward_passes_per_step
        if self.spec.train_minibatch_fn is not None:
            outputs, loss = self.spec.train_minibatch_fn(
                self.model,
                self.optimizer,
                self.objective.transform_outputs,
                self.objective,
                inputs,
                labels,
                weights,
                group,
                step,
            )
            return self.objective.transform_outputs(outputs, labels)[0], loss
        if step % group == 0:
            self.optimizer.zero_grad()
        outputs, shaped = self.objective.transform_outputs(self.model(*inputs), labels)
        loss = self.objective(outputs, shaped, weights)
        batches = min(group, steps - step // group * group)  # the last group of an epoch may be short
        (loss / batches).backward()
        if (step + 1) % group == 0 or step + 1 == steps:
            self.optimizer.step()
        return outputs, loss.detach()

    def _means(self) -> Means:
        labels = self.spec.inputs.label_cols
        names = [[f"group_{index}_{label}" for label in labels] for index in range(len(self.spec.metrics))]
        return Means(names, self.device)

    def _metrics(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Any]:
        with torch.no_grad():
            pairs = list(zip(outputs, self.objective.transform_outputs(list(outputs), labels)[1], strict=False))
            return [
                metric(output.detach(), label)
                for group in self.spec.metrics
                for metric, (output, label) in zip(group, pairs, strict=True)
            ]

    def _report(self, epoch: int, step: int, steps: int, loss: float, watch: _Watch) -> None:
        progress.report(
            epoch=epoch,
            epochs=self.spec.epochs,
            step=step,
            steps=steps,
            loss=loss,
            samples_per_s=watch.rows_per_s * self.hvd.size(),
        )


class _Watch:
    """Times an epoch, and the part of it that was spent waiting for batches."""

    def __init__(self) -> None:
        self.rows = 0
        self._start = time.perf_counter()
        self._waited_s = 0.0

    def timed(self, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(iterator, None)
            self._waited_s += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def rows_per_s(self) -> float:
        return self.rows / max(self.seconds, 1e-9)

    @property
    def wait_share(self) -> float:
        return self._waited_s / max(self.seconds, 1e-9)


class _Every:
    """Tells when ``seconds`` have passed since it last did."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due = 0.0

    def due(self, last: bool) -> bool:
        now = time.monotonic()
        if not last and now < self._due:
            return False
        self._due = now + self._seconds
        return True
