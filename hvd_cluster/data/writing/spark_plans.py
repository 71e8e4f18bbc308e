"""Which DataFrames of this session have the same plan: Spark says so, and it forgets when the session ends."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.files.filesystems import normalize, open_filesystem
from hvd_cluster.data.files.retry import retried
from hvd_cluster.data.writing import content_address

if TYPE_CHECKING:
    from hvd_cluster.data.store import Store

#: Frames that are remembered; each holds a plan in the driver, and no rows.
_MAX_FRAMES = 64


class SparkPlans:
    """Remembers frames, and gives the same name to those with the same plan over unchanged files.

    The name is drawn at random for a plan that is new: ``semanticHash`` alone has 32 bits, and for data that exists
    only in the session's memory it says nothing in another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: (frame, state of its input files, its name), oldest first.
        self._known: list[tuple[Any, str, str]] = []

    def address(self, frame: Any, store: Store, options: Mapping[str, Any]) -> str:
        """A name for what a DataFrame holds, written into a store with these options.

        Args:
            frame: of a classic or Connect session.
            store: where it will be written.
            options: plain values that decide what is written.
        """
        files = state_of_files(frame)
        with self._lock:
            name = next(
                (name for known, state, name in self._known if state == files and same_plan(known, frame)), None
            )
            if name is None:
                name = uuid.uuid4().hex
                self._known = [*self._known[1 - _MAX_FRAMES :], (frame, files, name)]
        return content_address.of_text(f"{name} {store.prefix}", options)


def same_plan(one: Any, other: Any) -> bool:
    """Whether two DataFrames of a session have the same plan; their files may have changed in between."""
    if one.sparkSession is not other.sparkSession or type(one) is not type(other):
        return False
    try:
        return bool(one.sameSemantics(other))
    except Exception:  # noqa: BLE001 - the session of a remembered frame may be gone, which each kind says otherwise
        return False


def state_of_files(frame: Any) -> str:
    """Names, sizes and times of change of the files that a frame reads; names alone where they cannot be looked at."""
    parts = []
    for url in sorted(frame.inputFiles()):
        try:
            filesystem, path = open_filesystem(normalize(url))
            info = _info(filesystem, path)
            parts.append(f"{url} {info.size} {info.mtime_ns}")
        except (OSError, ValueError):
            parts.append(url)
    return "\n".join(parts)


def _info(filesystem: Any, path: str) -> Any:
    return retried(lambda: filesystem.get_file_info(path), filesystem, f"looking at {path}")


PLANS = SparkPlans()
