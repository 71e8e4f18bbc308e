"""Tables of other formats through petastorm's readers and converters."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hvd_cluster.data import open_table
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import make_batch_reader, make_reader
from hvd_cluster.petastorm.converter import make_spark_converter
from hvd_cluster.petastorm.predicates import in_lambda
from hvd_cluster.petastorm.selectors import SingleIndexSelector

ROWS = 60


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    if find_spec("pyiceberg") is not None:
        from iceberg_files import start_threads

        start_threads()


TABLE = pa.table({"id": range(ROWS), "x": [i / 2 for i in range(ROWS)], "k": ["a", "b"] * (ROWS // 2)})


def delta(path: Path) -> Any:
    """Two partitions, of which the second version lacks a third of the rows."""
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(path), TABLE, partition_by=["k"])
    made = deltalake.DeltaTable(str(path))
    made.delete("id % 3 = 0")
    return made


def lance(path: Path) -> Any:
    made = pytest.importorskip("lance").write_dataset(TABLE, str(path), max_rows_per_file=20)
    made.delete("id % 3 = 0")
    return made


def iceberg(path: Path) -> Any:
    pytest.importorskip("pyiceberg")
    from iceberg_files import catalog_in

    with catalog_in(path.parent) as catalog:
        made = catalog.create_table("db.t", TABLE.schema)
        made.append(TABLE)
        made.overwrite(TABLE.filter(pa.array([i % 3 > 0 for i in range(ROWS)])))
        return made


LIVE = [i for i in range(ROWS) if i % 3]


@pytest.mark.parametrize("make", [delta, lance, iceberg])
def test_readers_give_the_live_rows_of_a_table(make: Any, tmp_path: Path) -> None:
    table = make(tmp_path / "t")
    with make_batch_reader(table, workers_count=2, num_epochs=1) as reader:
        rows = {int(i): (float(x), str(k)) for batch in reader for i, x, k in zip(*batch, strict=True)}
    assert rows == {i: (i / 2, "ab"[i % 2]) for i in LIVE}
    with make_reader(table, num_epochs=1, predicate=in_lambda(["k"], lambda k: k == "a")) as reader:
        assert sorted(row.id for row in reader) == [i for i in LIVE if i % 2 == 0]


@pytest.mark.parametrize("make", [delta, lance])
def test_a_converter_reads_one_version_and_never_deletes_the_table(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "t")
    with make_spark_converter(str(tmp_path / "t")) as converter:
        assert len(converter) == len(LIVE)
        again = pickle.loads(pickle.dumps(converter))
        before = make_spark_converter(open_table(tmp_path / "t", version=0 if make is delta else 1))
        for one, wanted in ((again, LIVE), (before, range(ROWS))):
            with one.make_torch_dataloader(batch_size=8, num_epochs=1) as loader:
                assert sorted(int(i) for batch in loader for i in batch["id"]) == list(wanted)
    assert len(make_spark_converter(tmp_path / "t")) == len(LIVE)


def test_a_converter_reads_one_snapshot_of_an_iceberg_table(tmp_path: Path) -> None:
    made = iceberg(tmp_path / "t")
    with make_spark_converter(made) as converter:
        assert len(converter) == len(LIVE)
        before = make_spark_converter(open_table(made, version=made.history()[0].snapshot_id))
        made.append(TABLE.slice(0, 3))
        for one, wanted in ((pickle.loads(pickle.dumps(converter)), LIVE), (before, range(ROWS))):
            with one.make_torch_dataloader(batch_size=8, num_epochs=1) as loader:
                assert sorted(int(i) for batch in loader for i in batch["id"]) == list(wanted)
    assert len(make_spark_converter(made)) == len(LIVE) + 3


@pytest.mark.parametrize("make", [delta, lance])
def test_shards_that_would_each_open_the_newest_version_are_refused(make: Any, tmp_path: Path) -> None:
    made = make(tmp_path / "t")
    shards = [{"cur_shard": shard, "shard_count": 2, "seed": 1} for shard in range(2)]
    for path in (tmp_path / "t", str(tmp_path / "t")):
        with pytest.raises(DataError, match="each of the 2 shards would read the newest version of the .* table"):
            make_reader(path, **shards[0])
    found: list[int] = []
    for shard in shards:
        with make_reader(open_table(made), ["id"], **shard) as reader:
            found += [int(row.id) for row in reader]
    assert sorted(found) == LIVE


def test_what_petastorm_cannot_say_of_a_table_is_refused(tmp_path: Path) -> None:
    delta(tmp_path / "t")
    with pytest.raises(DataError, match="has no index of petastorm's for rowgroup_selector: use filters="):
        make_reader(str(tmp_path / "t"), rowgroup_selector=SingleIndexSelector("i", ["a"]))
    with pytest.raises(DataError, match="no field of version 1 of the Delta table .* matches"):
        make_batch_reader(str(tmp_path / "t"), ["z"])
