"""The store of a saved stage: where Spark ML would look for its path."""

from __future__ import annotations

import os
from pathlib import Path

from hvd_cluster.data.files.filesystems import scheme_of
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.spark.active_session import spark_url


def store_at(path: str | os.PathLike[str]) -> Store:
    """The store whose ``prefix`` is a stage's folder.

    A path without a scheme is on the default filesystem of the classic session of this process, like that of Spark's
    own stages: a Pipeline writes its part through Spark and asks us for ours, and a cluster's driver loses its disk
    when it ends. Without such a session, and below Databricks' mounts ``/dbfs`` and ``/Volumes``, the path is local.

    Raises:
        DataError: that filesystem cannot be reached from Python.
    """
    text = os.fspath(path)
    url = text if _is_mounted(text) else spark_url(text)
    if url == text or scheme_of(url) == "file":
        return Store.create(path)  # a relative path: Python's current folder may differ from Java's
    store = Store.create(url)
    try:
        store.exists(store.prefix)
    except (DataError, OSError) as error:
        raise DataError(
            f"Spark resolves {text} to {url}, which this process cannot reach ({error}): give another path, or "
            f"file://{Path(text).absolute()} for this machine's disk"
        ) from error
    return store


def _is_mounted(path: str) -> bool:
    from hvd_cluster.data.files.store_families import DBFSLocalStore

    return DBFSLocalStore.matches_dbfs(path)
