"""Reports of written parts -> the data set that they make up."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvd_cluster.data.dataset import Dataset, Split
from hvd_cluster.data.reading.common_schema import CommonSchema
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables.parquet import ParquetFragments
from hvd_cluster.data.writing.column_stats import TableStats, raise_if_any
from hvd_cluster.data.writing.part_writer import PartPlan, PartReport
from hvd_cluster.errors import DataError

logger = logging.getLogger(__name__)

NO_ROWS_TEXT = "the data has no rows: check the filters and joins that made it"


def parts_of(answers: Iterable[Mapping[str, Any]]) -> list[PartReport]:
    """The reports of all parts, from the plain data that writers return.

    Raises:
        DataError: writers failed; all their texts are given.
    """
    answers = list(answers)
    raise_if_any(sorted({answer["error"] for answer in answers if "error" in answer}))
    return [PartReport.from_json(answer) for answer in answers]


def assembled(
    plan: PartPlan, parts: Iterable[PartReport], store: Store, lanes: int, folders: Sequence[str] = ()
) -> Dataset:
    """The data set of all parts, in any order.

    Raises:
        DataError: columns hold nulls or ragged lists, or have types that do not go together; or a part of the split is
            empty.
    """
    parts = sorted(parts, key=lambda part: part.part)
    seen = TableStats()
    for part in parts:
        seen.merge(part.stats)
    if not any(part.rows for part in parts):
        raise DataError(NO_ROWS_TEXT)
    raise_if_any([*plan.wrong, *seen.problems(allow_ragged=plan.allow_ragged)])
    reader = _reader_of(plan, parts, store)
    train, held_out = (
        replace(Split.of(itertools.chain.from_iterable(groups), lanes), reader=reader)
        for groups in ([part.train for part in parts], [part.validation for part in parts])
    )
    if folders:  # no user sees their files
        train, held_out = _with_sources(train, len(parts) == 1 and not held_out.rows), _with_sources(held_out, False)
    return checked(Dataset(store, seen.with_lengths(plan.schema), train, held_out, tuple(folders)), plan.validation)


def _with_sources(split: Split, is_in_order: bool) -> Split:
    """The split of temporary files, which may know the rows of the user's data.

    It knows them if it has all of them in their order.
    """
    firsts = itertools.accumulate((group.rows for group in split.row_groups), initial=0)
    groups = zip(split.row_groups, firsts, strict=False)
    return replace(
        split,
        row_groups=tuple(replace(group, source_row=first if is_in_order else -1) for group, first in groups),
    )


def _reader_of(plan: PartPlan, parts: Sequence[PartReport], store: Store) -> ParquetFragments | None:
    """A reader of parts whose types differ, or None where they do not.

    Its types hold the values of all parts.

    Raises:
        DataError: a column that no tensor is made of has no such type.
    """
    written = [part for part in parts if part.kept_types is not None]
    if not written:
        return None
    places = [(part.train or part.validation)[0].path for part in written]
    common = CommonSchema.of([part.kept_types for part in written], places)
    common.require(column.name for column in plan.schema if not column.has_tensor)
    types = {name: kind for name, kind in common.changed.items() if name not in common.conflicts}
    return ParquetFragments(store, types) if types else None


def checked(dataset: Dataset, validation: float | str | None) -> Dataset:
    """The data set, without a validation part if none was requested."""
    train, held_out = dataset.train.rows, dataset.validation.rows if dataset.validation else 0
    rows = train + held_out
    if not train:
        raise DataError(f"no row of {rows} is left for training: validation={validation!r} takes them all")
    if validation is None:
        return replace(dataset, validation=None)
    if not held_out:
        raise DataError(f"no row of {rows} is for validation: validation={validation!r} selects none")
    logger.debug("%d rows for training, %d for validation", train, held_out)
    return dataset
