"""A reader under TensorFlow's loops."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.tf_dataset import to_tf_dataset
from hvd_cluster.errors import DataError, MissingExtraError


@pytest.fixture
def reader(tmp_path: Path) -> ParquetReader:
    ids = np.arange(50)
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.stack([ids, 2 * ids], 1).astype("f4").reshape(-1)), 2)
    pq.write_table(pa.table({"id": ids, "f": pairs}), tmp_path / "a.parquet", row_group_size=7)
    return ParquetReader(tmp_path, batch_size=8)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_without_tensorflow_the_error_names_the_extra(reader: ParquetReader) -> None:
    with pytest.raises(MissingExtraError, match=r"hvd-cluster\[tensorflow\]"):
        to_tf_dataset(reader)


def test_batches_are_those_of_the_reader(reader: ParquetReader) -> None:
    pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    expected = [batch["id"].tolist() for epoch in (0, 1) for batch in reader.epoch(epoch)]
    dataset = to_tf_dataset(reader, num_epochs=2)
    assert int(dataset.cardinality()) == len(expected) == 12
    batches = list(dataset)
    assert [batch["id"].numpy().tolist() for batch in batches] == expected
    assert batches[0]["f"].shape == (8, 2)
    assert batches[0]["f"].numpy().dtype == np.float32
    assert reader.position.epoch == 2


def test_a_data_set_goes_on_from_the_position(reader: ParquetReader) -> None:
    pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    expected = [batch["id"].tolist() for batch in reader.epoch(0)]
    batches = iter(reader)
    next(batches)
    dataset = to_tf_dataset(reader, map_batch=lambda batch: (batch["f"], batch["id"]), prefetch=2)
    assert [ids.numpy().tolist() for _, ids in dataset] == expected[1:]


def test_no_epochs_are_refused(reader: ParquetReader) -> None:
    pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    with pytest.raises(DataError, match="num_epochs is 0"):
        to_tf_dataset(reader, num_epochs=0)
