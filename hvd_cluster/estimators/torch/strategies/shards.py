"""Checkpoints of which each rank writes and reads its own part.

They are torch.distributed.checkpoint's, in the store.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hvd_cluster.data.files.filesystems import unwritable_text
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError

#: What the metadata of a checkpoint consists of; its file is a pickle.
_METADATA = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


class Shards:
    """The tensors of one checkpoint of a run: a folder of files, one for each rank.

    Only ranks that have written have one.

    Args:
        store: where it is.
        run_id: the run.
        name: of the folder among those of the run.
    """

    def __init__(self, store: Store, run_id: str, name: str) -> None:
        self.name = name
        self._store = store
        self._path = f"{shards_path(store, run_id)}/{name}"

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write this rank's part of DTensors, and other tensors.

        Other tensors of one name are equal on all ranks. Every rank takes part.

        Raises:
            DataError: the store cannot be written.
        """
        writer: Any
        if self._store.is_local:
            writer = FileSystemWriter(self._store.get_localized_path(self._path))
        else:
            writer = FileSystemWriter(self._path, sync_files=False)
            writer.fs, writer.path = _StoreFiles(self._store), self._path
        try:
            save(dict(tensors), storage_writer=writer)
        except CheckpointException as error:  # a BaseException
            cause = _cause(error)
            if isinstance(cause, OSError):
                raise DataError(unwritable_text(self._path, cause)) from error
            raise RuntimeError(f"the checkpoint {self._path} cannot be written: {cause}") from error

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Complete shape and dtype of each tensor.

        Raises:
            DataError: the folder is not a checkpoint.
        """
        found = self._reader().read_metadata().state_dict_metadata
        return {name: (one.size, one.properties.dtype) for name, one in found.items()}

    def read(self, tensors: dict[str, torch.Tensor], *, alone: bool = False) -> None:
        """Read into the memory of tensors.

        These may be DTensors over another number of ranks.

        Args:
            alone: only this process reads; else every rank takes part.

        Raises:
            RuntimeError: a file cannot be read, or lacks a tensor.
        """
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as asked
                load(tensors, storage_reader=self._reader(), no_dist=alone)
        except CheckpointException as error:
            raise RuntimeError(f"the checkpoint {self._path} cannot be read: {_cause(error)}") from error

    def delete(self) -> None:
        """Delete the folder."""
        self._store.delete(self._path)

    def _reader(self) -> Any:
        if self._store.is_local:
            return _PlainReader(self._store.get_localized_path(self._path))
        reader = _PlainReader(self._path)
        reader.fs, reader.path = _StoreFiles(self._store), self._path
        return reader


def shards_path(store: Store, run_id: str) -> str:
    """The folder with the shards of all checkpoints of a run."""
    return f"{store.get_run_path(run_id)}/shards"


def _cause(error: Any) -> BaseException:
    """The first error of a rank."""
    return next(iter(error.failures.values()))[0]  # type: ignore[no-any-return]


class _PlainReader(FileSystemReader):
    """Executes no code of the checkpoint: others may write to the store."""

    path: Any
    fs: Any

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        path = self.fs.concat_path(self.path, ".metadata")
        try:
            with self.fs.create_stream(path, "rb") as stream:
                metadata = _PlainUnpickler(stream).load()
        except (pickle.UnpicklingError, EOFError, FileNotFoundError) as error:
            raise DataError(f"{self.path} is not a checkpoint of this run ({error}): choose another run_id") from error
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype) or found is torch.Size:
            return found
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


class _StoreFiles(FileSystemBase):
    """The files of a store that is not on a disk of this machine."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        inner, files = self._store.get_localized_path(path), self._store.fs
        with files.open_input_file(inner) if mode == "rb" else files.open_output_stream(inner) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> Any:
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        self._store.fs.move(self._store.get_localized_path(path), self._store.get_localized_path(new_path))

    def mkdir(self, path: Any) -> None:
        self._store.fs.create_dir(self._store.get_localized_path(path), recursive=True)

    def exists(self, path: Any) -> bool:
        return self._store.exists(path)

    def rm_file(self, path: Any) -> None:
        self._store.delete(path)

    def ls(self, path: Any) -> list[str]:
        return self._store.list(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return True
