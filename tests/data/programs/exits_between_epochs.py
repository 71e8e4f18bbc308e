"""Makes children that end amid an epoch, while threads read ahead; prints how each ended."""

import os
import sys
import time
import warnings

import torch

from hvd_cluster.data.reader import ParquetReader

warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # Python 3.12, of the fork below
torch.set_num_threads(1)
for number in range(12):
    child = os.fork()
    if not child:
        reader = ParquetReader(sys.argv[1], batch_size=64, num_threads=4, window_bytes=1 << 20)
        batches = iter(reader)
        kept = [next(batches) for _ in range(3)]
        time.sleep(number / 1000)
        sys.exit(0)  # and not os._exit: the interpreter is taken down
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
