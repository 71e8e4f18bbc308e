"""The reader process of a worker."""

from __future__ import annotations

import sys

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.estimators.run.reader_pool import one_pass

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def noisy(row):
    return {"x": torch.rand(()).item()}


@pytest.mark.processes
def test_random_augmentation_in_a_reader_process_differs_by_epoch_and_rank_and_repeats_with_the_seed(tmp_path):
    pq.write_table(pa.table({"x": [0.0] * 4}), tmp_path / "a.parquet")
    reader = ParquetReader(tmp_path, batch_size=4, num_threads=1, transformation_fn=noisy, shuffle=False)

    def drawn(seed=1, epoch=0, rank=0, start=0):
        (batch,) = one_pass(reader, epoch, start, "process", "fork", seed=seed, rank=rank)
        return tuple(batch["x"].tolist())

    first = drawn()
    assert drawn() == first
    assert len({first, drawn(epoch=1), drawn(rank=1), drawn(seed=-2)}) == 4
