"""Groups of the options of a :class:`~hvd_cluster.data.reader.ParquetReader`.

Each option is also an argument of the reader: ``ParquetReader(path, batch_size=64, seed=7)`` and ``ParquetReader(path,
batch_size=64, order_config=OrderConfig(seed=7))`` are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from hvd_cluster.data.columns.column_config import ColumnConfig, Decode
from hvd_cluster.data.reading.budget import PREFETCH_BYTES
from hvd_cluster.data.reading.shards import REMAINDERS

if TYPE_CHECKING:
    from hvd_cluster.data.cache import RowGroupCache

__all__ = ["ColumnConfig", "OrderConfig", "PrefetchConfig", "ReaderOptions"]

Config = TypeVar("Config", "ColumnConfig", "OrderConfig", "PrefetchConfig")


@dataclass(frozen=True, kw_only=True)
class OrderConfig:
    """The order of an epoch's rows.

    A pure function of the data, the epoch and these values.

    Args:
        shuffle: whether to permute rows; False keeps the order of the data (in each lane).
        seed: selects the order together with the epoch.
        window_bytes: bytes of rows that are shuffled among each other; None for 16 MiB, and up to 128 MiB where rows
            are large.
        lanes: interleaved streams. None for ``size``: each rank reads only its own row groups. A number gives one order
            for any number of ranks.
    """

    shuffle: bool = True
    seed: int = 0
    window_bytes: int | None = None
    lanes: int | None = None

    def problems(self) -> list[str]:
        """A sentence for each value that is out of range."""
        texts = not_whole(seed=self.seed)
        if self.lanes is not None and self.lanes < 1:
            texts.append(f"lanes is {self.lanes}: it must be at least 1")
        return texts


@dataclass(frozen=True, kw_only=True)
class PrefetchConfig:
    """How far, and with how many threads, a reader reads ahead.

    Nothing here changes the order of rows.

    Args:
        num_threads: threads that read ahead.
        prefetch_bytes: maximum bytes of rows that wait for the consumer.
        cache: keeps what was read: a :class:`~hvd_cluster.data.cache.MemoryCache` or
            :class:`~hvd_cluster.data.cache.DiskCache`.
    """

    num_threads: int = 2
    prefetch_bytes: int = PREFETCH_BYTES
    cache: RowGroupCache | None = None

    def problems(self) -> list[str]:
        """A sentence for each value that is out of range."""
        return not_whole(num_threads=self.num_threads) or too_small(num_threads=self.num_threads)


class ReaderOptions(TypedDict, total=False):
    """The fields of the three groups as arguments of the reader.

    An argument overrides its field.
    """

    shapes: Mapping[str, tuple[int, ...]] | None
    pad: Mapping[str, Any] | None
    fill_nulls: Mapping[str, Any] | None
    drop_nulls: bool | Collection[str]
    decode: Mapping[str, Decode] | None
    stack: Mapping[str, Sequence[str]] | None
    shuffle: bool
    seed: int
    window_bytes: int | None
    lanes: int | None
    num_threads: int
    prefetch_bytes: int
    cache: RowGroupCache | None


def overridden(config: Config, options: dict[str, Any]) -> Config:
    """The config with those options that are its fields.

    They are removed from ``options``.
    """
    given = {field.name: options.pop(field.name) for field in fields(config) if field.name in options}
    if isinstance(config, ColumnConfig):  # None has always meant "no column"
        given = {name: value for name, value in given.items() if value is not None}
    return replace(config, **given)


def not_whole(**numbers: Any) -> list[str]:
    """A sentence for each argument that is not a whole number."""
    return [
        f"{name} is {value!r}: it must be a whole number"
        for name, value in numbers.items()
        if not hasattr(value, "__index__")
    ]


def too_small(**numbers: int) -> list[str]:
    """A sentence for each argument that is below 1."""
    return [f"{name} is {value}: it must be at least 1" for name, value in numbers.items() if value < 1]


def share_problems(batch_size: int, rank: int, size: int, epoch: int, remainder: str) -> list[str]:
    """A sentence for each argument that no share of the data can have."""
    wrong = [] if remainder in REMAINDERS else [f"remainder is {remainder!r}: it is one of {', '.join(REMAINDERS)}"]
    if texts := not_whole(batch_size=batch_size, rank=rank, size=size, epoch=epoch):
        return [*texts, *wrong]
    texts = too_small(batch_size=batch_size)
    if not 0 <= rank < size:
        texts.append(f"rank is {rank} of size {size}: ranks go from 0 to size - 1")
    return [*texts, *wrong]
