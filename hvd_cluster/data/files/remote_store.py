"""What a worker needs of a store for one run.

Plain paths, and functions that pickle without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_cluster.data.files.scratch import scratch_folder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

#: Where Databricks mounts DBFS and Unity Catalog's volumes on every machine of a cluster. Files there are written from
#: their beginning to their end, neither appended to nor changed in the middle: docs.databricks.com, limitations of
#: working with files in volumes.
DATABRICKS_MOUNTS = ("/dbfs/", "/Volumes/")


@dataclass(frozen=True, kw_only=True)
class RemoteStore:
    """A store as one run sees it; what ``Store.to_remote`` returns. Pickles."""

    #: Folders of the run's data set.
    train_data_path: str
    val_data_path: str
    test_data_path: str
    #: Whether runs keep checkpoints and logs.
    saving_runs: bool
    #: Folder that holds all runs, and this run's.
    runs_path: str
    run_path: str
    #: The run's checkpoint and its folder of logs; None where runs are not kept.
    checkpoint_path: str | None
    logs_path: str | None
    #: Names of these two in the run's folder.
    checkpoint_filename: str
    logs_subdir: str
    #: Gives a context with a local folder to write the run's files to.
    get_local_output_dir: Callable[[], AbstractContextManager[str]]
    #: Copies such a folder into the run's folder.
    sync: Callable[[str], None]


@dataclass(frozen=True)
class RunSync:
    """Copies a local folder's files into a run's folder, each whole or not at all."""

    #: The run's folder in the store, and whether it is a local one.
    run_path: str
    is_local: bool
    #: The store's own: path and content.
    write: Callable[[str, bytes], None]

    def __call__(self, local_run_path: str) -> None:
        root = Path(local_run_path)
        if self.is_local and root.resolve() == Path(self.run_path).resolve():
            return
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            self.write(f"{self.run_path}/{file.relative_to(root).as_posix()}", file.read_bytes())


@dataclass(frozen=True)
class LocalOutputDir:
    """Gives a local folder for a run's files.

    It is the run's own where any program can write there, else a temporary one.
    """

    #: The run's folder in the store, and whether it is a local one.
    run_path: str
    is_local: bool

    @contextlib.contextmanager
    def __call__(self) -> Iterator[str]:
        path = Path(self.run_path)
        if self.is_local and not str(path.resolve()).startswith(DATABRICKS_MOUNTS):
            path.mkdir(parents=True, exist_ok=True)
            yield str(path)
        else:
            with scratch_folder("run") as folder:
                files = Path(folder, "files")  # beside the folder's lock, which is not a file of the run
                files.mkdir()
                yield str(files)
