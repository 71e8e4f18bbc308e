"""Names for data by its content.

The same rows, requested in the same way, have the same name.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_cluster.data import dataset
from hvd_cluster.data.files.filesystems import normalize, open_filesystem
from hvd_cluster.data.files.retry import file_info
from hvd_cluster.data.optional import load_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

    from hvd_cluster.data.store import Store


def of_table(table: pa.Table, options: Mapping[str, Any]) -> str:
    """The name of an Arrow table's columns, written with these options.

    It has 32 hexadecimal digits. A table that is cut into other chunks, or has other values behind its nulls, may have
    another name.
    """
    digest = _digest(options)
    pyarrow, ipc = load_pyarrow(), load_pyarrow("pyarrow.ipc")
    with pyarrow.PythonFile(_Hashing(digest), mode="w") as sink, ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return str(digest.hexdigest())


def of_text(text: str, options: Mapping[str, Any]) -> str:
    """The name of what a string describes; see :func:`of_table`."""
    digest = _digest(options)
    digest.update(text.encode())
    return str(digest.hexdigest())


def _digest(options: Mapping[str, Any]) -> Any:
    digest = hashlib.blake2b(digest_size=16)
    # A folder of another version cannot be used again, so it must not have the name that is looked for.
    digest.update(json.dumps([f"hvd-cluster {dataset.MANIFEST_VERSION}", options], sort_keys=True).encode())
    return digest


class _Hashing:
    """A file that only counts into a digest what is written to it."""

    closed = False

    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return len(memoryview(data).cast("B")) if not isinstance(data, bytes) else len(data)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self.closed = True


#: Frames that are remembered; each holds a plan in the driver, and no rows.
_MAX_FRAMES = 64


@dataclass(frozen=True)
class PlanState:
    """What a DataFrame stands for at one moment.

    A DataFrame of Spark Connect is resolved each time that it is used: after a temporary view has been replaced, the
    same DataFrame holds the rows of the new view. So a comparison of two DataFrames says what they stand for now, and
    the hash says whether that is what they stood for then.
    """

    frame: Any
    #: Hash of the plan after its names were resolved.
    resolved: int
    #: Names, sizes and times of change of the files that it reads.
    files: str

    @classmethod
    def of(cls, frame: Any) -> PlanState:
        """The state of a DataFrame now."""
        return cls(frame, int(frame.semanticHash()), state_of_files(frame))

    def has_rows_of(self, now: PlanState) -> bool:
        """Whether another DataFrame's rows are those that this one had then.

        The state of the other is new.
        """
        return self.resolved == now.resolved and self.files == now.files and _same_plan(self.frame, now.frame)


class SparkPlans:
    """Gives the same name to frames with the same plan over unchanged files.

    The name is drawn at random for a plan that is new: ``semanticHash`` alone has 32 bits, and for data that exists
    only in the session's memory it says nothing in another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: (state of a frame, its name), oldest first.
        self._known: list[tuple[PlanState, str]] = []

    def address(self, frame: Any, store: Store, options: Mapping[str, Any]) -> str:
        """A name for what a DataFrame holds, written into a store with these options."""
        now = PlanState.of(frame)
        with self._lock:
            name = next((name for then, name in self._known if then.has_rows_of(now)), None)
            if name is None:
                name = uuid.uuid4().hex
                self._known = [*self._known[1 - _MAX_FRAMES :], (now, name)]
        return of_text(f"{name} {store.prefix}", options)


def _same_plan(one: Any, other: Any) -> bool:
    """Whether two DataFrames of a session have the same plan now."""
    if one.sparkSession is not other.sparkSession or type(one) is not type(other):
        return False
    try:
        return bool(one.sameSemantics(other))
    except Exception:  # noqa: BLE001 - the session of a remembered frame may be gone, which each kind says otherwise
        return False


def state_of_files(frame: Any) -> str:
    """Names, sizes and times of change of the files that a frame reads.

    Names alone where these cannot be read.
    """
    parts = []
    for url in sorted(frame.inputFiles()):
        try:
            filesystem, path = open_filesystem(normalize(url))
            info = file_info(filesystem, path)
            parts.append(f"{url} {info.size} {info.mtime_ns}")
        except (OSError, ValueError):
            parts.append(url)
    return "\n".join(parts)


PLANS = SparkPlans()
