"""The reader process of a worker."""

from __future__ import annotations

import os
import sys
import time

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.data import materialize, open_table
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.estimators.run.reader_pool import in_pool, options_of_pool, start_method_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def noisy(row):
    return {"x": torch.rand(()).item()}


@pytest.mark.processes
def test_random_augmentation_in_a_reader_process_differs_by_epoch_and_rank_and_repeats_with_the_seed(tmp_path):
    pq.write_table(pa.table({"x": [0.0] * 4}), tmp_path / "a.parquet")
    reader = ParquetReader(tmp_path, batch_size=4, num_threads=1, transformation_fn=noisy, shuffle=False)

    def drawn(*epochs, seed=1, rank=0):
        process = in_pool(reader, "process", "fork", seed=seed, rank=rank)
        batches = [next(process.epoch(epoch)) for epoch in epochs]
        process.close()
        return [tuple(batch["x"].tolist()) for batch in batches]

    (first,) = drawn(0)
    zeroth, second, again = drawn(0, 1, 0)
    assert zeroth == first == again
    assert len({first, second, *drawn(0, rank=1), *drawn(0, seed=-2)}) == 4


def process_id(row):
    return {"x": float(os.getpid())}


@pytest.mark.processes
def test_one_process_reads_all_passes_also_after_one_that_was_left_and_ends_when_it_is_closed(tmp_path):
    pq.write_table(pa.table({"x": [0.0] * 40}), tmp_path / "a.parquet")
    reader = ParquetReader(tmp_path, batch_size=4, num_threads=1, transformation_fn=process_id, remainder="partial")
    process = in_pool(reader, "process", None, seed=0, rank=0)
    assert process.steps == 10
    passes = [[next(process.epoch(0))], list(process.epoch(1)), list(process.epoch(1, 7)), list(process.epoch(0))]
    assert [len(batches) for batches in passes] == [1, 10, 3, 10]
    (pid,) = {int(number) for batches in passes for batch in batches for number in batch["x"].tolist()}
    assert pid != os.getpid()
    os.kill(pid, 0)
    process.close()
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


@pytest.mark.processes
def test_a_reader_process_keeps_rows_in_memory_and_shuffles_as_threads_do(tmp_path):
    pq.write_table(pa.table({"x": [float(number) for number in range(40)]}), tmp_path / "a.parquet")

    def rows(pool, *epochs):
        reader = ParquetReader(tmp_path, batch_size=4, **options_of_pool(pool, 1, in_memory=True))
        pooled = in_pool(reader, pool, None, seed=0, rank=0)
        for epoch in epochs:
            yield [batch["x"].tolist() for batch in pooled.epoch(epoch)]

    expected, found = list(rows("thread", 0, 1)), rows("process", 0, 1)
    assert next(found) == expected[0]
    (tmp_path / "a.parquet").unlink()
    assert next(found) == expected[1] != expected[0]


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_reader_process_of_a_lance_table_is_not_forked_from_one_that_has_read(tmp_path):
    lance = pytest.importorskip("lance")
    lance.write_dataset(pa.table({"x": [0.0, 1.0, 2.0, 3.0]}), str(tmp_path / "t"))
    dataset = materialize(open_table(tmp_path / "t"), str(tmp_path / "store"), columns=["x"])
    reader = ParquetReader(dataset.train, dataset.schema, dataset.store, batch_size=4, shuffle=False)
    (here,) = reader.epoch(0)  # begins the threads of lance
    assert start_method_of("forkserver", dataset) == "forkserver"
    (there,) = in_pool(reader, "process", start_method_of("fork", dataset), seed=0, rank=0).epoch(0)
    assert there["x"].tolist() == here["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    pq.write_table(pa.table({"x": [0.0]}), tmp_path / "a.parquet")
    parquet = materialize(str(tmp_path / "a.parquet"), str(tmp_path / "store"), columns=["x"])
    assert start_method_of("fork", parquet) == "fork"
