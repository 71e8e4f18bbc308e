"""Batch normalization over the batches of all ranks together.

The ranks exchange one small tensor in each pass: count, mean and sum of squared deviations forward, which combine
without cancellation (Chan, Golub and LeVeque 1983, equation 2.1), and the two sums of the gradient backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from hvd_cluster.engine import basics
from hvd_cluster.engine.membership import next_number, num_members
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.torch.collectives.allgather import allgather
from hvd_cluster.torch.collectives.allreduce import allreduce

#: A rank has at most one of these in flight, and other ranks are at most one behind, so a few names are enough.
_NUM_NAMES = 4


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm`` that trains with the statistics of all ranks' batches.

    The gradients of weight and bias are this rank's share, like those of all other parameters:
    ``DistributedOptimizer`` reduces them. In evaluation mode, and in a world of one, it is plain batch
    normalization. Parameters and state dict are those of ``torch.nn.BatchNorm``.

    Args:
        num_features: C of an input of shape (N, C, ...); N may differ between ranks and be 0 on some.
        eps: added to the variance.
        momentum: weight of the new statistics in the running ones; None averages over all batches so far.
        affine: multiply by a weight and add a bias, each of shape (C,).
        track_running_stats: keep running statistics for evaluation.
        device: the device of the parameters.
        dtype: their dtype.
        process_set: the ranks that share their statistics.

    Raises:
        ValueError: at a call, the input has fewer than two dimensions, or all ranks together have only one value per
            channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        # A copy of a module, or one that is loaded in another process, uses that process's global set.
        self._process_set = None if process_set is global_process_set else process_set

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that share their statistics."""
        return self._process_set or global_process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input``, of shape (N, C, ...), over all dimensions but the second."""
        self._check_input_dim(input)
        is_shared = basics.is_initialized() and basics.size() > 1 and self.process_set.included()
        if not (self.training and is_shared and num_members(self.process_set) > 1):
            return super().forward(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, but the input has {input.shape[1]}")
        output, mean, variance, count = _normalize(input, self.weight, self.bias, self.eps, self.process_set)
        if self.track_running_stats:
            self._track(mean, variance, count)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share or 0.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share or 0.0)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """``module`` with every batch normalization in it replaced by this class.

        Weights and buffers stay.

        Args:
            module: converted in place, unless it is a batch normalization itself.
            process_set: the ranks that share their statistics.

        Raises:
            ValueError: a lazy layer has not seen a batch yet.
        """
        modules = list(module.modules())
        converted: dict[torch.nn.Module | None, SyncBatchNorm] = {
            layer: cls._converted(layer, process_set)
            for layer in modules
            if isinstance(layer, _BatchNorm) and not isinstance(layer, cls)
        }
        for parent in modules:
            for name, child in list(parent._modules.items()):  # a layer may have several names
                if child in converted:
                    setattr(parent, name, converted[child])
        return converted.get(module, module)

    @classmethod
    def _converted(cls, layer: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        kind = type(layer)
        if any(is_lazy(tensor) for tensor in (layer.weight, layer.running_mean) if tensor is not None):
            raise ValueError(f"a {kind.__name__} does not know its size yet: run one batch through the model first")
        if kind.forward not in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward):
            warnings.warn(
                f"{kind.__name__} has its own forward(), and SyncBatchNorm replaces it: whatever it does except batch "
                "normalization, such as an activation, is lost. Put that into a module of its own before converting.",
                stacklevel=4,
            )
        new = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_set=process_set,
        )
        if layer.affine:
            new.weight, new.bias = layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var
        new.num_batches_tracked = layer.num_batches_tracked
        new.training = layer.training
        return new


class _SyncBatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        x = input.to(wide)
        mean, deviations, count = _combined(_gathered(_moments(x), process_set))
        if count <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)} on this "
                "rank, and nothing on the others"
            )
        variance = deviations / count
        inverse = torch.rsqrt(variance + eps)
        scale = inverse if weight is None else inverse * weight.to(wide)
        shift = -mean * scale if bias is None else bias.to(wide) - mean * scale
        output = torch.addcmul(_per_channel(shift, x), x, _per_channel(scale, x)).to(input.dtype)
        ctx.save_for_backward(input, weight, mean, inverse, count)
        ctx.process_set = process_set
        # Not the output's type: autocast passes half precision, in which a sum over a large batch would overflow.
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        dy = gradient.to(mean.dtype)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        normed = (input.to(mean.dtype) - _per_channel(mean, input)) * _per_channel(inverse, input)
        sums = torch.stack([dy.sum(dims), (dy * normed).sum(dims)])  # (2, C)
        gradient_input = None
        if ctx.needs_input_grad[0]:
            means = _reduced(sums, ctx.process_set) / count
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            centred = dy - _per_channel(means[0], input) - normed * _per_channel(means[1], input)
            gradient_input = (centred * _per_channel(scale, input)).to(input.dtype)
        gradient_weight = sums[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        gradient_bias = sums[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return gradient_input, gradient_weight, gradient_bias, None, None


# autograd.Function.apply is untyped.
_normalize: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = _SyncBatchNormFunction.apply


def _moments(x: torch.Tensor) -> torch.Tensor:
    """Count, mean and sum of squared deviations of each channel of (N, C, ...).

    They are one row of shape (1, 2 C + 1).
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    count = x.numel() // max(x.shape[1], 1)
    if count:
        variance, mean = torch.var_mean(x, dims, correction=0)
    else:
        variance = mean = x.new_zeros(x.shape[1])
    return torch.cat([mean, variance * count, mean.new_tensor([count])]).unsqueeze(0)


def _combined(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, sum of squared deviations and count, of all ranks together.

    The ranks' rows are of shape (ranks, 2 C + 1).
    """
    counts = rows[:, -1:]
    num_channels = (rows.shape[1] - 1) // 2
    means, deviations = rows[:, :num_channels], rows[:, num_channels:-1]
    count = counts.sum()
    mean = (means * counts).sum(0) / count.clamp_min(1)
    return mean, (deviations + counts * (means - mean) ** 2).sum(0), count


def _gathered(row: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    return allgather(row, _name("forward", row, process_set), process_set)


def _reduced(sums: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    name = _name("backward", sums, process_set)
    return allreduce(sums, name=name, op=ReduceOp.SUM, process_set=process_set)


def _name(pass_: str, tensor: torch.Tensor, process_set: ProcessSet) -> str:
    """A name that repeats with the shape: requests seen before negotiate faster."""
    family = f"sync_batch_norm.{pass_}.{tensor.shape[1]}.{tensor.dtype}"
    serial = next_number(process_set, family)
    return f"{family}.{serial._replace(number=serial.number % _NUM_NAMES)}"


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C,) in a shape that broadcasts over (N, C, ...)."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))
