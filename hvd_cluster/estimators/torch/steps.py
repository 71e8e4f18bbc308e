"""A batch forward and backward, and an optimizer step when its group is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.spec import Features, TrainSpec, called
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.estimators.torch.objective import Objective
from hvd_cluster.estimators.torch.strategies.strategy import HALF_DTYPES, ShardingStrategy
from hvd_cluster.estimators.torch.train_state import TrainState


class Steps(TrainState):
    """A model that makes steps.

    Args:
        run: on this worker; the scheduler and the scaler are those of its spec, in their initial state.
        device: of the model.
        strategy: how the workers hold and update the model.
        model: what it has begun with.
        optimizer: with the methods of a ``DistributedOptimizer``.
        objective: the loss.
    """

    def __init__(
        self,
        run: WorkerRun[TrainSpec],
        device: torch.device,
        strategy: ShardingStrategy,
        model: torch.nn.Module,
        optimizer: Any,
        objective: Objective,
    ) -> None:
        spec = run.spec
        super().__init__(
            model,
            optimizer,
            scheduler=spec.lr_scheduler(optimizer) if spec.lr_scheduler is not None else None,
            scaler=torch.amp.GradScaler(device.type) if spec.mixed_precision == "fp16" else None,
            made=spec.model.made if isinstance(spec.model, ModelSource) else None,
            # A rank that holds parts of frozen parameters cannot know if these have changed.
            saves_all=not strategy.holds_all,
        )
        self.spec = spec
        self.hvd = run.hvd
        self.device = device
        self.strategy = strategy
        self.objective = objective

    def train(
        self, inputs: Features, labels: Sequence[Tensor], weights: Tensor | None, step: int, steps: int
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Train on one batch; returns the outputs and the loss, detached.

        All ranks have equally many rows, so the average of their gradients is the gradient of the global batch.
        """
        group = self.spec.backward_passes_per_step
        if self.spec.train_minibatch_fn is not None:
            outputs, loss = self._custom_step(inputs, labels, weights, step)
        else:
            if step % group == 0:
                self.optimizer.zero_grad()
            with self.precision():
                outputs, loss = self._forward(inputs, labels, weights)
            batches = min(group, steps - step // group * group)  # the last group of an epoch may be short
            scaled = loss / batches if self.scaler is None else self.scaler.scale(loss / batches)
            scaled.backward()
        is_complete = (step + 1) % group == 0 or step + 1 == steps
        is_updated = is_complete
        if is_complete and self.spec.train_minibatch_fn is None:
            is_updated = self._update()
        if is_updated and self.spec.lr_scheduler_interval == "step":
            self.step_scheduler(self._over_ranks(loss) if self._needs_loss else loss)
        return outputs, loss.detach()

    def validate(
        self, inputs: Features, labels: Sequence[Tensor], weights: Tensor | None, step: int
    ) -> tuple[Sequence[Tensor], Tensor]:
        """The outputs and the loss of one batch, without training."""
        with self.precision():
            if self.spec.validation_minibatch_fn is not None:
                outputs, loss = self.spec.validation_minibatch_fn(
                    self.model, self.objective.transform_outputs, self.objective, inputs, labels, weights, step
                )
                return self._listed(outputs), loss
            return self._forward(inputs, labels, weights)

    def _forward(
        self, inputs: Features, labels: Sequence[Tensor], weights: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor]:
        raw = called(self.model, inputs, **self.spec.inputs.label_arguments(labels))
        outputs, _, loss = self.objective.evaluated(raw, labels, weights)
        return outputs, loss

    def _listed(self, outputs: Any) -> list[Tensor]:
        """What a user's step returned; a list has gone through ``transform_outputs``."""
        return outputs if isinstance(outputs, list) else self.objective.listed(outputs)

    def step_scheduler(self, metric: Any) -> None:
        """One step of the scheduler, if any; ``metric`` is for ``ReduceLROnPlateau``."""
        if self._needs_loss:
            self.scheduler.step(float(metric))
        elif self.scheduler is not None:
            self.scheduler.step()

    @property
    def _needs_loss(self) -> bool:
        return isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def _over_ranks(self, loss: Tensor) -> Tensor:
        """The mean of the ranks' losses, from which each gets the same learning rate."""
        mean: Tensor = self.hvd.allreduce(
            loss.detach().float().reshape(1), op=self.hvd.Average, name="hvd_cluster.plateau"
        )
        return mean

    def share_model(self) -> None:
        """Give all ranks the same weights, and rank 0's buffers, such as running means.

        Every rank takes part. Rank 0's model is the one that is validated, saved and returned.
        """
        from hvd_cluster.torch.functions import share_buffers

        self.strategy.equalize(self.optimizer)
        share_buffers(self.model, root_rank=0)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the forward pass."""
        if self.spec.mixed_precision is None or self.strategy.casts:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=HALF_DTYPES[self.spec.mixed_precision])

    def _custom_step(
        self, inputs: Features, labels: Sequence[Tensor], weights: Tensor | None, step: int
    ) -> tuple[Sequence[Tensor], Tensor]:
        """A step of the user's ``train_minibatch_fn``."""
        with self.precision():
            outputs, loss = self.spec.train_minibatch_fn(
                self.model,
                self.optimizer,
                self.objective.transform_outputs,
                self.objective,
                inputs,
                labels,
                weights,
                self.spec.backward_passes_per_step,
                step,
            )
        return self._listed(outputs), loss

    def _update(self) -> bool:
        """Average the gradients over the ranks, clip them, and update the weights.

        Returns:
            Whether the weights were updated: the scaler skips a step whose gradients are not finite.
        """
        norm, value = self.spec.gradient_clip_norm, self.spec.gradient_clip_value
        if self.scaler is None and norm is None and value is None:
            self.optimizer.step()
            return True
        self.optimizer.synchronize()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if value is not None:
            torch.nn.utils.clip_grad_value_(parameters, value)
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, norm)
        with self.optimizer.skip_synchronize():
            if self.scaler is None:
                self.optimizer.step()
                return True
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return bool(self.scaler.get_scale() >= before)  # smaller only after a skipped step
