"""``communication=``: how often workers exchange what they have learned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """``communication=LocalSGD(...)``: train apart in rounds, then average weights.

    A round has ``every`` steps; the end of an epoch and a checkpoint end it too. S. U. Stich, "Local SGD Converges Fast
    and Communicates Little", arXiv:1805.09767.

    Args:
        every: steps of a round, at least 2.

    Raises:
        ValueError: a value is out of range.
    """

    every: int = 8

    def __post_init__(self) -> None:
        if self.every < 2:
            raise ValueError(f"LocalSGD with every={self.every}: it must be at least 2")


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """``communication=DiLoCo(...)``: an outer optimizer steps after each round.

    Rounds are those of :class:`LocalSGD`. The outer optimizer is SGD with Nesterov's momentum; its gradient is the mean
    of the changes of the workers. A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", arXiv:2311.08105.

    Args:
        every: steps of a round, at least 2.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its momentum, from 0 to less than 1.

    Raises:
        ValueError: a value is out of range.
    """

    every: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.every < 2:
            raise ValueError(f"DiLoCo with every={self.every}: it must be at least 2")
        if self.outer_lr <= 0:
            raise ValueError(f"DiLoCo with outer_lr={self.outer_lr}: it must be above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"DiLoCo with outer_momentum={self.outer_momentum}: it must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """``communication=PowerSGD(...)``: send gradients as low-rank approximations.

    Each step sends the gradients of matrices as products of two thin matrices. What the approximation leaves out is
    added to the gradient of the next step. A parameter without a gradient counts as one whose gradient is zero. T.
    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", arXiv:1905.13727.

    Args:
        rank: of the approximation.
        start_step: steps at the beginning of a run that send complete gradients, at least 2.
        min_compression_rate: a gradient is sent whole unless the two matrices have fewer numbers by this factor.

    Raises:
        ValueError: a value is out of range.
    """

    rank: int = 1
    start_step: int = 1000
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"PowerSGD with rank={self.rank}: it must be at least 1")
        if self.start_step < 2:
            raise ValueError(f"PowerSGD with start_step={self.start_step}: it must be at least 2")
        if self.min_compression_rate <= 0:
            raise ValueError(f"PowerSGD with min_compression_rate={self.min_compression_rate}: it must be above 0")
