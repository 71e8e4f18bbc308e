"""Tables on S3, served by moto on localhost."""

from __future__ import annotations

import pickle
from typing import Any

import deltalake
import lance
import numpy as np
import pyarrow as pa
import pytest
from iceberg_files import start_threads
from pyiceberg.catalog.sql import SqlCatalog
from table_rows import rows_read

from hvd_cluster.data import materialize, open_table

ROWS = pa.table({"id": np.arange(100), "x": np.arange(100) * 0.5})


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    start_threads()


def ids(table: Any) -> list[int]:
    return sorted(int(row[0]) for row in rows_read(table, ["id"]).elements())


def test_a_delta_table_on_s3(bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "aws_region": "us-east-1",
        "aws_endpoint": endpoint,
        "aws_allow_http": "true",
        "aws_conditional_put": "etag",
    }
    bucket = f"{bucket}/my data"
    deltalake.write_deltalake(f"{bucket}/t", ROWS, storage_options=options)
    table = deltalake.DeltaTable(f"{bucket}/t", storage_options=options)
    table.delete("id >= 50")
    assert ids(pickle.loads(pickle.dumps(open_table(table)))) == [*range(50)]
    assert ids(open_table(f"{bucket}/t", version=0, storage_options=options)) == [*range(100)]
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert ids(open_table(f"{bucket}/t")) == [*range(50)]
    dataset = materialize(f"{bucket}/t", f"{bucket}/store", columns=["id"])
    assert dataset.train.rows == 50


def test_a_delta_table_with_the_short_names_of_options(
    bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "access_key_id": "test",
        "secret_access_key": "test",
        "region": "us-east-1",
        "endpoint": endpoint,
        "allow_http": "true",
        "conditional_put": "etag",
    }
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    deltalake.write_deltalake(f"{bucket}/t", ROWS, storage_options=options)
    assert ids(deltalake.DeltaTable(f"{bucket}/t", storage_options=options)) == [*range(100)]
    assert ids(open_table(f"{bucket}/t", storage_options=options)) == [*range(100)]


def test_a_lance_table_on_s3(bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "aws_region": "us-east-1",
        "aws_endpoint": endpoint,
        "allow_http": "true",
    }
    table = lance.write_dataset(ROWS, f"{bucket}/t.lance", storage_options=options)
    table.delete("id >= 50")
    assert ids(pickle.loads(pickle.dumps(open_table(table)))) == [*range(50)]
    assert ids(open_table(f"{bucket}/t.lance", version=1, storage_options=options)) == [*range(100)]


def test_an_iceberg_table_on_s3(bucket: str, endpoint: str, tmp_path: Any) -> None:
    properties = {
        "s3.endpoint": endpoint,
        "s3.access-key-id": "test",
        "s3.secret-access-key": "test",
        "s3.region": "us-east-1",
    }
    catalog = SqlCatalog("s3", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"{bucket}/warehouse", **properties)
    try:
        catalog.create_namespace("db")
        table = catalog.create_table("db.t", ROWS.schema)
        table.append(ROWS)
        table.delete("id >= 50")
        assert ids(pickle.loads(pickle.dumps(open_table(table)))) == [*range(50)]
        assert ids(open_table(table.metadata_location, storage_options=properties)) == [*range(50)]
    finally:
        catalog.close()
