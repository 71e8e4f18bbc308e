"""Where a reader stands in its epochs, and the plan of what follows."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hvd_cluster.data.dataset import Split
from hvd_cluster.data.files.retry import retried
from hvd_cluster.data.reading import shards
from hvd_cluster.data.reading.shards import Remainder, ShardPlan
from hvd_cluster.data.tables.table_source import FragmentReader
from hvd_cluster.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a reader stands: what comes next.

    The same on all ranks that have taken as many steps.
    """

    #: Number of the epoch.
    epoch: int
    #: Rows of the epoch that all ranks together have taken.
    row: int = 0
    #: Further inputs of this epoch's order, next to the seed; None for the reader's own.
    lanes: int | None = None
    window_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes the plan of one rank for any position: a pure function of these values."""

    #: The rows.
    split: Split
    #: This rank, and the number of ranks.
    rank: int
    size: int
    #: Rows per rank and step.
    batch_size: int
    #: Chooses the order together with the epoch.
    seed: int
    shuffle: bool
    #: What happens to the rows that do not fill the last global batch.
    remainder: Remainder
    #: Rows that are shuffled among each other at a time.
    window_rows: int

    def plan(self, position: Position) -> ShardPlan:
        """What the rank reads from a position to the end of its epoch."""
        return shards.plan(
            self.split if position.lanes is None else self.split.with_lanes(position.lanes),
            self.rank,
            self.size,
            self.batch_size,
            seed=self.seed,
            epoch=position.epoch,
            shuffle=self.shuffle,
            remainder=self.remainder,
            window_rows=position.window_rows or self.window_rows,
            begin=position.row,
        )

    def after(self, position: Position, plan: ShardPlan, steps: int) -> Position:
        """The position after this many steps (>= 1) of a plan that began at ``position``.

        After the last step of all ranks it is the beginning of the next epoch.
        """
        row = min(plan.position_at(steps), self.split.rows)
        if steps == plan.steps and (self.remainder != "uneven" or row == self.split.rows):
            return Position(epoch=position.epoch + 1)
        return Position(
            epoch=position.epoch,
            row=row,
            lanes=position.lanes or self.split.lanes,
            window_rows=position.window_rows or self.window_rows,
        )


#: Bytes at the end of a file that identify it: Parquet's footer with its statistics, or most of it.
_TAIL_BYTES = 64 * 1024
_NUM_THREADS = 8
#: Said of the files, not of the order; a copy of the data differs in them.
_OF_FILES = ("files_crc", "times_crc")


def fingerprint(planner: Planner, reader: FragmentReader) -> dict[str, Any]:
    """What must not change between saving and loading a position, as plain values.

    ``files_crc`` stands for the names of the files below the folder that they share, their sizes and their last 64 KiB;
    ``times_crc`` for the times of their last change, where the filesystem has them. A snapshot of a table never
    changes: ``snapshot`` stands for all of them.

    Args:
        planner: its split holds the rows.
        reader: says which files hold the rows.
    """
    split = planner.split
    snapshot = split.snapshot
    cuts = ",".join(f"{group.rows}" for group in split.row_groups)
    paths = sorted({group.path for group in split.row_groups})
    places = {path: file for path in paths if snapshot is None and (file := reader.file(path)) is not None}
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = list(pool.map(lambda file: _of_file(*file), places.values()))
    shared = _folder(paths)
    files = [(path[len(shared) :], size, tail) for path, (size, tail, _) in zip(places, found, strict=True)]
    return {
        "seed": planner.seed,
        "shuffle": planner.shuffle,
        "rows": split.rows,
        "row_groups_crc": zlib.crc32(cuts.encode()),
        "filter_crc": zlib.crc32(repr(split.row_filter).encode()),
        "files_crc": zlib.crc32(repr(files).encode()),
        "times_crc": zlib.crc32(repr([time for _, _, time in found]).encode()),
        **({} if snapshot is None else {"snapshot": snapshot.key}),
    }


def position_of_state(state: Mapping[str, Any], own: Mapping[str, Any], *, strict: bool) -> Position:
    """The position that a state holds.

    Args:
        state: the state.
        own: the fingerprint of the reader that loads it.
        strict: whether the files must be the same too.

    Raises:
        DataError: it is not a state, or belongs to other data; all differences are named.
    """
    if not isinstance(state, Mapping):
        raise DataError(f"the state is a {type(state).__name__}: give the dict that state_dict() returned")
    missing = [name for name in ("epoch", "row", "lanes", "window_rows", *own) if name not in {*state, "snapshot"}]
    if missing:
        raise DataError(f"the state lacks {', '.join(missing)}: give the dict that state_dict() of a reader returned")
    own = {"snapshot": None, **own}
    differences = [
        f"{name} was {state.get(name)!r} and is {value!r}"
        for name, value in own.items()
        if state.get(name) != value and (strict or name not in _OF_FILES)
    ]
    if differences:
        remedy = "Give the reader the same data, filters, seed and shuffle as before"
        if state.get("snapshot") != own["snapshot"]:
            remedy += ": open_table(table, version=...) reads a version other than the newest"
        if all(text.startswith(_OF_FILES) for text in differences):
            remedy = (
                "Names, sizes, ends or times of the files have changed: read the same files as before, or, if these "
                "are copies of them, load the state with strict=False"
            )
        raise DataError(f"the state belongs to another order of rows: {'; '.join(differences)}. {remedy}")
    position = Position(**{name: state[name] for name in ("epoch", "row", "lanes", "window_rows")})
    least = {"row": 0, "lanes": 1, "window_rows": 1}
    wrong = [
        f"{name} is {value!r}"
        for name, value in vars(position).items()
        if not (value is None and name in {"lanes", "window_rows"})
        and (not isinstance(value, int) or isinstance(value, bool) or value < least.get(name, value))
    ]
    if wrong or position.row > own["rows"]:
        wrong = wrong or [f"row is {position.row} of {own['rows']}"]
        raise DataError(f"the state is damaged: {'; '.join(wrong)}. Give what state_dict() returned, unchanged")
    return position


def _of_file(filesystem: Any, path: str) -> tuple[int, int, int | None]:
    """Size, a checksum of the end, and time of the last change of a file."""

    def look() -> tuple[int, int, int | None]:
        time = filesystem.get_file_info(path).mtime_ns
        with filesystem.open_input_file(path) as stream:
            size = stream.size()
            return size, zlib.crc32(stream.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))), time

    try:
        return retried(look, filesystem, f"looking at {path}")
    except OSError as error:
        raise DataError(f"cannot read {path}, whose end identifies the position's data: {error}") from error


def _folder(paths: list[str]) -> str:
    """The folder that sorted paths share, with its "/"."""
    first, last = paths[0].split("/")[:-1], paths[-1].split("/")[:-1]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(f"{part}/" for part, _ in same)
