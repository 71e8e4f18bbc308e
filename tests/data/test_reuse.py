"""The same data is written once, is cleaned up by age or by name, and tells how far its writing has come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data import dataset as dataset_module
from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing import content_address, retention
from hvd_cluster.data.writing.progress import ProgressBar

ROWS = 300


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def frame(change: int = 0) -> pd.DataFrame:
    ids = np.arange(ROWS)
    return pd.DataFrame({"id": ids + change, "x": ids / 2, "held": ids % 3 == 0, "s": [f"n{i}" for i in ids]})


def written(store: Store, data: Any, **options: Any) -> Dataset:
    return materialize(data, store, **{"columns": ["id", "x"], "validation": "held", "reuse": True, **options})


def files(dataset: Dataset) -> set[str]:
    assert dataset.validation is not None
    return {group.path for split in (dataset.train, dataset.validation) for group in split.row_groups}


def rows(dataset: Dataset) -> list[int]:
    return sorted(
        row for batch in ParquetReader(dataset, batch_size=7, remainder="partial") for row in batch["id"].tolist()
    )


def test_data_of_another_version_of_the_manifest_are_written_once_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = written(store, frame())
    monkeypatch.setattr(dataset_module, "MANIFEST_VERSION", dataset_module.MANIFEST_VERSION + 1)
    newer = written(store, frame())
    assert not files(older) & files(newer)
    assert files(written(store, frame())) == files(newer)


def test_the_same_frame_is_written_once_and_reads_the_same(store: Store) -> None:
    first = written(store, frame())
    before = {path: Path(path).stat().st_mtime_ns for path in files(first)}
    again = written(store, frame())
    assert again == first
    assert {path: Path(path).stat().st_mtime_ns for path in files(again)} == before
    assert rows(again) == [i for i in range(ROWS) if i % 3]
    assert len(store.list(store.prefix)) == 2
    again.remove()  # leaves it to others
    assert written(store, frame()) == first


@pytest.mark.parametrize(
    "options",
    [{"seed": 1, "validation": 0.5}, {"columns": ["id"]}, {"num_proc": 2}, {"float32": True}, {"validation": None}],
)
def test_another_question_or_other_data_is_written_again(store: Store, options: Any) -> None:
    first = written(store, frame(), **({"validation": 0.5} if "seed" in options else {}))
    other = written(store, frame(), **options)
    assert other.train.row_groups[0].path != first.train.row_groups[0].path
    assert written(store, frame(1)).train.row_groups[0].path != first.train.row_groups[0].path


def test_another_process_finds_it(store: Store, tmp_path: Path) -> None:
    frame().to_parquet(tmp_path / "frame.parquet")
    script = (
        "import sys, pandas as pd\n"
        "from hvd_cluster.data.materializing import materialize; from hvd_cluster.data.store import Store\n"
        "data = materialize(pd.read_parquet(sys.argv[1]), Store.create(sys.argv[2]), columns=['id', 'x'], "
        "validation='held', reuse=True)\n"
        "print(data.train.row_groups[0].path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "frame.parquet"), store.prefix],
        capture_output=True,
        text=True,
        check=True,
    )
    assert written(store, frame()).train.row_groups[0].path == done.stdout.strip()


def test_parquet_is_copied_again_only_when_its_files_change(store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.parquet"
    pq.write_table(pa.Table.from_pandas(frame()), path)
    first = written(store, str(tmp_path / "in"))
    assert files(written(store, str(tmp_path / "in"))) == files(first)
    os.utime(path, (1, 1))
    assert files(written(store, str(tmp_path / "in"))).isdisjoint(files(first))


def test_data_that_is_half_there_is_not_used(store: Store) -> None:
    first = written(store, frame())
    Path(first.train.row_groups[0].path).unlink()
    again = written(store, frame())
    assert rows(again) == [i for i in range(ROWS) if i % 3]
    folder = first.train.row_groups[0].path.rsplit("/", 1)[0]
    store.delete(f"{folder}/_SUCCESS")  # as if somebody were writing it right now
    other = written(store, frame())
    assert rows(other) == rows(again)
    other.remove()
    assert not store.exists(other.train.row_groups[0].path)


#: Writes and reads four data sets, each at the moment at which the other processes do too.
AT_ONCE = """
import json, sys, time
from pathlib import Path
import numpy as np, pyarrow as pa
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store

me, folder, others = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
store, found = Store.create(folder / "store"), []

def together(what):
    (folder / f"{what}-{me}").touch()
    until = time.monotonic() + 60
    while len(list(folder.glob(f"{what}-*"))) < others:
        if time.monotonic() > until:
            sys.exit("another process has ended")
        time.sleep(0.0005)

for number in range(4):
    table = pa.table({"id": np.arange(300) + number, "held": np.arange(300) % 3 == 0})
    together(f"begins{number}")
    data = materialize(table, store, columns=["id"], validation="held", reuse=True)
    together(f"ends{number}")
    rows = sum(batch["id"].sum().item() for batch in ParquetReader(data, batch_size=7, remainder="partial"))
    found.append([data.train.row_groups[0].path, rows])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_processes_that_write_the_same_data_at_once_leave_each_others_alone(store: Store, tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_ONCE]
    writers = [
        subprocess.Popen([*command, str(me), str(tmp_path), "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for me in range(3)
    ]
    told = [writer.communicate() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], told
    found = [json.loads(out) for out, _ in told]
    for number, written_by in enumerate(zip(*found, strict=True)):
        assert {rows for _, rows in written_by} == {sum(i + number for i in range(300) if i % 3)}
    names = store.list(store.prefix, recursive=True)
    assert not [name for name in names if "_INCOMPLETE" in name]
    assert {path for paths in found for path, _ in paths} == {
        name for name in names if name.endswith(".parquet") and "train" in name
    }


def test_addresses_depend_on_every_byte_and_option() -> None:
    table = pa.table({"x": np.arange(1000), "s": ["a"] * 1000})
    same = pa.table({"x": np.arange(1000), "s": ["a"] * 1000})
    assert content_address.of_table(table, {"a": 1}) == content_address.of_table(same, {"a": 1})
    others = [
        (table, {"a": 2}),
        (table.slice(1), {"a": 1}),
        (table.rename_columns(["x", "t"]), {"a": 1}),
        (table.set_column(0, "x", pa.array(np.arange(1000).astype("i4"))), {"a": 1}),
        (table.set_column(1, "s", pa.array(["a"] * 999 + ["b"])), {"a": 1}),
    ]
    names = {content_address.of_table(data, options) for data, options in others}
    assert len(names | {content_address.of_table(table, {"a": 1})}) == 6


# --- cleaning up ----------------------------------------------------------------------------------------------------


def age(store: Store, folder: str, hours: float) -> None:
    then = time.time() - hours * 3600
    for path in store.list(folder, recursive=True):
        os.utime(path, (then, then))


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_data_sets_are_removed_by_age(tmp_path: Path, kind: str) -> None:
    store = Store.create(tmp_path / "store" if kind == "local" else "memory://retention/store")
    written(store, frame())
    store.write(f"{store.get_runs_path()}/r/checkpoint", b"stays")
    assert retention.remove_older_than(store, 3600) == []
    removed = retention.remove_older_than(store, 0)
    assert len(removed) == 2
    assert store.list(store.get_runs_path(), recursive=True)
    assert not [path for path in store.list(store.prefix) if "intermediate" in path]
    store.delete(store.prefix)


def test_a_data_set_that_is_used_again_stays_young(store: Store) -> None:
    old, used = written(store, frame()), written(store, frame(1))
    for dataset in (old, used):
        for path in files(dataset):
            age(store, path.rsplit("/", 1)[0], 30)
    assert files(written(store, frame(1))) == files(used)
    removed = retention.remove_older_than(store, 24 * 3600)
    assert len(removed) == 2
    assert not any(store.exists(path) for path in files(old))
    assert all(store.exists(path) for path in files(used))


def test_a_data_set_is_removed_by_name(store: Store) -> None:
    materialize(frame(), store, columns=["id"], validation=0.5, dataset_id="mine")
    kept = materialize(frame(), store, columns=["id"], dataset_id="other")
    assert [path.rsplit("/", 1)[1] for path in retention.remove(store, "mine")] == [
        "intermediate_train_data.mine",
        "intermediate_val_data.mine",
    ]
    assert retention.remove(store, "mine") == []
    assert rows(kept) == list(range(ROWS))


def test_data_sets_below_a_path_with_a_dot_are_found(tmp_path: Path) -> None:
    store = Store.create(tmp_path, train_path=tmp_path / "my.train", val_path=tmp_path / "my.train.held")
    kept = materialize(frame(), store, columns=["id"], dataset_id="other")
    materialize(frame(), store, columns=["id"], validation=0.5, dataset_id="mine.1")
    assert [path.rsplit("/", 1)[1] for path in retention.remove(store, "mine.1")] == [
        "my.train.held.mine.1",
        "my.train.mine.1",
    ]
    assert rows(kept) == list(range(ROWS))
    assert len(retention.remove_older_than(store, 0)) == 1


# --- progress -------------------------------------------------------------------------------------------------------


def test_progress_counts_the_rows(store: Store, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    table = pa.table({"id": np.arange(100_000)})
    materialize(table, store, columns=["id"], progress=lambda rows, total: told.append((rows, total)))
    assert [total for _, total in told] == [100_000] * len(told)
    assert len(told) >= 4
    assert sorted(told) == told
    assert told[-1] == (100_000, 100_000)


def test_a_bar_is_drawn_and_closed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    materialize(frame(), store, columns=["id"], progress=ProgressBar("writing the frame"))
    assert "writing the frame: 100%" in capsys.readouterr().err


# --- float32 --------------------------------------------------------------------------------------------------------


def test_float64_is_written_and_read_as_float32_on_request(store: Store, tmp_path: Path) -> None:
    data = pa.table({"id": range(50), "x": np.arange(50) / 3, "l": [[i / 3, 1.0] for i in range(50)]})
    copied = materialize(data, store, columns=["id", "x", "l"], float32=True)
    assert pq.read_schema(copied.train.row_groups[0].path).field("l").type == pa.list_(pa.float32(), 2)
    pq.write_table(data, tmp_path / "a.parquet")
    in_place = materialize(str(tmp_path / "a.parquet"), store, columns=["id", "x", "l"], float32=True)
    for dataset in (copied, in_place):
        assert [column.dtype for column in dataset.schema] == ["int64", "float32", "float32"]
        (batch,) = ParquetReader(dataset, batch_size=50, shuffle=False)
        assert np.array_equal(batch["x"], (np.arange(50) / 3).astype("f4"))
        assert np.array_equal(batch["l"][:, 0], (np.arange(50) / 3).astype("f4"))
