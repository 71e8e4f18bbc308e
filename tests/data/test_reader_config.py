"""The reader's options in groups: the same as single arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data import ColumnConfig, OrderConfig, ParquetReader, PrefetchConfig
from hvd_cluster.data.cache import MemoryCache
from hvd_cluster.data.reader_config import ReaderOptions
from hvd_cluster.errors import DataError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    table = pa.table({"x": list(range(40)), "t": [[1] * (i % 4) for i in range(40)], "n": [None, 1.0] * 20})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    return tmp_path / "a.parquet"


def rows(file: Path, **options: Any) -> list[list[Any]]:
    found = ParquetReader(file, batch_size=8, rank=0, size=1, remainder="partial", **options)
    return [[values.tolist() for values in batch.values()] for batch in found]


def test_a_group_gives_the_same_batches_as_its_fields(file: Path) -> None:
    columns: dict[str, Any] = {"shapes": {"t": (3,)}, "pad": {"t": 0}, "fill_nulls": {"n": 7}}
    order: dict[str, Any] = {"seed": 3, "window_bytes": 100, "lanes": 2}
    prefetch: dict[str, Any] = {"num_threads": 1, "prefetch_bytes": 1000, "cache": MemoryCache(1 << 20)}
    grouped = rows(
        file,
        column_config=ColumnConfig(**columns),
        order_config=OrderConfig(**order),
        prefetch_config=PrefetchConfig(**prefetch),
    )
    assert grouped == rows(file, **columns, **order, **prefetch)
    assert grouped != rows(file, **columns, **{**order, "seed": 4})


def test_an_argument_overrides_its_field(file: Path) -> None:
    order, columns = OrderConfig(seed=3), ColumnConfig(shapes={"t": (3,)}, pad={"t": 0}, drop_nulls=True)
    found = rows(file, column_config=columns, order_config=order, shuffle=False, pad={"t": 5})
    assert [batch[0] for batch in found] == [list(range(1, 16, 2)), list(range(17, 32, 2)), list(range(33, 40, 2))]
    assert found[0][1][0] == [1, 5, 5]


def test_every_field_of_a_group_is_an_argument() -> None:
    groups = (ColumnConfig, OrderConfig, PrefetchConfig)
    assert {field.name for group in groups for field in dataclasses.fields(group)} == set(ReaderOptions.__annotations__)


def test_what_no_group_has_is_refused(file: Path) -> None:
    with pytest.raises(TypeError, match="no argument 'num_workers'"):
        ParquetReader(file, batch_size=8, num_workers=2)  # type: ignore[call-arg]


def test_all_wrong_values_are_named_at_once(file: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)batch_size is 0.*rank is 3 of size 2.*lanes is 0.*num_threads is 0"):
        ParquetReader(
            file,
            batch_size=0,
            rank=3,
            size=2,
            order_config=OrderConfig(lanes=0),
            prefetch_config=PrefetchConfig(num_threads=0),
        )


def test_a_rule_for_columns_that_is_not_a_dict_is_named(file: Path) -> None:
    with pytest.raises(DataError, match=r"pad is \['x'\]: give a dict.*\nfill_nulls is 0: give a dict"):
        ParquetReader(file, batch_size=1, fill_nulls=0, pad=["x"])  # type: ignore[arg-type]


def test_a_reader_that_drops_all_rows_says_so(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    for remainder in ("pad", "partial", "uneven"):
        ParquetReader(file, batch_size=1000, rank=0, size=2, remainder=remainder)  # type: ignore[arg-type]
    assert not caplog.records
    reader = ParquetReader(file, batch_size=1000, rank=0, size=2)
    assert reader.steps == 0
    assert f"{reader.rows} rows do not fill one global batch of 2000" in caplog.text
