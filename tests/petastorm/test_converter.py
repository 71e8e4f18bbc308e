from __future__ import annotations

import itertools
import logging
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.converter import SparkDatasetConverter, make_spark_converter, register_delete_dir_handler
from hvd_cluster.petastorm.pytorch import BatchedDataLoader
from hvd_cluster.topology import Topology

ROWS = 30


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    table = pa.table({"id": pa.array(range(ROWS)), "x": pa.array(range(ROWS), pa.float32())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    return tmp_path


def test_parquet_that_is_there_is_used_in_place_and_deleted_on_request(parquet: Path) -> None:
    converter = pickle.loads(pickle.dumps(make_spark_converter(str(parquet))))
    assert len(converter) == ROWS
    with converter.make_torch_dataloader(batch_size=8, num_epochs=1) as loader:
        ids = [int(i) for batch in loader for i in batch["id"]]
    assert sorted(ids) == list(range(ROWS))
    converter.delete()
    assert not parquet.exists()
    converter.delete()


def test_a_folder_that_names_a_column_of_others_adds_none(tmp_path: Path) -> None:
    (tmp_path / "run=5").mkdir()
    for name in ("0", "1"):
        pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "run=5" / f"{name}.parquet")
    with make_spark_converter(tmp_path / "run=5").make_torch_dataloader(num_epochs=1) as loader:
        assert list(next(iter(loader))) == ["id"]


@pytest.mark.parametrize("as_url", [False, True])
def test_names_with_escapes_are_found_again(tmp_path: Path, as_url: bool) -> None:
    folder = tmp_path / "a b%20c" / "k=a%20b é#?"
    folder.mkdir(parents=True)
    for name in ("0", "1"):
        pq.write_table(pa.table({"id": [1, 2]}), folder / f"{name}.parquet")
    converter = make_spark_converter((tmp_path / "a b%20c").as_uri() if as_url else tmp_path / "a b%20c")
    with converter.make_torch_dataloader(batch_size=4, num_epochs=1) as loader:
        assert sorted(int(i) for batch in loader for i in batch["id"]) == [1, 1, 2, 2]


def test_shards_and_a_loader_of_ones_own(parquet: Path) -> None:
    converter = make_spark_converter(parquet)
    seen = []
    for shard in range(3):
        options = {"cur_shard": shard, "shard_count": 3, "data_loader_fn": BatchedDataLoader, "num_epochs": 1}
        with converter.make_torch_dataloader(batch_size=4, workers_count=1, **options) as loader:
            assert isinstance(loader, BatchedDataLoader)
            seen.append({int(i) for batch in loader for i in batch["id"]})
    assert [len(shard) for shard in seen] == [10, 10, 10]
    assert set().union(*seen) == set(range(ROWS))


def test_ranks_whose_row_groups_are_unequal_take_equally_many_full_batches_without_an_end(parquet: Path) -> None:
    converter = make_spark_converter(parquet)

    def sizes(shard: int, num_epochs: int | None) -> list[int]:
        options = {"cur_shard": shard, "shard_count": 2, "num_epochs": num_epochs, "workers_count": 1}
        with converter.make_torch_dataloader(batch_size=4, **options) as loader:
            return [len(batch["id"]) for batch in itertools.islice(loader, steps if num_epochs is None else None)]

    steps = len(converter) // (4 * 2)
    assert [len(sizes(shard, 1)) for shard in (0, 1)] == [5, 3]  # row groups of ten rows, two and one
    assert [sizes(shard, None) for shard in (0, 1)] == [[4] * steps] * 2


def test_a_worker_that_reads_everything_is_warned(
    parquet: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    converter = make_spark_converter(parquet)
    topology = Topology(rank=1, size=2, local_rank=1, local_size=2, cross_rank=0, cross_size=1)
    for name, value in topology.to_env().items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING), converter.make_torch_dataloader(num_epochs=1):
        pass
    assert "rank 1 of 2" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), converter.make_torch_dataloader(num_epochs=1, cur_shard=1, shard_count=2):
        pass
    assert caplog.text == ""


def test_a_with_block_deletes_the_files_at_its_end(parquet: Path) -> None:
    with make_spark_converter(str(parquet)) as converter:
        assert len(converter) == ROWS
    assert not parquet.exists()


def test_deleting_can_be_somebody_elses_business(parquet: Path) -> None:
    asked: list[str] = []
    register_delete_dir_handler(asked.append)
    try:
        make_spark_converter(parquet).delete()
    finally:
        register_delete_dir_handler(None)
    assert asked == [str(parquet)]
    assert parquet.exists()


@pytest.fixture
def frame(spark: Any) -> Any:
    from pyspark.ml.linalg import Vectors

    rows = [(i, float(i) / 2, [float(i), 1.0], Vectors.dense([i, 2.0]), i % 2 == 0) for i in range(ROWS)]
    return spark.createDataFrame(rows, ["id", "x.y", "list", "vector", "flag"])


@pytest.mark.spark
@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), (None, torch.float64)])
def test_a_dataframe_is_written_once_and_read_as_tensors(
    frame: Any, tmp_path: Path, dtype: str | None, expected: torch.dtype
) -> None:
    parent = (tmp_path / "cache").as_uri()
    converter = make_spark_converter(frame, dtype=dtype, parent_cache_dir_url=parent)
    try:
        assert make_spark_converter(frame.select("*"), dtype=dtype, parent_cache_dir_url=parent) is converter
        other = make_spark_converter(frame.filter("id < 5"), dtype=dtype, parent_cache_dir_url=parent)
        assert (len(converter), len(other)) == (ROWS, 5)
        other.delete()
        with converter.make_torch_dataloader(batch_size=ROWS, num_epochs=1) as loader:
            (batch,) = list(loader)
        order = batch["id"].argsort()
        ids = torch.arange(ROWS)
        assert torch.equal(batch["id"][order], ids)
        assert torch.equal(batch["x.y"][order], (ids / 2).to(expected))
        assert torch.equal(batch["vector"][order], torch.stack([ids, torch.full((ROWS,), 2)], 1).to(expected))
        assert batch["list"].dtype == expected
        assert batch["flag"].dtype == torch.uint8
    finally:
        converter.delete()
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.spark("local", "connect")
def test_a_path_with_other_files_than_before_is_written_again(spark: Any, tmp_path: Path) -> None:
    parent = (tmp_path / "cache").as_uri()

    def converted(factor: int) -> SparkDatasetConverter:
        source = spark.range(0, 3, 1, 1).selectExpr(f"id * {factor} AS id")
        source.write.mode("overwrite").parquet(str(tmp_path / "in"))
        return make_spark_converter(spark.read.parquet(str(tmp_path / "in")), parent_cache_dir_url=parent)

    converters = [converted(1), converted(10)]
    found = [sorted(pq.read_table(one.cache_dir_url.removeprefix("file://"))["id"].to_pylist()) for one in converters]
    assert found == [[0, 1, 2], [0, 10, 20]]
    for converter in converters:
        converter.delete()


@pytest.mark.spark("connect", "local")
def test_a_view_that_was_replaced_is_written_again(spark: Any, tmp_path: Path) -> None:
    def written(rows: int) -> SparkDatasetConverter:
        spark.range(0, rows, 1, 1).createOrReplaceTempView("converted_view")
        return make_spark_converter(spark.table("converted_view"), parent_cache_dir_url=tmp_path.as_uri())

    try:
        converters = [written(rows) for rows in (3, 3, 5)]
    finally:
        spark.catalog.dropTempView("converted_view")
    assert [len(converter) for converter in converters] == [3, 3, 5]
    assert converters[0] is converters[1]
    for converter in converters[1:]:
        converter.delete()


@pytest.mark.spark("connect")
@pytest.mark.slow
def test_a_frame_of_a_session_that_has_gone_is_not_an_obstacle(spark: Any, tmp_path: Path) -> None:
    parent = (tmp_path / "cache").as_uri()
    other = spark.newSession()
    converters = [make_spark_converter(other.range(3), parent_cache_dir_url=parent)]
    other.client.release_session()
    other.client.close()  # stop() would end the server, and a client that stays open asks for it as the process ends
    converters += [make_spark_converter(spark.range(3), parent_cache_dir_url=parent) for _ in range(2)]
    assert converters[0] is not converters[1]
    assert converters[1] is converters[2]
    for converter in converters[:2]:
        converter.delete()


@pytest.mark.spark("local")
def test_the_folder_comes_from_sparks_setting(frame: Any, spark: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="parentCacheDirUrl"):
        make_spark_converter(frame)
    with pytest.raises(DataError, match="dtype"):
        make_spark_converter(frame, dtype="float16")
    with pytest.raises(DataError, match="compression_codec"):
        make_spark_converter(frame, compression_codec="rar")
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, tmp_path.as_uri())
    try:
        converter = make_spark_converter(frame, compression_codec="gzip")
        footer = pq.read_metadata(converter.file_urls[0].removeprefix("file://"))
        assert footer.row_group(0).column(0).compression == "GZIP"
        converter.delete()
    finally:
        spark.conf.unset(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF)
