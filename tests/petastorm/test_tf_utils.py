"""A petastorm reader under TensorFlow, in a process of its own: TensorFlow's import leaves variables behind."""

from __future__ import annotations

import datetime as dt
import importlib.util
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.errors import MissingExtraError
from hvd_cluster.petastorm import make_batch_reader, make_reader
from hvd_cluster.petastorm.tf_utils import converted, described, make_petastorm_dataset
from hvd_cluster.petastorm.unischema import UnischemaField

FILES = Path(__file__).parent / "files"
with_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed"
)


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(FILES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (np.uint16, (2, None), ("int32", (2, None))),
        (np.uint32, (), ("int64", ())),
        (np.bool_, (), ("bool", ())),
        (np.str_, (), ("string", ())),
        (Decimal, (), ("string", ())),
        (np.datetime64, (), ("int64", ())),
    ],
)
def test_fields_are_described_as_petastorm_does(dtype: Any, shape: tuple[int | None, ...], expected: Any) -> None:
    field = UnischemaField("x", dtype, shape)
    assert described(field, batched=False) == expected
    assert described(field, batched=True) == (expected[0], (None, *expected[1]))


def test_values_are_converted_and_nulls_named() -> None:
    assert converted("x", np.uint16(5)).dtype == np.int32
    assert converted("x", Decimal("1.50")).tolist() == "1.50"
    assert converted("x", np.bytes_(b"a\0")).tolist() == b"a\0"
    assert converted("x", np.str_("a\0")).tolist() == "a\0"
    assert converted("x", np.datetime64("1970-01-02")).tolist() == 86400 * 10**9
    for value in (None, np.array([1, None], dtype=object)):
        with pytest.raises(TypeError, match="'x' holds None"):
            converted("x", value)


DAY_NS = 86400 * 10**9


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.array([dt.date(1970, 1, 2), dt.date(1969, 12, 31)]), [DAY_NS, -DAY_NS]),
        (pa.array([dt.date(1970, 1, 2)], pa.date64()), [DAY_NS]),
        (pa.array([1], pa.timestamp("s")), [10**9]),
        (pa.array([5000], pa.timestamp("ns")), [5000]),
        (pa.array([1], pa.timestamp("us", "Europe/Berlin")), [1000]),
        (pa.array([Decimal("1.50")]), ["1.50"]),
        (pa.array([b"a\0", b""]), [b"a\0", b""]),
        (pa.array(["a", ""]), ["a", ""]),
        (pa.array([1], pa.uint16()), [1]),
        (pa.array([1], pa.uint32()), [1]),
        (pa.array([2**63], pa.uint64()), [2**63]),
        (pa.array([True]), [True]),
        (pa.array([0.5], pa.float32()), [0.5]),
        (pa.array(["b"]).dictionary_encode(), ["b"]),
        (pa.array([[1, 2]]), [[1, 2]]),
        (pa.array([[dt.date(1970, 1, 2)]]), [[DAY_NS]]),
        (pa.array([["a", "b"]]), [["a", "b"]]),
    ],
)
@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_values_are_of_the_dtype_that_is_described(tmp_path: Path, make: Any, column: Any, wanted: list[Any]) -> None:
    pq.write_table(pa.table({"x": column}), tmp_path / "0.parquet")
    with make(tmp_path.as_uri(), shuffle_row_groups=False) as reader:
        dtype, shape = described(reader.schema.fields["x"], batched=reader.batched_output)
        found = [converted("x", item.x, dtype) for item in reader]
    assert all(array.ndim == len(shape) for array in found)
    assert all("string" if array.dtype.kind in "SUO" else array.dtype.name == dtype for array in found)
    values = [array.tolist() for array in found]
    assert (values[0] if reader.batched_output else values) == wanted


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.int64(), pa.bool_(), pa.string()])
@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_nulls_of_every_type_are_named(tmp_path: Path, make: Any, kind: Any) -> None:
    pq.write_table(pa.table({"x": pa.array([None, None], kind)}), tmp_path / "0.parquet")
    with make(tmp_path.as_uri()) as reader:
        dtype, _ = described(reader.schema.fields["x"], batched=reader.batched_output)
        with pytest.raises(TypeError, match="'x' holds None"):
            converted("x", next(reader).x, dtype)


def test_without_tensorflow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as if it were not installed
    with make_reader(FILES / "keyed") as reader, pytest.raises(MissingExtraError, match=r"extra \[tensorflow\]"):
        make_petastorm_dataset(reader)


@with_tensorflow
def test_rows_and_batches_come_as_namedtuples() -> None:
    run("""
import sys
import numpy as np
from hvd_cluster.petastorm import make_batch_reader, make_reader
from hvd_cluster.petastorm.tf_utils import make_petastorm_dataset
fields = ["id", "u16", "png", "moment", "points"]
with make_reader(sys.argv[1] + "/everything", fields, shuffle_row_groups=False) as reader:
    dataset = make_petastorm_dataset(reader)
    for _ in range(2):
        rows = list(dataset)
        assert sorted(int(row.id) for row in rows) == list(range(10))
        assert all(row.png.shape == (8, 6, 3) and int(row.u16) == 60000 + int(row.id) for row in rows)
    assert rows[0].points.shape[1] == 3 and rows[0].u16.dtype.name == "int32", rows[0]
with make_batch_reader(sys.argv[1] + "/plain", ["id", "x", "v"], shuffle_row_groups=False) as reader:
    batches = list(make_petastorm_dataset(reader))
    ids = np.concatenate([batch.id.numpy() for batch in batches])
    assert sorted(ids) == list(range(10))
    assert all(batch.v.shape == (len(batch.id), 2) for batch in batches)
""")


@pytest.mark.slow
@with_tensorflow
def test_a_converter_gives_batches_of_the_size_asked_for() -> None:
    run("""
import sys
from hvd_cluster.petastorm.converter import make_spark_converter
converter = make_spark_converter(sys.argv[1] + "/plain")
with converter.make_tf_dataset(batch_size=4, num_epochs=1, schema_fields=["id", "x"]) as dataset:
    batches = list(dataset)
assert [len(batch.id) for batch in batches] == [4, 4, 2]
assert sorted(int(i) for batch in batches for i in batch.id) == list(range(10))
with converter.make_tf_dataset(batch_size=4, shuffling_queue_capacity=6, schema_fields=["id"]) as dataset:
    assert sum(len(batch.id) for batch in dataset.take(20)) >= 60
    assert dataset.options().autotune.enabled is False  # whose thread may hold up the end of an iteration
""")


@pytest.mark.slow
@with_tensorflow
def test_each_pass_over_a_converters_batches_draws_them_in_an_order_of_its_own() -> None:
    run("""
import sys
from hvd_cluster.petastorm.converter import make_spark_converter
converter = make_spark_converter(sys.argv[1] + "/plain")
options = {"num_epochs": 1, "shuffling_queue_capacity": 10, "schema_fields": ["id"], "shuffle_row_groups": False}
def passes():
    with converter.make_tf_dataset(batch_size=4, seed=3, **options) as dataset:
        return [tuple(int(i) for batch in dataset for i in batch.id) for _ in range(3)]
first = passes()
assert all(sorted(ids) == list(range(10)) for ids in first)
assert len(set(first)) == 3, first
assert passes() == first
""")
