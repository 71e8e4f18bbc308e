"""A URL is served by pyarrow or by fsspec; what cannot be served says what it takes. No network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from hvd_cluster.data.cache import MemoryCache
from hvd_cluster.data.files.filesystems import open_filesystem
from hvd_cluster.data.materialize import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError


@pytest.mark.parametrize(
    ("url", "options", "package"),
    [("gs://bucket/a", {"token": "anon"}, "gcsfs"), ("abfs://container/a", {}, "adlfs"), ("az://c/a", {}, "adlfs")],
)
def test_a_package_that_is_missing_is_named(url: str, options: dict[str, Any], package: str) -> None:
    with pytest.raises(DataError, match=rf"'{url}' needs a package that is not installed: .*{package}"):
        open_filesystem(url, options)


def test_hdfs_without_hadoop_says_what_to_set_in_one_line() -> None:
    for url in ("hdfs://namenode:8020/a", "viewfs://cluster/a"):
        with pytest.raises(
            DataError, match=f"cannot open '{url}': .*set JAVA_HOME, HADOOP_HOME and CLASSPATH"
        ) as caught:
            open_filesystem(url)
        assert "\n" not in str(caught.value)


def test_data_goes_through_a_filesystem_of_fsspec_and_back() -> None:
    frame = pd.DataFrame({"id": np.arange(300), "x": [[float(i), 2.0 * i] for i in range(300)]})
    store = Store.create("memory://round-trip")
    dataset = materialize(frame, store, columns=["id", "x"], validation=0.2, num_proc=2)
    assert dataset.validation is not None
    assert dataset.validation.rows == 60
    seen: list[int] = []
    for rank in range(2):
        reader = ParquetReader(
            dataset, batch_size=30, rank=rank, size=2, remainder="partial", cache=MemoryCache(1 << 20)
        )
        for batch in reader:
            assert (batch["x"][:, 1] == 2 * batch["id"]).all()
            seen += batch["id"].tolist()
    assert len(set(seen)) == len(seen) == 240
    paths = ["memory://" + path.strip("/") for path in sorted({group.path for group in dataset.train.row_groups})]
    again = ParquetReader(paths, ["id"], batch_size=240)
    assert sorted(row for batch in again for row in batch["id"].tolist()) == sorted(seen)
    dataset.remove()
    with pytest.raises(DataError, match="there is no Parquet at"):
        ParquetReader(paths, batch_size=1)
