"""Where a saved stage lies when its path has no scheme: where Spark ML would look for it."""

from __future__ import annotations

import os
from pathlib import Path

from hvd_cluster.data.files.filesystems import scheme_of
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.spark.active_session import spark_url


def store_at(path: str | os.PathLike[str]) -> Store:
    """The store whose ``prefix`` is a stage's folder.

    A path without a scheme lies on the default filesystem of the classic session of this process, as those of Spark's
    own stages do: a Pipeline writes its part through Spark and asks us for ours, and on a cluster the driver's disk
    goes with the driver. Without such a session, and below Databricks' mounts ``/dbfs`` and ``/Volumes``, it is local.

    Raises:
        DataError: that filesystem cannot be reached from Python.
    """
    text = os.fspath(path)
    url = text if _is_mounted(text) else spark_url(text)
    if url == text or scheme_of(url) == "file":
        return Store.create(path)  # if relative, to Python's folder, which may have changed since Java began
    store = Store.create(url)
    try:
        store.exists(store.prefix)
    except (DataError, OSError) as error:
        raise DataError(
            f"Spark takes {text} for {url}, which this process cannot reach ({error}): give another path, or "
            f"file://{Path(text).absolute()} for this machine's own disk"
        ) from error
    return store


def _is_mounted(path: str) -> bool:
    from hvd_cluster.data.files.store_families import DBFSLocalStore

    return DBFSLocalStore.matches_dbfs(path)
