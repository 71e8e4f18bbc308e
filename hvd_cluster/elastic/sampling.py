"""Which rank processes which samples of an epoch whose workers may change. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def epoch_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> Indices:
    """The order in which all ranks together go through an epoch; int64 of shape (num_samples,)."""
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    return np.random.default_rng([seed, epoch]).permutation(num_samples).astype(np.int64)


def share(order: Indices, processed: int, rank: int, size: int) -> Indices:
    """The samples that ``rank`` of ``size`` takes of those that are left.

    All ranks get equally many, in turns, so that ``n`` steps of all ranks are a prefix of the order: whoever goes on
    later needs to know only how many samples were processed. Where the rest cannot be dealt evenly, its first samples
    are dealt again.

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
