"""make_reader and make_batch_reader over data that this process has written."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import TransformSpec, make_batch_reader, make_reader, write_dataset
from hvd_cluster.petastorm.codecs import NdarrayCodec, ScalarCodec
from hvd_cluster.petastorm.converter import make_spark_converter
from hvd_cluster.petastorm.errors import DecodeFieldError, NoDataAvailableError
from hvd_cluster.petastorm.predicates import (
    PredicateBase,
    in_intersection,
    in_lambda,
    in_negate,
    in_pseudorandom_split,
    in_reduce,
    in_set,
)
from hvd_cluster.petastorm.spark_types import LongType
from hvd_cluster.petastorm.transform import edit_field
from hvd_cluster.petastorm.unischema import Unischema, UnischemaField

ROWS, GROUP = 40, 5
SCHEMA = Unischema(
    "Rows",
    [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False),
        UnischemaField("x", np.float32, (3,), NdarrayCodec(), False),
    ],
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rows")
    rows = ({"id": i, "x": np.full(3, i, np.float32)} for i in range(ROWS))
    assert write_dataset(folder, SCHEMA, rows, row_group_rows=GROUP, rows_per_file=20) == ROWS
    return f"file://{folder}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    table = pa.table(
        {
            "id": pa.array(range(ROWS)),
            "x": pa.array([i / 2 for i in range(ROWS)], pa.float32()),
            "ragged": pa.array([[i] * (i % 3) for i in range(ROWS)], pa.list_(pa.int32())),
            "tags": pa.array([[i, i + 1] for i in range(ROWS)]),
            "name": [f"n{i}" for i in range(ROWS)],
        }
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=GROUP)
    return str(folder)


def ids(url: str, **kargs: Any) -> list[int]:
    with make_reader(url, **kargs) as reader:
        return [int(row.id) for row in reader]


def batches(url: str, **kargs: Any) -> Iterator[dict[str, Any]]:
    with make_batch_reader(url, **kargs) as reader:
        for batch in reader:
            yield batch._asdict()


@pytest.mark.parametrize("pool", ["thread", "process", "dummy"])
def test_unshuffled_rows_come_in_order_from_any_pool(url: str, pool: str) -> None:
    assert ids(url, reader_pool_type=pool, shuffle_row_groups=False) == list(range(ROWS))


def test_the_order_depends_on_the_seed_and_the_pass_and_nothing_else(url: str) -> None:
    first = ids(url, seed=3, shuffle_rows=True, num_epochs=2)
    assert first == ids(url, seed=3, shuffle_rows=True, num_epochs=2, workers_count=1)
    assert first == ids(url, seed=3, shuffle_rows=True, num_epochs=2, reader_pool_type="dummy", results_queue_size=1)
    assert first != ids(url, seed=4, shuffle_rows=True, num_epochs=2)
    assert first[:ROWS] != first[ROWS:]
    assert sorted(first[:ROWS]) == sorted(first[ROWS:]) == list(range(ROWS))


def test_shuffled_row_groups_stay_whole_and_parts_of_them_do_not(url: str) -> None:
    whole = ids(url, seed=1)
    assert all(whole[i : i + GROUP] == list(range(whole[i], whole[i] + GROUP)) for i in range(0, ROWS, GROUP))
    parts = ids(url, seed=1, shuffle_row_drop_partitions=2)
    assert sorted(parts) == list(range(ROWS))
    assert any(parts[i] // GROUP != parts[i + 2] // GROUP for i in range(0, ROWS - 2, GROUP))


@pytest.mark.parametrize("seed", [None, 7])
def test_shards_share_every_row_once(url: str, seed: int | None) -> None:
    shards = [ids(url, cur_shard=k, shard_count=3, seed=seed) for k in range(3)]
    assert Counter(row for shard in shards for row in shard) == Counter(range(ROWS))
    assert {len(shard) for shard in shards} <= {10, 15}
    if seed is not None:
        assert shards[0] != [ids(url, cur_shard=0, shard_count=3, seed=seed + 1)]
        assert set(shards[0]) != set(ids(url, cur_shard=0, shard_count=3, seed=None))


def test_more_shards_than_row_groups_are_refused(url: str) -> None:
    with pytest.raises(NoDataAvailableError, match="8 row groups cannot be shared by 9"):
        make_reader(url, cur_shard=0, shard_count=9)


@pytest.mark.parametrize(
    ("kargs", "text"),
    [
        ({"cur_shard": 1}, "cur_shard"),
        ({"cur_shard": 3, "shard_count": 3}, "cur_shard"),
        ({"reader_pool_type": "fibre"}, "reader_pool_type"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"cache_type": "memory"}, "cache_type"),
        ({"cache_type": "local-disk"}, "cache_location"),
        ({"workers_count": 0}, "workers_count"),
        ({"predicate": lambda row: True}, "predicate"),
        ({"predicate": in_set([1], "nothing")}, "nothing"),
        ({"transform_spec": lambda row: row}, "TransformSpec"),
        ({"schema_fields": ["nothing"]}, "nothing"),
        ({"schema_fields": {0: ["id"]}}, "list of UnischemaFields"),
        ({"filters": [("id", "~", 3)]}, "filters"),
        ({"filters": [("nothing", "==", 3)]}, "nothing"),
        ({"rowgroup_selector": None, "transform_spec": TransformSpec(edit_fields=[edit_field("y", np.int8, ())])}, "y"),
    ],
)
def test_arguments_that_make_no_sense_are_named(url: str, kargs: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        make_reader(url, **kargs)


def test_fields_are_chosen_by_field_or_pattern(url: str) -> None:
    for chosen in (["i."], [SCHEMA.id]):
        with make_reader(url, chosen) as reader:
            assert next(reader)._fields == ("id",)


def test_a_reader_repeats_forever(url: str) -> None:
    with make_reader(url, num_epochs=None, seed=1) as reader:
        seen = [int(next(reader).id) for _ in range(3 * ROWS)]
    assert Counter(seen) == Counter(list(range(ROWS)) * 3)
    with make_reader(url, seed=1) as reader:
        first = [int(row.id) for row in reader]
        assert reader.last_row_consumed
        reader.reset()
        second = [int(row.id) for row in reader]
        assert sorted(second) == list(range(ROWS))
        assert first != second, "the second pass has an order of its own"
        reader.reset()
        next(reader)
        with pytest.raises(NotImplementedError, match="one iterator"):
            reader.reset()
    with pytest.raises(RuntimeError, match="stopped"):
        next(reader)


def test_a_dropped_reader_ends_its_threads(url: str) -> None:
    before = set(threading.enumerate())
    reader = make_reader(url, num_epochs=None)
    next(reader)
    assert set(threading.enumerate()) - before
    del reader
    gc.collect()
    assert not set(threading.enumerate()) - before


def test_filters_are_exact_and_skip_row_groups(url: str, plain: str) -> None:
    assert ids(url, filters=[("id", ">", 33), ("id", "!=", 36)], shuffle_row_groups=False) == [34, 35, 37, 38, 39]
    with make_batch_reader(plain, filters=[[("name", "==", "n7")], [("id", "==", 31)]]) as reader:
        assert sorted(int(i) for batch in reader for i in batch.id) == [7, 31]
        assert reader.diagnostics["pieces"] < ROWS // GROUP
    with pytest.raises(NoDataAvailableError):
        make_reader(url, filters=[("id", ">", 100)])


def test_no_matching_row_is_an_end_and_not_a_wait_forever(url: str) -> None:
    assert ids(url, predicate=in_set([-1], "id")) == []
    with make_reader(url, predicate=in_set([-1], "id"), num_epochs=None) as reader, pytest.raises(NoDataAvailableError):
        next(reader)


def odd() -> PredicateBase:
    return in_lambda(["id"], lambda number: number % 2 == 1)


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (in_set({3, 9, 50}, "id"), [3, 9]),
        (odd(), list(range(1, ROWS, 2))),
        (in_negate(odd()), list(range(0, ROWS, 2))),
        (in_reduce([odd(), in_set(range(6), "id")], all), [1, 3, 5]),
        (in_lambda(["id"], lambda number, limit: number < limit, state_arg=4), [0, 1, 2, 3]),
    ],
)
def test_predicates_mean_the_same_for_rows_and_for_batches(
    url: str, plain: str, predicate: PredicateBase, expected: list[int]
) -> None:
    assert ids(url, predicate=predicate, shuffle_row_groups=False) == expected
    found = batches(plain, predicate=predicate, shuffle_row_groups=False)
    assert [int(i) for batch in found for i in batch["id"]] == expected


def test_predicates_over_arrays_and_splits(plain: str) -> None:
    found = batches(plain, predicate=in_intersection([5, 20], "tags"), shuffle_row_groups=False)
    assert [int(i) for batch in found for i in batch["id"]] == [4, 5, 19, 20]
    parts = [
        {
            int(i)
            for batch in batches(plain, predicate=in_pseudorandom_split([0.5, 0.5], k, "name"))
            for i in batch["id"]
        }
        for k in range(2)
    ]
    assert parts[0] | parts[1] == set(range(ROWS))
    assert not parts[0] & parts[1]
    assert 8 < len(parts[0]) < 32


def test_a_predicate_on_a_partition_reads_no_other_folder(tmp_path: Path) -> None:
    for month in ("01", "02"):
        (tmp_path / f"month={month}").mkdir()
        pq.write_table(pa.table({"id": [int(month)]}), tmp_path / f"month={month}" / "a.parquet")
    with make_reader(tmp_path, predicate=in_set([2], "month")) as reader:
        assert reader.diagnostics["pieces"] == 1
        row = next(reader)
        assert (row.month, row.id) == (2, 2)


def test_listed_files_have_the_columns_of_the_folders_directly_above_them(tmp_path: Path) -> None:
    for month in (1, 2):
        (tmp_path / "run=5" / "cache" / f"month={month}").mkdir(parents=True)
        pq.write_table(pa.table({"id": [month]}), tmp_path / "run=5" / "cache" / f"month={month}" / "a.parquet")
        pq.write_table(pa.table({"id": [month]}), tmp_path / "run=5" / "cache" / f"{month}.parquet")
    for pattern, names in (("*.parquet", ["id"]), ("*/*.parquet", ["month", "id"])):
        files = sorted((tmp_path / "run=5" / "cache").glob(pattern))
        with make_batch_reader(files) as reader:
            assert list(reader.schema.fields) == names


def test_a_transform_of_rows_changes_the_schema(url: str) -> None:
    spec = TransformSpec(
        lambda row: {"id": row["id"], "sum": row["x"].sum()},
        edit_fields=[edit_field("sum", np.float32, ())],
        removed_fields=["x"],
    )
    with make_reader(url, transform_spec=spec, shuffle_row_groups=False) as reader:
        assert list(reader.schema.fields) == ["id", "sum"]
        assert [(int(row.id), float(row.sum)) for row in reader][:3] == [(0, 0.0), (1, 3.0), (2, 6.0)]
    bad = TransformSpec(lambda row: {"id": row["id"]})
    with (
        make_reader(url, transform_spec=bad) as reader,
        pytest.raises(DataError, match=r"row group \d of .*lacks.*'x'"),
    ):
        next(reader)
    with pytest.raises(DataError, match="selected_fields"):
        make_reader(url, transform_spec=TransformSpec(selected_fields=["nothing"]))


def test_a_transform_of_batches_gets_a_dataframe(plain: str) -> None:
    def outer(frame: pd.DataFrame) -> pd.DataFrame:
        frame["m"] = frame["x"].map(lambda x: np.full((2, 2), x))
        frame["flat"] = frame["x"].map(lambda x: [x] * 4)
        return frame

    spec = TransformSpec(
        outer,
        edit_fields=[("m", np.float32, (2, 2), False), ("flat", np.float64, (2, 2), False)],
        selected_fields=["m", "id", "flat"],
    )
    batch = next(batches(plain, schema_fields=["id", "x"], transform_spec=spec, shuffle_row_groups=False))
    assert list(batch) == ["m", "id", "flat"]
    assert (batch["m"].shape, batch["m"].dtype) == ((GROUP, 2, 2), np.float32)
    assert (batch["flat"].shape, batch["flat"].dtype) == ((GROUP, 2, 2), np.float64)
    np.testing.assert_array_equal(batch["m"][:, 0, 1], np.arange(GROUP) / 2)


def test_nulls_that_pass_through_a_transform_stay_what_they_are_without_it(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1, None, 3], pa.int32()), "x": [1.0, 2.0, 3.0]}), tmp_path / "a.parquet")
    spec = TransformSpec(lambda frame: frame.assign(z=frame.x), edit_fields=[edit_field("z", np.uint8, ())])
    (batch,) = batches(str(tmp_path), transform_spec=spec)
    np.testing.assert_array_equal(batch["a"], [1.0, np.nan, 3.0])
    np.testing.assert_array_equal(batch["a"], next(batches(str(tmp_path)))["a"])
    assert batch["z"].dtype == np.uint8
    for wrong in (np.nan, np.inf, -1.0, 256, np.full(2, 256)):
        spec = TransformSpec(
            lambda frame, wrong=wrong: frame.assign(z=[wrong] * 3),
            edit_fields=[edit_field("z", np.uint8, np.shape(wrong))],
        )
        with pytest.raises(DataError, match=r"row group 0 of .*'z' has nulls, or numbers out of the range of uint8"):
            next(batches(str(tmp_path), transform_spec=spec))


def test_batches_hold_arrays_that_may_be_written_to(plain: str) -> None:
    batch = next(batches(plain, shuffle_row_groups=False))
    assert (batch["tags"].shape, batch["x"].dtype, batch["name"].dtype.kind) == ((GROUP, 2), np.float32, "U")
    assert [row.tolist() for row in batch["ragged"]] == [[], [1], [2, 2], [], [4]]
    batch["x"][:] = 7
    assert next(batches(plain, shuffle_row_groups=False))["x"][1] == 0.5


def test_the_cache_gives_the_same_and_reads_once(url: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "cache_type": "local-disk",
        "cache_location": tmp_path / "cache",
        "cache_size_limit": 10**8,
        "seed": 1,
    }
    assert ids(url, num_epochs=2, **options) == ids(url, num_epochs=2, seed=1)
    assert not (tmp_path / "cache").exists(), "it goes with its reader"
    kept = {**options, "cache_extra_settings": {"cleanup": False}}
    assert sorted(ids(url, **kept)) == list(range(ROWS))
    files = {file: file.stat().st_ino for file in (tmp_path / "cache").glob("*.arrow")}
    assert len(files) == ROWS // GROUP
    assert sorted(ids(url, **kept)) == list(range(ROWS))
    assert {file: file.stat().st_ino for file in (tmp_path / "cache").glob("*.arrow")} == files
    whole = {file: file.read_bytes() for file in files}
    for file, content in whole.items():
        file.write_bytes(content[:-20])  # cut short, by a machine that went down
    assert sorted(ids(url, **kept)) == list(range(ROWS))
    assert {file: file.read_bytes() for file in files} == whole
    small = {**options, "cache_location": tmp_path / "small", "cache_size_limit": 1}
    assert sorted(ids(url, **small)) == list(range(ROWS))


def test_the_cache_reads_a_source_that_has_changed_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "cache_type": "local-disk",
        "cache_location": tmp_path / "cache",
        "cache_size_limit": 10**8,
        "cache_extra_settings": {"cleanup": False},
    }
    for first in (0, 100):
        pq.write_table(pa.table({"id": range(first, first + 4)}), tmp_path / "a.parquet")
        os.utime(tmp_path / "a.parquet", (first, first))
        assert sorted(ids(str(tmp_path / "a.parquet"), **options)) == list(range(first, first + 4))


def test_damage_is_named_with_its_row_group(tmp_path: Path) -> None:
    write_dataset(tmp_path, SCHEMA, [{"id": i, "x": np.zeros(3, np.float32)} for i in range(4)], row_group_rows=2)
    table = pq.read_table(tmp_path / "part-00000.parquet")
    broken = table.set_column(1, table.schema.field(1), pa.array([b"", *table["x"].to_pylist()[1:]], pa.binary()))
    pq.write_table(broken, tmp_path / "part-00000.parquet", row_group_size=2)
    with (
        make_reader(tmp_path, shuffle_row_groups=False) as reader,
        pytest.raises(DecodeFieldError, match=r"row group 0 of .*part-00000\.parquet: field 'x'"),
    ):
        next(reader)


@pytest.mark.parametrize("mark", ["_INCOMPLETE.123", "_temporary/0/part.parquet"])
def test_half_written_data_is_refused_by_readers_and_writers(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).write_bytes(b"")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "part-0.parquet")
    for make in (make_reader, make_batch_reader, make_spark_converter):
        with pytest.raises(DataError, match="still being written, or its writer died: delete it, and write it again"):
            make(str(tmp_path))
    with pytest.raises(DataError, match="delete it"):
        write_dataset(tmp_path, SCHEMA, [{"id": 1, "x": np.zeros(3, np.float32)}])


def test_a_list_of_files_and_a_filesystem_of_ones_own_are_read(url: str) -> None:
    import fsspec

    folder = Path(url.removeprefix("file://"))
    files = sorted(str(file) for file in folder.glob("*.parquet"))
    assert ids(files[1:], shuffle_row_groups=False) == list(range(20, ROWS))  # type: ignore[arg-type]
    assert ids(str(folder), filesystem=fsspec.filesystem("file"), shuffle_row_groups=False) == list(range(ROWS))
    with pytest.raises(DataError, match="no Parquet"):
        make_reader(folder / "nothing")
    with pytest.raises(DataError, match="one filesystem"):
        make_reader([files[0], "memory://a/b.parquet"])


def test_a_memory_filesystem_holds_a_data_set(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    try:
        write_dataset("memory://things", SCHEMA, [{"id": 1, "x": np.zeros(3, np.float32)}])
        assert ids("memory://things") == [1]
    finally:
        memory.rm("/things", recursive=True)
