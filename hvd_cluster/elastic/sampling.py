"""The samples that each rank processes in an epoch during which the workers may change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def epoch_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> Indices:
    """The order of the samples in an epoch, over all ranks; int64 of shape (num_samples,)."""
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    return np.random.default_rng([seed, epoch]).permutation(num_samples).astype(np.int64)


def share(order: Indices, processed: int, rank: int, size: int) -> Indices:
    """The remaining samples that ``rank`` of ``size`` processes.

    All ranks get the same number, in turns, so that ``n`` steps of all ranks are a prefix of the order: to resume, only
    the number of processed samples is needed. If the rest cannot be divided evenly, its first samples are repeated.

    Args:
        order: the epoch's order, shape (num_samples,).
        processed: how many of them were processed.
        rank: 0 .. size - 1.
        size: number of workers.

    Returns:
        int64 of shape (ceil((num_samples - processed) / size),); empty when all were processed.
    """
    left = order[processed:]
    if len(left) == 0:
        return left
    each = -(-len(left) // size)
    return np.resize(left, each * size)[rank::size]
