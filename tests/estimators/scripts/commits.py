"""Commits to a table until it is killed: ``commits.py KIND FOLDER FILE`` adds a letter to FILE after each commit."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa


def committer(kind: str, folder: Path) -> Callable[[pa.Table, int], None]:
    """A function that appends rows and deletes one."""
    url = str(folder / "t")
    if kind == "delta":
        import deltalake

        def delta(rows: pa.Table, number: int) -> None:
            deltalake.write_deltalake(url, rows, mode="append")
            deltalake.DeltaTable(url).delete(f"id = {number}")

        return delta
    if kind == "lance":
        import lance

        def write(rows: pa.Table, number: int) -> None:
            lance.write_dataset(rows, url, mode="append").delete(f"id = {number}")

        return write
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("test", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")

    def iceberg(rows: pa.Table, number: int) -> None:
        table = catalog.load_table("db.t")
        table.append(rows)
        table.delete(f"id = {number}")

    return iceberg


if __name__ == "__main__":
    kind, folder, done = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    commit = committer(kind, folder)
    for number in itertools.count():
        x = pa.array([[1.0, 2.0, 3.0, 4.0]], pa.list_(pa.float32()))
        commit(pa.table({"id": [1000 + number], "x": x, "y": pa.array([0.0], pa.float32())}), number)
        with done.open("a") as file:
            file.write("x")
        time.sleep(0.2)
