"""The same rows as plain Parquet, as a Delta, an Iceberg and a Lance table, and as a data set of pyarrow, all read by
`ParquetReader` in shuffled batches of 1024 with two threads. They are opened once, which is not counted. One row of a
hundred was deleted: Delta and Iceberg have files without it, Lance has its own list of deletions. The peers are lance's
torch data set over the Lance table and, where it is installed, Hugging Face datasets over the Parquet in torch format;
neither shuffles rows here.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from benchmarks.report import Report
from hvd_cluster.data import ParquetReader, open_table

NUM_THREADS = 2
BATCH_SIZE = 1024
GROUP_ROWS = 32768
NUM_ROWS = 1_000_000


def rows(num_rows: int) -> pa.Table:
    random = np.random.default_rng(0)
    columns = {f"f{index}": random.standard_normal(num_rows, dtype="f4") for index in range(20)}
    return pa.table({**columns, "label": random.integers(0, 10, num_rows), "id": np.arange(num_rows)})


def written(folder: Path, table: pa.Table) -> dict[str, Any]:
    """Name -> a table, opened for our reader. All files of Parquet have one encoding, codec and size of row groups."""
    import deltalake
    import lance
    from pyiceberg.catalog.sql import SqlCatalog

    live = table.filter(pa.array(np.arange(table.num_rows) % 100 != 0))
    (folder / "parquet").mkdir()
    pq.write_table(live, folder / "parquet" / "a.parquet", row_group_size=GROUP_ROWS, use_dictionary=False)
    properties = deltalake.WriterProperties(
        max_row_group_size=GROUP_ROWS,
        default_column_properties=deltalake.ColumnProperties(dictionary_enabled=False),
    )
    deltalake.write_deltalake(str(folder / "delta"), table, writer_properties=properties)
    deltalake.DeltaTable(str(folder / "delta")).delete("id % 100 = 0", writer_properties=properties)
    lance.write_dataset(table, str(folder / "lance")).delete("id % 100 = 0")
    catalog = SqlCatalog("b", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace("db")
    like_the_others = {
        "write.parquet.row-group-limit": str(GROUP_ROWS),
        "write.parquet.compression-codec": "snappy",
        "write.parquet.dict-size-bytes": "1",
    }
    iceberg = catalog.create_table("db.t", table.schema, properties=like_the_others)
    iceberg.append(live)
    catalog.close()
    return {
        "Parquet": open_table(folder / "parquet"),
        "Delta": open_table(folder / "delta"),
        "Iceberg": open_table(iceberg),
        "Lance": open_table(folder / "lance"),
        "pyarrow data set": open_table(ds.dataset(folder / "parquet")),
    }


def ours(table: Any, columns: list[str]) -> int:
    with ParquetReader(table, columns, batch_size=BATCH_SIZE, num_threads=NUM_THREADS, remainder="partial") as reader:
        return sum(len(batch["label"]) for batch in reader)


def lance_torch(folder: Path, columns: list[str]) -> int:
    from lance.torch.data import LanceDataset

    return sum(len(batch["label"]) for batch in LanceDataset(folder / "lance", BATCH_SIZE, columns=columns))


def hugging_face(folder: Path, columns: list[str]) -> int:
    import datasets

    loaded = datasets.Dataset.from_parquet(str(folder / "parquet" / "a.parquet"), cache_dir=str(folder / "cache"))
    batches = loaded.select_columns(columns).with_format("torch").iter(BATCH_SIZE)
    return sum(len(batch["label"]) for batch in batches)


def measure(num_rows: int = NUM_ROWS, turns: int = 5) -> Report:
    """Run the benchmark.

    Args:
        num_rows: of the tables.
        turns: passes of each contender, in turns, after one that is not counted.
    """
    columns = [*(f"f{index}" for index in range(20)), "label"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = written(folder, rows(num_rows))
        contenders: dict[str, Callable[[], int]] = {
            source: functools.partial(ours, table, columns) for source, table in sources.items()
        }
        contenders["lance's torch data set"] = lambda: lance_torch(folder, columns)
        notes = []
        if importlib.util.find_spec("datasets") is not None:
            contenders["Hugging Face datasets"] = lambda: hugging_face(folder, columns)
        else:
            notes.append("No Hugging Face datasets: the package is not installed.")
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(turns + 1):
            for contender, run in contenders.items():
                start_s = time.perf_counter()
                found = run()
                if turn:
                    rates[contender].append(found / (time.perf_counter() - start_s))
    cells = []
    for contender, found_rates in rates.items():
        ratios = sorted(one / other for one, other in zip(found_rates, rates["Parquet"], strict=True))
        spread = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        whose = "ours" if contender in sources else "peer"
        cells.append([contender, whose, f"{statistics.median(found_rates):,.0f}", spread])
    return Report("Tables to training batches", ["rows of", "reader", "rows/s", "/ ours on Parquet"], cells, notes)
