"""The progress of writing a data set: reported to a callback, or drawn as a bar."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.writing.part_file import PartPlan

if TYPE_CHECKING:
    import pyarrow as pa

#: Takes the rows that are written, and the rows in all; None where they are not known before the end.
Progress = Callable[[int, int | None], None]

#: How often the store is asked for parts that executors have finished.
POLL_S = 2.0


class ProgressBar:
    """A bar by tqdm on the terminal or in a notebook, until all rows are written."""

    def __init__(self, description: str = "writing rows") -> None:
        self._description = description
        self._bar: Any = None

    def __call__(self, rows: int, total: int | None) -> None:
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc=self._description, unit=" rows", unit_scale=True)
        self._bar.total = total
        self._bar.update(rows - self._bar.n)
        if rows == total:
            self._bar.close()
            self._bar = None


def counted(batches: Iterable[pa.RecordBatch], progress: Progress | None, total: int | None) -> Iterator[Any]:
    """The batches as they are; reports the rows before each one is requested."""
    rows = 0
    for batch in batches:
        yield batch
        rows += batch.num_rows
        if progress is not None and batch.num_rows:
            progress(rows, total)


class FinishedParts:
    """A context that reports the rows of the parts that executors have finished.

    They are found in the store. Works for every kind of session, because it asks the store and not Spark.
    """

    def __init__(self, plan: PartPlan, progress: Progress | None) -> None:
        self._plan = plan
        self._progress = progress
        self._rows: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvd-progress", daemon=True)

    def __enter__(self) -> FinishedParts:
        if self._progress is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._progress is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                rows = self._count()
            except OSError:  # asked again in a moment; if the store is gone, the writers say so
                continue
            if rows and self._progress is not None:
                self._progress(rows, None)

    def _count(self) -> int:
        parquet, store = load_pyarrow("pyarrow.parquet"), self._plan.store
        for folder in self._plan.folders:
            for path in store.list(folder):
                if path.rsplit("/", 1)[-1].startswith("part-") and path not in self._rows:
                    with store.fs.open_input_file(path) as stream:
                        self._rows[path] = parquet.read_metadata(stream).num_rows
        of_parts = {path.rsplit("-", 1)[0]: rows for path, rows in self._rows.items()}  # once for all attempts
        return sum(of_parts.values())
