from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import make_reader, write_dataset
from hvd_cluster.petastorm.codecs import ScalarCodec
from hvd_cluster.petastorm.errors import PetastormMetadataError, PetastormMetadataGenerationError
from hvd_cluster.petastorm.metadata import ROW_GROUPS_KEY, get_schema_from_dataset_url
from hvd_cluster.petastorm.spark import materialize_dataset
from hvd_cluster.petastorm.spark_types import IntegerType
from hvd_cluster.petastorm.unischema import Unischema, UnischemaField

SCHEMA = Unischema("S", [UnischemaField("id", np.int32, (), ScalarCodec(IntegerType()), False)])


def test_files_and_row_groups_are_as_large_as_asked_for(tmp_path: Path) -> None:
    write_dataset(tmp_path, SCHEMA, ({"id": i} for i in range(25)), row_group_rows=4, rows_per_file=10)
    footers = {file.name: pq.read_metadata(file) for file in sorted(tmp_path.glob("*.parquet"))}
    groups = {name: [f.row_group(i).num_rows for i in range(f.num_row_groups)] for name, f in footers.items()}
    assert list(groups.values()) == [[4, 4, 2], [4, 4, 2], [4, 1]]
    counts = json.loads(pq.read_metadata(tmp_path / "_common_metadata").metadata[ROW_GROUPS_KEY])
    assert counts == {"part-00000.parquet": 3, "part-00001.parquet": 3, "part-00002.parquet": 2}


def test_a_bad_row_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    rows = [{"id": 1}, {"id": 2}, {"id": "three"}]
    with pytest.raises(DataError, match="row 2: field 'id'"):
        write_dataset(tmp_path, SCHEMA, rows, row_group_rows=1, rows_per_file=1)
    assert list(tmp_path.iterdir()) == []


def test_no_rows_and_a_full_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        write_dataset(tmp_path, SCHEMA, [])
    write_dataset(tmp_path, SCHEMA, [{"id": 1}])
    with pytest.raises(DataError, match="holds Parquet already"):
        write_dataset(tmp_path, SCHEMA, [{"id": 1}])


def test_a_block_that_writes_parquet_by_other_means_becomes_a_data_set(tmp_path: Path) -> None:
    with materialize_dataset(None, tmp_path.as_uri(), SCHEMA):
        pq.write_table(pa.table({"id": pa.array([3, 4], pa.int32())}), tmp_path / "a.parquet")
    assert get_schema_from_dataset_url(tmp_path).id == SCHEMA.id
    with make_reader(tmp_path) as reader:
        assert [row.id for row in reader] == [3, 4]


def test_a_block_that_writes_something_else_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(PetastormMetadataGenerationError, match="no Parquet"),
        materialize_dataset(None, tmp_path, SCHEMA),
    ):
        pass
    with (
        pytest.raises(PetastormMetadataGenerationError, match="'id'"),
        materialize_dataset(None, tmp_path, SCHEMA),
    ):
        pq.write_table(pa.table({"other": [1]}), tmp_path / "a.parquet")
    with pytest.raises(PetastormMetadataError, match="no petastorm schema"):
        get_schema_from_dataset_url(tmp_path)
