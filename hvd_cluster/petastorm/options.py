"""The arguments of both kinds of readers, as one value that checks itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.cache import LocalDiskCache
from hvd_cluster.petastorm.predicates import PredicateBase
from hvd_cluster.petastorm.selectors import RowGroupSelectorBase
from hvd_cluster.petastorm.transform import TransformSpec

_POOLS = ("thread", "process", "dummy")
#: Threads, at most, whatever ``workers_count`` says: more of them than this only wait for each other.
_MAX_THREADS = 32


@dataclass(frozen=True, kw_only=True)
class PetastormOptions:
    """The options of ``make_reader`` and ``make_batch_reader``.

    They have petastorm's names, and those functions document them.
    """

    schema_fields: Any
    reader_pool_type: str
    workers_count: int
    results_queue_size: int
    seed: int | None
    shuffle_rows: bool
    shuffle_row_groups: bool
    shuffle_row_drop_partitions: int
    predicate: Any
    rowgroup_selector: RowGroupSelectorBase | None
    num_epochs: Any
    cur_shard: int | None
    shard_count: int | None
    shard_seed: int | None
    cache_type: str | None
    cache_location: Any
    cache_size_limit: int | None
    cache_extra_settings: Mapping[str, Any] | None
    transform_spec: Any
    filters: Any

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> PetastormOptions:
        """Those of a call's arguments that are options."""
        options = cls(**{option.name: arguments[option.name] for option in fields(cls)})
        options.check()
        return options

    @property
    def num_threads(self) -> int:
        """That read ahead; 0 to read in the caller's thread."""
        return 0 if self.reader_pool_type == "dummy" else min(self.workers_count, _MAX_THREADS)

    def check(self) -> None:
        """Raise a DataError that names all arguments that make no sense."""
        wrong = []
        if self.reader_pool_type not in _POOLS:
            wrong.append(f"reader_pool_type is {self.reader_pool_type!r}: it is one of {', '.join(_POOLS)}")
        if self.num_epochs is not None and not (isinstance(self.num_epochs, int) and self.num_epochs >= 1):
            wrong.append(f"num_epochs is {self.num_epochs!r}: give at least 1, or None for no end")
        if self.cache_type not in {None, "null", "local-disk"}:
            wrong.append(f"cache_type is {self.cache_type!r}: it is 'null' or 'local-disk'")
        if self.cache_type == "local-disk" and not (self.cache_location and self.cache_size_limit):
            wrong.append("cache_type 'local-disk' needs cache_location and cache_size_limit")
        wrong.extend(
            f"{name} is {getattr(self, name)}: give at least 1"
            for name in ("workers_count", "results_queue_size", "shuffle_row_drop_partitions")
            if getattr(self, name) < 1
        )
        if self.predicate is not None and not isinstance(self.predicate, PredicateBase):
            wrong.append(f"predicate is {self.predicate!r}: give an instance of a class derived from PredicateBase")
        if self.transform_spec is not None and not isinstance(self.transform_spec, TransformSpec):
            wrong.append(f"transform_spec is {self.transform_spec!r}: give a TransformSpec")
        if wrong:
            raise DataError("\n".join(wrong))

    def cache(self) -> LocalDiskCache | None:
        """What keeps read row groups."""
        if self.cache_type != "local-disk":
            return None
        cleanup = bool(dict(self.cache_extra_settings or {}).get("cleanup", True))
        return LocalDiskCache(self.cache_location, int(self.cache_size_limit or 0), cleanup)
