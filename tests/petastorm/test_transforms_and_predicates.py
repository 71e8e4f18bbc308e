"""What a petastorm reader does with the answers of a user's transform, and with nulls beside a predicate's column."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.petastorm import make_batch_reader, make_reader
from hvd_cluster.petastorm.predicates import in_negate, in_pseudorandom_split


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Four rows."""
    pq.write_table(pa.table({"id": range(4)}), tmp_path / "a.parquet")
    return str(tmp_path)


def test_a_null_leaves_the_other_integers_of_its_row_group_in_their_part_of_a_split(tmp_path: Path) -> None:
    keys = pa.array([*range(8), *range(7), None], pa.int64())
    pq.write_table(pa.table({"key": keys, "id": range(16)}), tmp_path / "a.parquet", row_group_size=8)
    for split in (in_pseudorandom_split([0.5, 0.5], 0, "key"), in_pseudorandom_split([0.5, 0.5], 1, "key")):
        for predicate in (split, in_negate(split)):
            with make_reader(tmp_path, predicate=predicate, shuffle_row_groups=False) as reader:
                by_row = [int(row.id) for row in reader]
            with make_batch_reader(tmp_path, predicate=predicate, shuffle_row_groups=False) as reader:
                assert [int(number) for batch in reader for number in batch.id] == by_row
