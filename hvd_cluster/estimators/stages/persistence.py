# ruff: noqa: N802 - the spelling is that of pyspark.ml
"""Saves and loads stages in Spark ML's layout, without needing Spark.

::

    path/data/part-00000.parquet   what JSON cannot hold: a cloudpickle of {param: value}, in rows of up to 64 MiB
    path/metadata/part-00000       a line of JSON like Spark ML's: class, uid, timestamp, sparkVersion, params
    path/metadata/_SUCCESS

A path without a scheme means the same as in Spark ML; see :func:`store_at`.

The metadata is written last: a folder without it is not a saved stage. Loading unpickles: load only trusted stages.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from hvd_cluster.data.files.filesystems import scheme_of
from hvd_cluster.data.files.store_families import DBFSLocalStore
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.stages.param_row import HasParams
from hvd_cluster.estimators.stages.spark_ml import MLReader, MLWriter
from hvd_cluster.spark.active_session import spark_url

CHUNK_BYTES = 64 * 2**20
FORMAT = 1
#: Stands for pyspark's version if that is not installed: the one whose layout the metadata follows. Readers use the
#: major and minor number.
SPARK_VERSION = "3.5.0"
_METADATA, _SUCCESS, _BLOB = "metadata/part-00000", "metadata/_SUCCESS", "data/part-00000.parquet"


class StageWriter(MLWriter):
    """Saves one stage."""

    def __init__(self, stage: HasParams) -> None:
        super().__init__()
        self.stage = stage

    def _handleOverwrite(self, path: str) -> None:
        """Delete nothing yet: :meth:`saveImpl` first makes what it writes, and may fail."""

    def saveImpl(self, path: str) -> None:
        """Write the stage to the folder ``path``.

        Raises:
            DataError: ``path`` exists already, and ``overwrite()`` was not called.
        """
        store = store_at(path)
        is_there = store.exists(store.prefix)
        if is_there and not self.shouldOverwrite and store.list(store.prefix):
            raise DataError(f"{path} exists already: use write().overwrite().save(path), or another path")
        current, hidden = _split(self.stage, self.stage._paramMap)
        defaults, _ = _split(self.stage, self.stage._defaultParamMap)
        cls = type(self.stage)
        metadata = {
            "class": f"{cls.__module__}.{cls.__qualname__}",
            "timestamp": int(time.time() * 1000),
            "sparkVersion": _spark_version(),
            "uid": self.stage.uid,
            "paramMap": current,
            "defaultParamMap": defaults,
            "hvdClusterFormat": FORMAT,
        }
        blob = _to_parquet(cloudpickle.dumps(hidden))
        line = json.dumps(metadata, separators=(",", ":")) + "\n"
        if is_there and self.shouldOverwrite:
            store.delete(store.prefix)
        store.write(f"{store.prefix}/{_BLOB}", blob)
        store.write(f"{store.prefix}/{_METADATA}", line.encode())
        store.write(f"{store.prefix}/{_SUCCESS}", b"")


class StageReader(MLReader):
    """Loads one stage of the class ``cls`` or a subclass."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """The stage saved at ``path``.

        Raises:
            DataError: there is no stage, or one of another class.
        """
        store = store_at(path)
        metadata = _metadata(store, path)
        module, _, name = metadata["class"].rpartition(".")
        saved = getattr(importlib.import_module(module), name)
        if not issubclass(saved, self.cls):
            raise DataError(f"{path} holds a {name}, not a {self.cls.__name__}: use {name}.load(path)")
        hidden = cloudpickle.loads(_from_parquet(store.read(f"{store.prefix}/{_BLOB}")))
        stage = saved()._resetUid(metadata["uid"])
        stage._setDefault(**{key: value for key, value in metadata["defaultParamMap"].items() if stage.hasParam(key)})
        for key, value in {**metadata["paramMap"], **hidden}.items():
            stage._set(**{key: value})
        return stage


def _split(stage: HasParams, values: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values that survive JSON, and the others; both by the name of the param."""
    saved = {row.param_name: row.saved for row in stage.param_rows.values()}
    plain: dict[str, Any] = {}
    hidden: dict[str, Any] = {}
    for param, value in values.items():
        if not saved.get(param.name, True):
            continue
        value = stage._as_saved(param.name, value)
        if isinstance(value, Store):  # without credentials that it may hold
            value = value.prefix
        (plain if _survives_json(value) else hidden)[param.name] = value
    return plain, hidden


def _spark_version() -> str:
    try:
        import pyspark
    except ImportError:
        return SPARK_VERSION
    return str(pyspark.__version__)


def _survives_json(value: Any) -> bool:
    try:
        back = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return False
    return type(back) is type(value) and bool(back == value)


def _metadata(store: Store, path: str) -> dict[str, Any]:
    folder = f"{store.prefix}/metadata"
    try:
        parts = [name for name in store.list(folder) if "/part-" in name or name.startswith("part-")]
        if not parts:
            raise FileNotFoundError(f"there is no {_METADATA} in it")
        found: dict[str, Any] = json.loads(store.read(sorted(parts)[0]))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a saved stage: no metadata can be read there ({error})") from error
    return found


def _to_parquet(blob: bytes) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    chunks = [blob[start : start + CHUNK_BYTES] for start in range(0, len(blob), CHUNK_BYTES)]
    table = pa.table({"index": pa.array(range(len(chunks)), pa.int32()), "blob": pa.array(chunks, pa.binary())})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=1)
    return sink.getvalue()


def _from_parquet(content: bytes) -> bytes:
    import pyarrow.parquet as pq

    # Not read_table: a thread of Arrow releases the last bytes a moment later, and aborts the process if the
    # interpreter ends in that moment.
    table = pq.ParquetFile(io.BytesIO(content), pre_buffer=False).read(use_threads=False).sort_by("index")
    return b"".join(chunk.as_py() for chunk in table["blob"])


def store_at(path: str | os.PathLike[str]) -> Store:
    """The store whose ``prefix`` is a stage's folder.

    A path without a scheme is on the default filesystem of the classic session of this process, like that of Spark's
    own stages: a Pipeline writes its part through Spark and asks us for ours, and a cluster's driver loses its disk
    when it ends. Without such a session, and below Databricks' mounts ``/dbfs`` and ``/Volumes``, the path is local.

    Raises:
        DataError: that filesystem cannot be reached from Python.
    """
    text = os.fspath(path)
    url = text if DBFSLocalStore.matches_dbfs(text) else spark_url(text)
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
