"""Where a petastorm data set is stored, from the forms that users write.

A filesystem and paths inside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hvd_cluster.data.files.filesystems import OBJECT_STORES, as_filesystem, scheme_of
from hvd_cluster.data.files.retry import file_info, read_file, write_file
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError

Url = str | os.PathLike[str]


@dataclass(frozen=True)
class Location:
    """A folder of Parquet files, or some files."""

    #: The ``pyarrow.fs.FileSystem``.
    filesystem: Any
    #: One folder or file, or several files; paths inside the filesystem.
    paths: tuple[str, ...]
    #: As the user wrote it, for messages.
    text: str
    #: Whether the filesystem shows a file only when it is complete.
    uploads_whole: bool = False

    @property
    def folder(self) -> str:
        """The folder of the metadata: the path itself, or that of the first file."""
        path = self.paths[0]
        if len(self.paths) == 1 and not self._is_file(path):
            return path
        return path.rsplit("/", 1)[0]

    def read(self, name: str) -> bytes | None:
        """The content of a file in the folder; None where there is none."""
        path = f"{self.folder}/{name}"
        try:
            return read_file(self.filesystem, path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error}") from error

    def write(self, name: str, data: bytes) -> None:
        """Write a file in the folder, whole or not at all."""
        write_file(self.filesystem, f"{self.folder}/{name}", data, atomic_upload=self.uploads_whole)

    def _is_file(self, path: str) -> bool:
        try:
            info = file_info(self.filesystem, path)
        except OSError as error:
            raise DataError(f"cannot look at {self.text}: {error}") from error
        return bool(info.type == load_pyarrow("pyarrow.fs").FileType.File)


def locate(
    url_or_urls: Url | Sequence[Url], storage_options: Mapping[str, Any] | None = None, filesystem: Any = None
) -> Location:
    """Find a data set.

    Args:
        url_or_urls: URL or local path of a folder or file, or a list of those of files, all on one filesystem.
        storage_options: arguments for the fsspec filesystem of the URL.
        filesystem: a pyarrow or fsspec filesystem to use instead of what the URL names.

    Raises:
        DataError: there is no URL, URLs differ in scheme or host, or the filesystem cannot be opened.
        MissingExtraError: pyarrow or fsspec is not installed.
    """
    urls = [url_or_urls] if isinstance(url_or_urls, (str, os.PathLike)) else list(url_or_urls)
    texts = [os.fspath(url) for url in urls]
    if not texts or not all(texts):
        raise DataError(f"{url_or_urls!r} is not a data set: pass its path or URL, or a list of those of its files")
    places = {(scheme_of(text), urlsplit(text).netloc if scheme_of(text) != "file" else "") for text in texts}
    if len(places) > 1:
        raise DataError(f"the files of one data set are on one filesystem, but these are on {sorted(places)}")
    text = texts[0] if len(texts) == 1 else f"{texts[0]} and {len(texts) - 1} more"
    uploads_whole = scheme_of(texts[0]) in OBJECT_STORES
    if filesystem is not None:
        paths = tuple(_inside(text) for text in texts)
        return Location(as_filesystem(filesystem), paths, text, uploads_whole)
    options: dict[str, Any] = {"storage_options": storage_options} if storage_options else {}
    stores = [Store.create(text, **options) for text in texts]
    paths = tuple(stores[0].get_localized_path(store.prefix).rstrip("/") or "/" for store in stores)
    return Location(stores[0].fs, paths, text, uploads_whole)


def _inside(url: str) -> str:
    """The path inside a filesystem that the user opened."""
    if "://" not in url:
        return url.removeprefix("file:").rstrip("/")
    parts = urlsplit(url)
    local = parts.scheme.lower() in {"file", "hdfs", "viewfs"}
    return parts.path.rstrip("/") if local else f"{parts.netloc}{parts.path}".rstrip("/")
