"""Where a fit keeps its Parquet, checkpoints and logs: :class:`Store`.

Here is which class of it serves which path.
"""

from __future__ import annotations

from hvd_cluster.data.files.base_store import Store
from hvd_cluster.data.files.store_families import DBFSLocalStore, HDFSStore

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "Store",
]


class FilesystemStore(Store):
    """A store on any filesystem that pyarrow or fsspec opens."""


class LocalStore(FilesystemStore):
    """Horovod's older name for a store on a local path."""


#: Horovod's name of the base class.
AbstractFilesystemStore = Store

Store._families = (HDFSStore, DBFSLocalStore, FilesystemStore)
