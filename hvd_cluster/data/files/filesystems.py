"""Filesystems: one function that opens any URL, and complete writes.

Where a fit keeps what is the business of :mod:`hvd_cluster.data.store`.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hvd_cluster.data.optional import load_fsspec, load_pyarrow
from hvd_cluster.errors import DataError
from hvd_cluster.monitor.activities import activity

#: Uploads to these become visible as a whole when the stream closes, and a rename is a copy: no temporary name.
OBJECT_STORES = frozenset({"s3", "s3a", "s3n", "gs", "gcs", "abfs", "abfss", "adl"})

#: Hadoop's names of what pyarrow calls otherwise.
_SYNONYMS = {"s3a": "s3", "s3n": "s3"}

#: Families that pyarrow opens itself, in C++ and outside the GIL; everything else goes through fsspec.
_ARROW_SCHEMES = frozenset({"hdfs", "viewfs", "s3", "gs", "gcs", "abfs", "abfss"})

#: Hadoop has a default host for these, and writes their URLs with one slash.
_HOSTLESS = frozenset({"hdfs", "viewfs", "dbfs"})


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case; "file" for a plain path."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", url)
    return match.group(1).lower() if match else "file"


def normalize(path: str | os.PathLike[str]) -> str:
    """A path or URL in its one spelling.

    It is an absolute path where it is local, and a URL without a trailing "/" elsewhere. ``file:/a``, ``file:///a`` and
    ``/a`` are the same, and so are ``dbfs:/a`` and ``dbfs:///a``; relative paths are taken from the current folder, so
    that the result means the same in every process of this host.

    Raises:
        DataError: the path is empty, a ``file:`` URL names another host, or another URL has no ``//``.
    """
    text = os.fspath(path)
    if not text:
        raise DataError("the path of a store or data set is empty: give a local path or a URL")
    scheme = scheme_of(text)
    if scheme != "file":
        return _full_url(text, scheme)
    if text.lower().startswith("file:"):
        parts = urlsplit(text)
        if parts.netloc not in {"", "localhost"}:
            raise DataError(f"{text!r} names the host {parts.netloc!r}: a local path has three slashes, file:///path")
        text = unquote(parts.path)
    return str(Path(text).expanduser().absolute())


def _full_url(url: str, scheme: str) -> str:
    """A URL with ``//``.

    fsspec takes any other for a local path below the current folder.
    """
    rest = url[len(scheme) + 1 :]
    if scheme in _HOSTLESS and rest.startswith("/"):
        named = rest.startswith("//") and not rest.startswith("///")
        rest = rest if named else f"///{rest.lstrip('/')}"
    elif "::" not in url and not rest.startswith("//"):
        raise DataError(
            f"{url!r} is not a URL: write {scheme}://{rest.lstrip('/')}, or, for a local path, "
            f"{Path(url).absolute().as_posix()}"
        )
    elif not rest.strip("/"):
        raise DataError(f"{url!r} names no place: give a bucket or folder too, {scheme}://bucket/path")
    return f"{url[: len(scheme)]}:{rest.rstrip('/') or '///'}"


def open_filesystem(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Open the filesystem of a normalised path or URL.

    Args:
        url: what :func:`normalize` returned.
        storage_options: arguments for the fsspec filesystem; given, fsspec is used even where pyarrow knows the scheme.

    Returns:
        A ``pyarrow.fs.FileSystem`` and the path inside it.

    Raises:
        DataError: no installed package knows the scheme, or the filesystem cannot be reached.
        MissingExtraError: pyarrow or fsspec is not installed.
    """
    fs = load_pyarrow("pyarrow.fs")
    scheme = scheme_of(url)
    if scheme == "file":
        return fs.LocalFileSystem(), url
    url = _full_url(url, scheme)
    family = _SYNONYMS.get(scheme, scheme)
    if family in _ARROW_SCHEMES and not storage_options:
        try:
            return _opened_by_arrow(family, url[len(scheme) :].removeprefix("://"))
        except (NotImplementedError, load_pyarrow().ArrowInvalid):
            pass  # this build of pyarrow does without it: fsspec may know it
        except (OSError, ValueError) as error:
            if family in {"hdfs", "viewfs"}:
                raise DataError(unopened_hadoop_text(url, error)) from error
            raise DataError(f"cannot open {url!r}: {error}") from error
    fsspec = load_fsspec()
    options = dict(storage_options or {})
    try:
        try:
            # What other processes write is to be seen: s3fs and its like look into a folder once, and remember it in
            # an instance that all of the process share. With this argument it is another instance.
            filesystem, inner = fsspec.core.url_to_fs(url, **{"use_listings_cache": False, **options})
        except TypeError:  # some hand what they do not know to a client, which refuses it
            filesystem, inner = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise DataError(f"{url!r} needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise DataError(f"cannot open {url!r}: {error}; known schemes are those of pyarrow.fs and fsspec") from error
    except TypeError as error:  # an argument of its filesystem that has no default, or that it does not have
        raise DataError(f"cannot open {url!r}: {error}; {_ARGUMENTS.get(scheme, _ARGUMENTS_TEXT)}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), inner


def _opened_by_arrow(family: str, place: str) -> tuple[Any, str]:
    """The filesystem and the path inside it of a URL without its scheme.

    pyarrow wants the path of a URL percent-encoded, and decodes it; ours names objects of a store as they are.
    """
    from_uri = load_pyarrow("pyarrow.fs").FileSystem.from_uri
    if family in _HOSTLESS:
        filesystem, inner = from_uri(f"{family}://{place}")
        return filesystem, inner
    named, mark, options = place.partition("?")
    host, slash, path = named.partition("/")
    filesystem, root = from_uri(f"{family}://{host}{mark}{options}")
    return filesystem, f"{root.rstrip('/')}{slash}{path}"


#: What to do where a filesystem cannot be made with the arguments that it gets.
_ARGUMENTS_TEXT = "give it the arguments of fsspec's filesystem, storage_options={...}"
_ARGUMENTS = {
    "dbfs": "on a Databricks cluster give a path below /Volumes or /dbfs, elsewhere "
    "storage_options={'instance': 'the-workspace.cloud.databricks.com', 'token': ...}"
}


def unopened_hadoop_text(url: str, error: Exception) -> str:
    """What to say where libhdfs cannot be loaded or does not connect."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)  # the others list where it searched
    return (
        f"cannot open {url!r}: {reason}; libhdfs needs Java and Hadoop's client on every host: set JAVA_HOME, "
        "HADOOP_HOME and CLASSPATH (to what `hadoop classpath --glob` prints) before Python starts"
    )


_REMEDIES = {
    errno.EACCES: "give this user write permission, or choose another path",
    errno.EPERM: "give this user write permission, or choose another path",
    errno.EROFS: "the filesystem is mounted read-only: choose another path",
    errno.ENOSPC: "the disk is full: free some space, or choose a path on another disk",
    errno.EDQUOT: "the disk quota is used up: free some space, or choose another path",
    errno.ENOTDIR: "a part of the path is a file: choose a path below a folder",
    errno.ENOENT: "a folder above it cannot be made there: choose a path below a folder that exists",
}


def unwritable_text(path: str, error: OSError) -> str:
    """What went wrong when writing below a path, and what to do about it."""
    remedy = _REMEDIES.get(error.errno or 0, "choose another path, or make this one writable")
    cause = error.strerror or str(error)
    return f"the store {path!r} cannot be written: {cause}; {remedy}"


def as_filesystem(filesystem: Any) -> Any:
    """A ``pyarrow.fs.FileSystem`` of what a user may have.

    That is one of these, one of fsspec, or a Store.
    """
    fs = load_pyarrow("pyarrow.fs")
    if isinstance(filesystem, fs.FileSystem):
        return filesystem
    if isinstance(getattr(filesystem, "fs", None), fs.FileSystem):
        return filesystem.fs
    if hasattr(filesystem, "protocol") and hasattr(filesystem, "cat_file"):
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem))
    raise DataError(f"{type(filesystem).__name__} is not a filesystem: pass one of pyarrow.fs or fsspec, or a Store")


def is_local(filesystem: Any) -> bool:
    """Whether paths of this pyarrow filesystem are paths of the operating system."""
    return str(filesystem.type_name) == "local"


def write_whole(filesystem: Any, path: str, data: bytes, *, atomic_upload: bool = False) -> None:
    """Write a file so that a reader sees all of it or none of it, also after a crash.

    Args:
        filesystem: a pyarrow filesystem.
        path: the path inside it; missing folders above it are made.
        data: the whole content.
        atomic_upload: the filesystem shows a file only when it is complete, so no temporary name is needed.

    Raises:
        OSError: what the filesystem says; the temporary file is gone by then.
    """
    if is_local(filesystem):
        _write_local(Path(path), data)
        return
    if "/" in path:
        filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
    target = path if atomic_upload else f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with filesystem.open_output_stream(target) as stream:
            stream.write(data)
        if not atomic_upload:
            filesystem.move(target, path)
    except BaseException:  # raised again: half a file must not stay
        if not atomic_upload:
            with suppress(OSError):  # the first error is the one to report
                filesystem.delete_file(target)
        raise


def _write_local(path: Path, data: bytes) -> None:
    """Write beside the target, flush to the disk, and rename.

    Then flush the folder that holds the new name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # raised again: half a file must not stay
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a local folder survive a power cut.

    Where the filesystem can promise it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network filesystems refuse fsync on folders; the rename itself is done
        pass
    finally:
        os.close(descriptor)


class UnfinishedFile:
    """A file that a pyarrow writer fills under a hidden name.

    :meth:`complete` replaces it by its own name.
    """

    def __init__(
        self, filesystem: Any, path: str, make_writer: Callable[[Any], Any], *, atomic_upload: bool = False
    ) -> None:
        folder, name = path.rsplit("/", 1)
        self._filesystem, self._path = filesystem, path
        self._hidden = path if atomic_upload else f"{folder}/_{name}"  # readers ignore names with "_"
        with self.writing():
            self._stream = filesystem.open_output_stream(self._hidden)
            self.writer = make_writer(self._stream)

    def writing(self) -> AbstractContextManager[None]:
        """Report a write that takes long; enter it to use :attr:`writer`."""
        return activity(f"writing {self._path}")

    def complete(self) -> None:
        """Close the file and give it its name."""
        with self.writing():
            self.writer.close()
            self._stream.close()
            if self._hidden != self._path:
                self._filesystem.move(self._hidden, self._path)

    def abandon(self) -> None:
        """Remove the file."""
        with suppress(OSError, ValueError):  # a full disk: what matters is that the file goes
            self.writer.close()
            self._stream.close()
        with suppress(OSError):  # another process was faster, or the filesystem fails: the first error matters
            self._filesystem.delete_file(self._hidden)
