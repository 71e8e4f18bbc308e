"""Where a fit keeps its files: a prefix, the layout below it, a filesystem.

The files are Parquet, checkpoints and logs. How bytes move is the business of
:mod:`hvd_cluster.data.files.filesystems`.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hvd_cluster.data.files import filesystems
from hvd_cluster.data.files.remote_store import LocalOutputDir, RemoteStore, RunSync
from hvd_cluster.data.files.retry import file_info, read_file, retried, write_file
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.parquet_files import require_plain
from hvd_cluster.errors import DataError
from hvd_cluster.monitor.step_clock import SAVE, step_clock

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

#: Bytes of the probe that `check_writable` writes: more than a filesystem can hide in its metadata.
_PROBE_BYTES = 64 * 1024


class Store:
    """A prefix, what lies where below it, and the filesystem that serves it.

    Stores pickle: the process that unpickles one opens the filesystem again. Two stores with the same prefix are equal.
    All ``get_*`` methods return paths in the form of the prefix (an absolute local path, or a URL); the file methods
    take that form as well as paths inside the filesystem.

    Args:
        prefix_path: local path (relative ones are made absolute), ``file:`` URL, or any URL that pyarrow or fsspec
            opens.
        train_path, val_path, test_path: folders of the intermediate data; default
            ``<prefix>/intermediate_train_data`` and so on.
        runs_path: folder of the runs; default ``<prefix>/runs``.
        save_runs: whether runs keep checkpoints and logs.
        storage_options: arguments for the fsspec filesystem of the URL, such as credentials. They travel with the
            pickle.
        checkpoint_filename: name of the checkpoint in a run's folder.

    Raises:
        DataError: the prefix is empty or not a path.
    """

    #: What :meth:`create` chooses from: the first whose :meth:`matches` accepts the path, else the last.
    #: :mod:`hvd_cluster.data.store` sets it.
    _families: ClassVar[tuple[type[Store], ...]] = ()

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        if not isinstance(prefix_path, (str, os.PathLike)):
            raise DataError(f"a store needs a path or a URL, not {type(prefix_path).__name__}")
        self.prefix = filesystems.normalize(prefix_path)
        self._train_path = self._below("intermediate_train_data", train_path)
        self._val_path = self._below("intermediate_val_data", val_path)
        self._test_path = self._below("intermediate_test_data", test_path)
        self._runs_path = self._below("runs", runs_path)
        self._save_runs = save_runs
        self._storage_options = dict(storage_options or {})
        self._checkpoint_filename = checkpoint_filename or "checkpoint"
        self._opened: tuple[Any, str] | None = None

    @staticmethod
    def create(prefix_path: str | os.PathLike[str] | Store, *args: Any, **kwargs: Any) -> Store:
        """The store of the right family for a path or URL; a Store is returned as it is.

        Args:
            prefix_path: local path, URL or Store.
            args, kwargs: for the family's constructor.
        """
        if isinstance(prefix_path, Store):
            return prefix_path
        given: object = prefix_path
        path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else ""
        *special, default = Store._families
        family = next((each for each in special if each.matches(path)), default)
        return family(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Whether this family of stores serves the path."""
        return bool(path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.prefix == other.prefix

    def __hash__(self) -> int:
        return hash(self.prefix)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prefix!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    # --- where things are -------------------------------------------------------------------------------------------

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """Arguments for the fsspec filesystem of the URLs below the prefix.

        For programs that open these themselves.
        """
        return self._storage_options

    def saving_runs(self) -> bool:
        """Whether runs keep checkpoints and logs here."""
        return self._save_runs

    def get_train_data_path(self, idx: int | str | None = None) -> str:
        """Folder of the training part of data set ``idx``."""
        return _numbered(self._train_path, idx)

    def get_val_data_path(self, idx: int | str | None = None) -> str:
        """Folder of the validation part of data set ``idx``."""
        return _numbered(self._val_path, idx)

    def get_test_data_path(self, idx: int | str | None = None) -> str:
        """Folder of the test part of data set ``idx``."""
        return _numbered(self._test_path, idx)

    def get_runs_path(self) -> str:
        """Folder that holds all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Folder of one run."""
        return f"{self._runs_path}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """The run's checkpoint file; None where runs are not kept."""
        return f"{self.get_run_path(run_id)}/{self._checkpoint_filename}" if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """The run's checkpoint files that end in ``suffix``, sorted by name."""
        if not self._save_runs:
            return []
        return [path for path in self.list(self.get_run_path(run_id)) if path.endswith(suffix)]

    def get_checkpoint_filename(self) -> str:
        """Name of the checkpoint in a run's folder."""
        return self._checkpoint_filename

    def get_logs_path(self, run_id: str) -> str | None:
        """Folder of the run's logs; None where runs are not kept."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}" if self._save_runs else None

    def get_logs_subdir(self) -> str:
        """Name of the folder of logs in a run's folder."""
        return "logs"

    def get_full_path(self, path: str) -> str:
        """The path with its scheme for other programs, such as ``file:///abs``."""
        url = filesystems.normalize(path)
        return Path(url).as_uri() if filesystems.scheme_of(url) == "file" else url

    def get_localized_path(self, path: str) -> str:
        """The path inside the filesystem: without scheme."""
        if filesystems.scheme_of(path) == "file":
            return path if self._is_inside(path) else filesystems.normalize(path)
        # Everything below the prefix maps as the prefix does; another URL of the same filesystem is asked for itself.
        if path == self.prefix or path.startswith(f"{self.prefix}/"):
            return self._open()[1].rstrip("/") + path[len(self.prefix) :]
        return self._open_url(path)[1]

    # --- how bytes move ---------------------------------------------------------------------------------------------

    @property
    def fs(self) -> Any:
        """The ``pyarrow.fs.FileSystem`` that serves the prefix."""
        return self._open()[0]

    def get_filesystem(self) -> Any:
        """The same as :attr:`fs`."""
        return self.fs

    @property
    def is_local(self) -> bool:
        """Whether paths of this store are paths of the operating system."""
        return filesystems.scheme_of(self.prefix) == "file"

    @property
    def uploads_whole(self) -> bool:
        """Whether a file appears only once it is written to its end.

        So it is on object stores, where a rename is a copy.
        """
        return filesystems.scheme_of(self.prefix) in filesystems.OBJECT_STORES

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""
        return bool(self._info(path).type != self._info_types().NotFound)

    def is_file(self, path: str) -> bool:
        """Whether there is a file (not a folder)."""
        return bool(self._info(path).type == self._info_types().File)

    def read(self, path: str) -> bytes:
        """The whole content of a file.

        Raises:
            FileNotFoundError: there is none.
        """
        return read_file(self.fs, self.get_localized_path(path))

    @step_clock.span(SAVE)
    def write(self, path: str, data: bytes | str) -> None:
        """Write a file so that it is there whole or not at all.

        Also after a crash; folders above it are made.

        Args:
            path: the file.
            data: its content; text is written as UTF-8.

        Raises:
            OSError: what the filesystem says.
        """
        content = data.encode() if isinstance(data, str) else data
        write_file(self.fs, self.get_localized_path(path), content, atomic_upload=self.uploads_whole)

    def write_text(self, path: str, text: str) -> None:
        """Write text as UTF-8; see :meth:`write`."""
        self.write(path, text)

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all below it.

        A path that does not exist is fine.
        """
        kinds = self._info_types()
        kind, inner = self._info(path).type, self.get_localized_path(path)
        with suppress(FileNotFoundError):  # another process was faster
            if kind == kinds.Directory:
                self.fs.delete_dir(inner)
            elif kind != kinds.NotFound:
                self.fs.delete_file(inner)

    def list(self, path: str, recursive: bool = False) -> list[str]:
        """Files and folders in a folder, as paths inside the filesystem, sorted.

        [] where there is no such folder.
        """
        selector = load_pyarrow("pyarrow.fs").FileSelector(
            self.get_localized_path(path), allow_not_found=True, recursive=recursive
        )

        def look() -> Any:
            try:
                return self.fs.get_file_info(selector)
            except FileNotFoundError:  # made between Arrow's look into the folder and its look whether there is one
                return self.fs.get_file_info(selector)

        found = retried(look, self.fs, f"listing {path}")
        return sorted(info.path for info in found)

    def copy(self, source: str, target: str) -> None:
        """Copy a file inside the store; folders above the target are made."""
        inner = self.get_localized_path(target)
        self.fs.create_dir(inner.rsplit("/", 1)[0], recursive=True)
        self.fs.copy_file(self.get_localized_path(source), inner)

    def is_parquet_dataset(self, path: str) -> bool:
        """Whether Parquet can be read there."""
        try:
            self.get_parquet_dataset(path)
        except (OSError, ValueError):
            return False
        return True

    def get_parquet_dataset(self, path: str) -> Any:
        """The ``pyarrow.parquet.ParquetDataset`` there.

        Raises:
            DataError: the path belongs to a table of another format, such as Delta.
        """
        inner = self.get_localized_path(path)
        require_plain(self.fs, inner)
        return load_pyarrow("pyarrow.parquet").ParquetDataset(inner, filesystem=self.fs)

    def get_data_metadata_path(self, path: str) -> str:
        """The place beside a data set's folder for what a program has learned of it."""
        host = hashlib.md5(socket.gethostname().encode(), usedforsecurity=False).hexdigest()
        return f"{path.rstrip('/')}_{host}_cached_metadata.pkl"

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        """A picklable function that gives a context with a local folder for a run.

        It is the run's own folder where the store is local, else a temporary one, to be given to :meth:`sync_fn`.
        """
        return LocalOutputDir(self.get_run_path(run_id), self.is_local)

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """A picklable function that copies a local folder's files to the run's."""
        return RunSync(self.get_run_path(run_id), self.is_local, self.write)

    def to_remote(self, run_id: str, dataset_idx: int | str | None) -> RemoteStore:
        """What a worker needs for one run on a data set, as plain values.

        Pickles.
        """
        return RemoteStore(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
        )

    def read_serialized_keras_model(self, path: str, model: Any = None, custom_objects: Any = None) -> str:
        """A saved Keras model, one file, as base64 text.

        Args:
            path: the ``.keras`` or ``.h5`` file.
            model, custom_objects: not used: the file is whole by itself. Horovod's signature has them.

        Raises:
            DataError: there is a folder (TensorFlow's SavedModel format, which Keras 3 no longer loads).
            FileNotFoundError: there is nothing.
        """
        if self.exists(path) and not self.is_file(path):
            raise DataError(f"{path!r} is a folder: save the model as one file that ends in .keras")
        return base64.b64encode(self.read(path)).decode()

    def check_writable(self) -> None:
        """Write and remove a probe file below the prefix.

        Raises:
            DataError: that failed; the text names the path, the cause and what to do.
        """
        path = f"{self.prefix}/.probe-{uuid.uuid4().hex}"
        try:
            self.write(path, bytes(_PROBE_BYTES))
            self.delete(path)
        except OSError as error:
            with suppress(OSError):  # the first error is the one to report
                self.delete(path)
            raise DataError(filesystems.unwritable_text(self.prefix, error)) from error

    # --- the filesystem ---------------------------------------------------------------------------------------------

    def _below(self, name: str, path: str | None) -> str:
        return f"{self.prefix.rstrip('/')}/{name}" if path is None else filesystems.normalize(path)

    def _is_inside(self, path: str) -> bool:
        """Whether a path without scheme is one inside the filesystem.

        Otherwise it is a local path to make absolute.
        """
        return not self.is_local or (Path(path).is_absolute() and not path.startswith("file:"))

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            self._opened = self._open_url(self.prefix)
        return self._opened

    def _open_url(self, url: str) -> tuple[Any, str]:
        return filesystems.open_filesystem(url, self._storage_options)

    def _info(self, path: str) -> Any:
        return file_info(self.fs, self.get_localized_path(path))

    @staticmethod
    def _info_types() -> Any:
        return load_pyarrow("pyarrow.fs").FileType


def _numbered(path: str, idx: int | str | None) -> str:
    return path if idx is None else f"{path}.{idx}"
