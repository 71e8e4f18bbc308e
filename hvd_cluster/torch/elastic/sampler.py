"""A worker's samples of a dataset, in an epoch in which the workers may change."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.engine import basics

Indices = npt.NDArray[np.int64]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """A sampler that divides a dataset among the workers.

    When they have changed, it divides the rest of the epoch again. Pass it to a ``DataLoader`` and to a
    :class:`~hvd_cluster.torch.elastic.TorchState`, and call :meth:`record_batch` after every step, before the commit.

    Args:
        dataset: any object with a length.
        shuffle: use a different order in each epoch.
        seed: the seed of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        #: How many samples of the epoch all workers together have processed.
        self.processed_num = 0
        self.rank = 0
        self.num_replicas = 1
        #: The remaining samples of all workers together, in order.
        self.remaining_indices: list[int] = []
        #: Those of this worker.
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch``.

        Call this at the end of each epoch, so that a restored state does not repeat the epoch.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every worker has processed a batch of ``batch_size`` samples."""
        self.processed_num = min(len(self.dataset), self.processed_num + batch_size * self.num_replicas)

    def state_dict(self) -> dict[str, Any]:
        """``{"epoch", "processed_num"}``."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position, and assign the remaining samples to the present workers."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Assign the remaining samples to the present workers."""
        if basics.is_initialized():
            self.rank, self.num_replicas = basics.rank(), basics.size()
        order = epoch_order(len(self.dataset), shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        self.remaining_indices = order[self.processed_num :].tolist()
        self.indices = share(order, self.processed_num, self.rank, self.num_replicas).tolist()

    def __iter__(self) -> Iterator[int]:
        self._enter_world()
        return iter(self.indices)

    def __len__(self) -> int:
        self._enter_world()
        return len(self.indices)

    def _enter_world(self) -> None:
        """Take this worker's share if ``init()`` was called after the sampler was made."""
        if self.num_replicas == 1 and basics.is_initialized() and basics.size() > 1:
            self.reset()


def epoch_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> Indices:
    """The order of an epoch's samples, over all ranks; int64, shape (num_samples,)."""
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
