"""What footers say about files of other writers."""

from __future__ import annotations

import datetime as dt
import struct
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data import ParquetReader
from hvd_cluster.petastorm import make_batch_reader

MOMENTS = [dt.datetime(9999, 12, 31), dt.datetime(2024, 1, 1), dt.datetime(1, 1, 1)]  # noqa: DTZ001


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_int96_moments_outside_of_nanoseconds_are_read_as_they_are(tmp_path: Path, kind: str) -> None:
    table = pa.table({"t": pa.array(MOMENTS, pa.timestamp("us", "UTC"))})
    path = tmp_path / "a.parquet"
    if kind == "delta":
        pytest.importorskip("deltalake").write_deltalake(str(tmp_path), table)
        (path,) = tmp_path.glob("*.parquet")
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=False)
    reader = ParquetReader(tmp_path, batch_size=3, shuffle=False)
    assert reader.schema["t"].unit == "us"
    (batch,) = reader
    assert batch["t"].numpy().astype("datetime64[us]").tolist() == MOMENTS


def test_int96_moments_and_lists_of_them_are_petastorms_too(tmp_path: Path) -> None:
    table = pa.table({"t": pa.array(MOMENTS, pa.timestamp("us")), "l": pa.array([MOMENTS] * 3)})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    with make_batch_reader(tmp_path.as_uri()) as reader:
        (rows,) = reader
    assert np.array_equal(rows.t, np.array(MOMENTS, "datetime64[us]"))
    assert np.array_equal(rows.l, [rows.t] * 3)


def test_row_groups_with_nan_for_a_bound_are_not_passed_over(tmp_path: Path) -> None:
    """As parquet-mr wrote them before 1.10 for columns with NaNs."""
    path = tmp_path / "a.parquet"
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "store_schema": False}
    pq.write_table(pa.table({"x": [1.5, 2.25, 7.125]}), path, **options)
    content = path.read_bytes()
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer, nan = content[begin:], struct.pack("<d", np.nan)
    for bound in (1.5, 7.125):
        assert struct.pack("<d", bound) in footer
        footer = footer.replace(struct.pack("<d", bound), nan)
    path.write_bytes(content[:begin] + footer)
    statistics = pq.read_metadata(path).row_group(0).column(0).statistics
    assert np.isnan([statistics.min, statistics.max]).all()
    for condition, rows in ((("x", "<", 2.0), 1), (("x", ">", 2.0), 2), (("x", "==", 2.25), 1)):
        assert ParquetReader(path, batch_size=1, filters=[condition]).rows == rows


@pytest.mark.needs("fsspec>=2026.9")  # whose memory has such keys
def test_keys_with_an_empty_part_are_read_as_others(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    memory = fsspec.filesystem("memory")
    folder = f"/{tmp_path.name}"
    for key in ("b.parquet", "deep//c.parquet", "deep//_hidden/d.parquet"):
        memory.pipe(f"{folder}/{key}", content)
    try:
        reader = ParquetReader(folder, batch_size=2, shuffle=False, filesystem=memory)
        assert [batch["x"].tolist() for batch in reader] == [[1, 2], [1, 2]]
    finally:
        memory.rm(folder, recursive=True)
