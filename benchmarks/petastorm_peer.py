"""Runs petastorm in the environment that has it: a line of JSON in, the rows and seconds of one pass over a file out.

Started by ``benchmarks/reader.py`` with another Python; imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any


def padding(length: int) -> Any:
    """What petastorm needs to make tensors of ragged lists: they are padded row by row in its workers."""
    import numpy as np
    from petastorm.transform import TransformSpec

    def pad(frame: Any) -> Any:
        frame["t"] = [np.pad(values[:length], (0, max(0, length - len(values)))) for values in frame["t"]]
        return frame

    return TransformSpec(pad, edit_fields=[("t", np.int32, (length,), False)])


def read(
    path: str, batch_size: int, num_threads: int, ragged_length: int, shuffle_rows: int, cache: str | None
) -> dict[str, float]:
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    options: dict[str, Any] = {"transform_spec": padding(ragged_length)} if ragged_length else {}
    if cache:
        options |= {"cache_type": "local-disk", "cache_location": cache, "cache_size_limit": 1 << 30}
        options |= {"cache_row_size_estimate": 128}
    start_s = time.perf_counter()
    rows = 0
    with make_batch_reader(
        f"file://{path}", num_epochs=1, shuffle_row_groups=True, workers_count=num_threads, **options
    ) as reader:
        for batch in BatchedDataLoader(reader, batch_size=batch_size, shuffling_queue_capacity=shuffle_rows):
            rows += len(next(iter(batch.values())))
    return {"rows": rows, "seconds": time.perf_counter() - start_s}


def main() -> None:
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    # Some of what petastorm imports prints.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(read(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
