"""Makes children that end amid an epoch over a loader that loads in advance; prints how each ended."""

import os
import sys
import time
import warnings
from collections.abc import Iterator

import torch

from hvd_cluster.data.loaders import AsyncDataLoaderMixin, BaseDataLoader


class Batches(BaseDataLoader):
    """Batches that take their time in C++."""

    def __len__(self) -> int:
        return 10_000

    def _iterate(self) -> Iterator[torch.Tensor]:
        for _ in range(len(self)):
            yield torch.randn(400_000).sort().values


class AsyncBatches(AsyncDataLoaderMixin, Batches):
    """The same in advance."""


warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # Python 3.12, of the fork below
torch.set_num_threads(1)
for number in range(12):
    child = os.fork()
    if not child:
        batches = iter(AsyncBatches(64))
        kept = [next(batches) for _ in range(2)]
        time.sleep(number / 200)
        sys.exit(0)  # and not os._exit: the interpreter is taken down
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
