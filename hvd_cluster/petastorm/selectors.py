"""Row-group selectors: which row groups to read, from petastorm's indexes.

The indexes are in the metadata.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvd_cluster.petastorm.row_group_index import RowGroupIndex


class RowGroupSelectorBase(abc.ABC):
    """A selector."""

    @abc.abstractmethod
    def get_index_names(self) -> Iterable[str]:
        """The indexes that it looks at."""

    @abc.abstractmethod
    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        """The numbers of the row groups to read.

        Args:
            index_dict: name of an index -> the index.
        """


class SingleIndexSelector(RowGroupSelectorBase):
    """Row groups that hold any of some values.

    Args:
        index_name: the index.
        values_list: the values.
    """

    def __init__(self, index_name: str, values_list: Sequence[Any]) -> None:
        self._index_name = index_name
        self._values = list(values_list)

    def get_index_names(self) -> list[str]:
        return [self._index_name]

    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        index = index_dict[self._index_name]
        return set().union(*(index.get_row_group_indexes(value) for value in self._values))


class _Combined(RowGroupSelectorBase):
    def __init__(self, single_index_selectors: Sequence[RowGroupSelectorBase]) -> None:
        self._selectors = list(single_index_selectors)

    def get_index_names(self) -> list[str]:
        return [name for selector in self._selectors for name in selector.get_index_names()]

    def _selected(self, index_dict: Mapping[str, RowGroupIndex]) -> list[set[int]]:
        return [selector.select_row_groups(index_dict) for selector in self._selectors]


class IntersectIndexSelector(_Combined):
    """Row groups that all of ``single_index_selectors`` pick."""

    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        selected = self._selected(index_dict)
        return functools.reduce(set.intersection, selected) if selected else set()


class UnionIndexSelector(_Combined):
    """Row groups that at least one of ``single_index_selectors`` picks."""

    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        return set().union(*self._selected(index_dict))
