"""The reader process of a worker."""

from __future__ import annotations

import sys

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.data import materialize, open_table
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.estimators.run.reader_pool import one_pass, start_method_of

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


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_reader_process_of_a_lance_table_is_not_forked_from_one_that_has_read(tmp_path):
    lance = pytest.importorskip("lance")
    lance.write_dataset(pa.table({"x": [0.0, 1.0, 2.0, 3.0]}), str(tmp_path / "t"))
    dataset = materialize(open_table(tmp_path / "t"), str(tmp_path / "store"), columns=["x"])
    reader = ParquetReader(dataset.train, dataset.schema, dataset.store, batch_size=4, shuffle=False)
    (here,) = reader.epoch(0)  # begins the threads of lance
    assert start_method_of("forkserver", dataset) == "forkserver"
    (there,) = one_pass(reader, 0, 0, "process", start_method_of("fork", dataset), seed=0, rank=0)
    assert there["x"].tolist() == here["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    pq.write_table(pa.table({"x": [0.0]}), tmp_path / "a.parquet")
    parquet = materialize(str(tmp_path / "a.parquet"), str(tmp_path / "store"), columns=["x"])
    assert start_method_of("fork", parquet) == "fork"
