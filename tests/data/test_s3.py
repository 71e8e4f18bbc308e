"""Stores and readers on S3, served by moto on localhost."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.cache import DiskCache
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError


def test_a_store_writes_reads_lists_and_deletes(bucket: str) -> None:
    store = Store.create(bucket)
    store.check_writable()
    store.write(f"{bucket}/runs/r/checkpoint", b"weights")
    store.write_text(f"{bucket}/runs/r/logs/a", "text")
    assert store.read(f"{bucket}/runs/r/checkpoint") == b"weights"
    assert store.list(f"{bucket}/runs/r", recursive=True)[0] == "bucket/work/runs/r/checkpoint"
    assert store.exists(f"{bucket}/runs/r/logs/a")
    store.copy(f"{bucket}/runs/r/checkpoint", f"{bucket}/runs/s/checkpoint")
    assert store.read(f"{bucket}/runs/s/checkpoint") == b"weights"
    store.delete(f"{bucket}/runs/r")
    assert not store.exists(f"{bucket}/runs/r/checkpoint")
    with pytest.raises(FileNotFoundError):
        store.read(f"{bucket}/runs/r/checkpoint")


def test_hadoops_names_of_s3_are_the_same(bucket: str) -> None:
    Store.create(bucket).write(f"{bucket}/x", b"1")
    for scheme in ("s3a", "s3n"):
        url = bucket.replace("s3:", f"{scheme}:")
        assert Store.create(url).read(f"{url}/x") == b"1"


@pytest.mark.parametrize("name", ["p=a%20b", "my data", "é#+"])
def test_paths_name_objects_as_they_are(bucket: str, endpoint: str, name: str) -> None:
    Store.create(f"{bucket}/{name}").write(f"{bucket}/{name}/x y%2F", b"1")
    s3 = pa.fs.S3FileSystem(endpoint_override=endpoint, region="us-east-1")
    assert s3.open_input_file(f"bucket/work/{name}/x y%2F").read() == b"1"
    assert Store.create(f"{bucket}/{name}").fs.type_name == "s3", "and not fsspec's"


def test_data_is_written_to_s3_and_read_in_shards(bucket: str, tmp_path: Path) -> None:
    table = pa.table({"id": np.arange(1000), "x": np.arange(1000) / 2, "v": [i % 10 == 0 for i in range(1000)]})
    data = materialize(table, Store.create(bucket), columns=["id", "x"], validation="v", num_proc=2)
    assert data.validation is not None
    assert data.train.rows == 900
    seen: list[int] = []
    for rank in range(2):
        cache = DiskCache(tmp_path / "cache", 1 << 20)
        reader = ParquetReader(data, batch_size=50, rank=rank, size=2, cache=cache)
        for epoch in range(2):
            rows = [row for batch in reader for row in batch["id"].tolist()]
            seen += rows if epoch == 0 else []
            assert len(rows) == 450
    assert sorted(seen) == [i for i in range(1000) if i % 10]
    names = Store.create(bucket).list(bucket, recursive=True)
    assert not [name for name in names if "/_part" in name], "no temporary name is left"
    data.remove()
    assert not [name for name in Store.create(bucket).list(bucket, recursive=True) if name.endswith(".parquet")]


def test_a_reader_on_partitioned_data_by_url_and_by_filesystem(bucket: str, endpoint: str) -> None:
    store = Store.create(bucket)
    for year in (2023, 2024):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": np.arange(year * 100, year * 100 + 50)}), sink, row_group_size=20)
        store.write(f"{bucket}/data/year={year}/a.parquet", sink.getvalue().to_pybytes())
    by_url = ParquetReader(f"{bucket}/data", filters=[("year", "=", 2024)], batch_size=50, shuffle=False)
    (batch,) = by_url
    assert batch["id"].tolist() == list(range(202400, 202450))
    assert set(batch["year"].tolist()) == {2024}
    s3 = pa.fs.S3FileSystem(endpoint_override=endpoint, region="us-east-1")
    assert ParquetReader("bucket/work/data", ["id"], filesystem=s3, batch_size=10).rows == 100


def test_a_truncated_object_is_named_with_its_row_group(bucket: str) -> None:
    store = Store.create(bucket)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": np.arange(10_000)}), sink, row_group_size=1000)
    data = sink.getvalue().to_pybytes()
    store.write(f"{bucket}/a.parquet", data)
    reader = ParquetReader(f"{bucket}/a.parquet", batch_size=50, window_bytes=8000)
    store.write(f"{bucket}/a.parquet", data[: len(data) // 2])
    with pytest.raises(DataError, match=r"cannot read row group \d+ of bucket/work/a\.parquet"):
        list(reader)


def test_a_refused_permission_is_said_at_once(bucket: str, endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = Store.create(bucket)
    store.write(f"{bucket}/a", b"1")
    deny = {"Effect": "Deny", "Principal": "*", "Action": ["s3:*"], "Resource": ["arn:aws:s3:::bucket/*"]}
    client = pytest.importorskip("boto3", reason="boto3 is not installed").client("s3", endpoint_url=endpoint)
    client.put_bucket_policy(Bucket="bucket", Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
    try:
        with pytest.raises(OSError, match="ACCESS_DENIED"):
            store.read(f"{bucket}/a")
        with pytest.raises(DataError, match="ACCESS_DENIED"):
            store.check_writable()
    finally:
        client.delete_bucket_policy(Bucket="bucket")
        client.close()
    assert "attempt" not in caplog.text


def test_a_bucket_that_is_not_there_is_named(bucket: str) -> None:
    with pytest.raises(DataError, match="nowhere"):
        ParquetReader("s3://nowhere/data", batch_size=1)
