"""Stores whose paths have a syntax of their own: HDFS and Databricks' DBFS."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hvd_cluster.data.files.base_store import Store
from hvd_cluster.data.files.filesystems import unopened_hadoop_text
from hvd_cluster.data.files.remote_store import DATABRICKS_MOUNTS
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.errors import DataError

#: Arguments of a connection to HDFS other than the name node, under names that fsspec knows too.
_HDFS_OPTIONS = ("user", "kerb_ticket", "extra_conf")


class HDFSStore(Store):
    """A store on HDFS through libhdfs, ``hdfs://[host[:port]]/path``.

    Args:
        prefix_path: URL, or a path on the default name node.
        host, port: the name node, where the URL has none; default is what Hadoop's own configuration says. From here to
            ``extra_conf`` the order is Horovod's, before the folders of :class:`Store`.
        user: the user to act as.
        kerb_ticket: path of the Kerberos ticket cache.
        driver: "libhdfs", the only one that still exists.
        extra_conf: further Hadoop settings.
        args, kwargs: those of :class:`Store`; ``storage_options`` may give ``user``, ``kerb_ticket`` and ``extra_conf``
            too, as the store's own has them.

    Raises:
        DataError: the URL has another scheme, host and URL contradict each other, or ``storage_options`` has a name
            that means nothing here.
    """

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if driver != "libhdfs":
            raise DataError(f"driver is {driver!r}: libhdfs is the only HDFS driver that pyarrow still has")
        url_host, url_port, path = self.parse_url(os.fspath(prefix_path))
        if host and url_host and host != url_host:
            raise DataError(
                f"Mismatched HDFS namespace: host is {host!r}, but the URL {prefix_path!r} names {url_host!r}"
            )
        authority = (url_host or host or "") + (f":{url_port or port}" if url_port or port else "")
        super().__init__(f"hdfs://{authority}{path}", *args, **kwargs)
        options = self._storage_options
        if unknown := sorted(set(options) - set(_HDFS_OPTIONS)):
            raise DataError(
                f"storage_options has {', '.join(map(repr, unknown))}: HDFS takes {', '.join(_HDFS_OPTIONS)} there, "
                "and the name node in the URL, hdfs://host:port/path"
            )
        given = {"user": user, "kerb_ticket": kerb_ticket, "extra_conf": dict(extra_conf) if extra_conf else None}
        self._connection = {
            "host": host or url_host or "default",
            "port": port or url_port or 0,
            **{name: options.get(name) if value is None else value for name, value in given.items()},
        }

    @classmethod
    def matches(cls, path: str) -> bool:
        return path.lower().startswith("hdfs:")

    @staticmethod
    def parse_url(url: str) -> tuple[str | None, int | None, str]:
        """Split into (host or None, port or None, path).

        Raises:
            DataError: the scheme is not hdfs.
        """
        if ":" not in url.split("/", 1)[0]:
            return None, None, "/" + url.lstrip("/")
        parts = urlsplit(url)
        if parts.scheme.lower() != "hdfs":
            raise DataError(f"Mismatched HDFS namespace: {url!r} does not begin with hdfs://")
        return parts.hostname, parts.port, "/" + parts.path.lstrip("/")

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """What fsspec takes for it; host and port are in the URLs."""
        return {name: self._connection[name] for name in _HDFS_OPTIONS if self._connection[name] is not None}

    def _open_url(self, url: str) -> tuple[Any, str]:
        fs = load_pyarrow("pyarrow.fs")
        try:
            return fs.HadoopFileSystem(**self._connection), self.parse_url(url)[2]
        except OSError as error:
            raise DataError(unopened_hadoop_text(url, error)) from error


class DBFSLocalStore(Store):
    """A store on Databricks' DBFS or in a Unity Catalog volume.

    It goes through the local mounts ``/dbfs`` and ``/Volumes``. Takes ``dbfs:/path``, ``/dbfs/path``,
    ``file:/dbfs/path`` and ``file:///dbfs/path``, and for volumes ``dbfs:/Volumes/catalog/schema/volume/path`` and
    ``/Volumes/...``.
    """

    def __init__(self, prefix_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("checkpoint_filename", "checkpoint.tf")
        super().__init__(self.normalize_path(os.fspath(prefix_path)), *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        # Elsewhere /dbfs may be any folder, and dbfs:/ a filesystem that fsspec serves.
        if not cls.matches_dbfs(path):
            return False
        if cls.normalize_path(path).startswith("/Volumes/"):
            return path.startswith("dbfs:")  # else it is a local path as any other
        return Path("/dbfs").is_dir()

    @staticmethod
    def matches_dbfs(path: str) -> bool:
        """Whether the path is in one of the spellings of DBFS or of a volume."""
        return path.startswith(
            ("dbfs:/", *(scheme + mount for scheme in ("", "file:", "file://") for mount in DATABRICKS_MOUNTS))
        )

    @staticmethod
    def normalize_path(path: str) -> str:
        """The path below the local mount.

        Raises:
            DataError: it has another form.
        """
        inner = path
        for prefix in ("dbfs://", "dbfs:", "file://", "file:"):
            if path.startswith(f"{prefix}/"):
                inner = "/" + path[len(prefix) :].lstrip("/")
                break
        if inner.startswith(DATABRICKS_MOUNTS):
            return inner
        if path.startswith("dbfs:/"):
            return f"/dbfs{inner}"
        raise DataError(
            f"{path!r} is not a DBFS path: it begins with dbfs:/, /dbfs/, file:/dbfs/, file:///dbfs/ or /Volumes/"
        )

    def get_localized_path(self, path: str) -> str:
        return super().get_localized_path(self.normalize_path(path) if path.startswith("dbfs:") else path)
