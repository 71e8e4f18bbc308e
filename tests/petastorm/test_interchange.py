"""With real petastorm: what it has written is read here, and (in `make test-matrix`) it reads what is written here.

``files`` holds what ``peer/write.py`` has made, with petastorm's own readings; the slow tests make it anew.
"""

from __future__ import annotations

import datetime as dt
import json
import subprocess
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_cluster.petastorm import make_batch_reader, make_reader, write_dataset
from hvd_cluster.petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
from hvd_cluster.petastorm.metadata import get_schema_from_dataset_url
from hvd_cluster.petastorm.predicates import in_lambda, in_negate, in_pseudorandom_split, in_reduce, in_set
from hvd_cluster.petastorm.selectors import IntersectIndexSelector, SingleIndexSelector, UnionIndexSelector
from hvd_cluster.petastorm.spark_types import (
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
)
from hvd_cluster.petastorm.transform import TransformSpec
from hvd_cluster.petastorm.unischema import Unischema, UnischemaField

HERE = Path(__file__).parent
PEER = HERE.parents[1] / ".venv-petastorm" / "bin" / "python"
NULLABLE = {"i16", "f32", "flag", "text", "price", "packed", "day"}

with_petastorm = [
    pytest.mark.slow,
    pytest.mark.skipif(not PEER.exists(), reason="petastorm is not here: `make test-matrix` makes .venv-petastorm"),
    pytest.mark.timeout(400),
]


def peer(script: str, *args: object) -> None:
    """Run a script where petastorm is installed."""
    command = [str(PEER), str(HERE / "peer" / script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", params=["kept", pytest.param("anew", marks=with_petastorm)])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that petastorm wrote."""
    if request.param == "kept":
        yield HERE / "files"
    else:
        folder = tmp_path_factory.mktemp("petastorm") / "files"
        peer("write.py", folder)
        yield folder


def plain(value: Any) -> np.ndarray:
    return np.array(str(value)) if isinstance(value, Decimal) else np.asarray(value)


def rows_of(url: object, **kargs: Any) -> dict[str, Any]:
    with make_reader(str(url), shuffle_row_groups=False, **kargs) as reader:
        return {
            f"{name}/{row.id}": plain(value)
            for row in reader
            for name, value in row._asdict().items()
            if value is not None
        }


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    if ours.dtype.kind == "f":
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs, equal_nan=True)
    kinds = {ours.dtype.kind, theirs.dtype.kind}
    return (ours.dtype == theirs.dtype or kinds <= {"U", "M"}) and np.array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["everything", "keyed"])
def test_every_value_is_what_petastorm_reads(files: Path, name: str) -> None:
    ours, theirs = rows_of(files / name), dict(np.load(files / f"{name}.npz"))
    assert set(ours) == set(theirs)
    assert len(ours) > 20
    # Two JPEG decoders may round differently.
    for key in [key for key in theirs if key.startswith("jpeg/")]:
        assert np.abs(ours[key].astype(int) - theirs.pop(key)).max() <= 2
    # petastorm takes the text of a folder's name for a number: "01" was written, and it reads "1".
    for key in [key for key in theirs if key.startswith("month/")]:
        assert ours[key] == f"{int(theirs.pop(key)):02d}"
    assert [key for key in theirs if not same(ours[key], theirs[key])] == []


def test_the_schema_is_what_petastorm_was_given(files: Path) -> None:
    schema = get_schema_from_dataset_url(files / "everything")
    assert schema._name == "Everything"
    assert repr(schema.price.codec) == "ScalarCodec(DecimalType(10,3))"
    assert repr(schema.jpeg.codec) == "CompressedImageCodec('jpeg', 90)"
    assert (schema.points.shape, schema.points.numpy_dtype) == ((None, 3), np.float32)
    assert schema.plain.codec is None
    assert {name for name, field in schema.fields.items() if field.nullable} == NULLABLE


def test_plain_parquet_is_read_as_petastorm_reads_it(files: Path) -> None:
    with make_batch_reader(f"file://{files}/plain", shuffle_row_groups=False) as reader:
        batches = [batch._asdict() for batch in reader]
    theirs = np.load(files / "plain.npz")
    assert sum(len(batch["id"]) for batch in batches) == 10
    order = np.argsort(np.concatenate([batch["id"] for batch in batches]))
    for name in theirs.files:
        ours = np.concatenate([batch[name] for batch in batches])[order]
        if ours.dtype == object:
            ours = np.array([str(value) for value in ours])
        np.testing.assert_array_equal(ours, theirs[name])
        assert ours.dtype == theirs[name].dtype or ours.dtype.kind in "UM"


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "in_set": lambda: {"predicate": in_set({1, 5, 77}, "id")},
    "in_lambda": lambda: {"predicate": _negative()},
    "in_negate": lambda: {"predicate": in_negate(_negative())},
    "in_reduce": lambda: {"predicate": in_reduce([_negative(), in_set({1, 7}, "id")], any)},
    "by_id": lambda: {"rowgroup_selector": SingleIndexSelector("by_id", [4])},
    "union": lambda: {
        "rowgroup_selector": UnionIndexSelector(
            [SingleIndexSelector("by_id", [0]), SingleIndexSelector("by_text", ["row 9 \u00fc"])]
        )
    },
    "intersect": lambda: {
        "rowgroup_selector": IntersectIndexSelector(
            [SingleIndexSelector("by_id", [0, 4]), SingleIndexSelector("by_text", ["row 5 \u00fc"])]
        )
    },
}


def _negative() -> in_lambda:
    return in_lambda(["i8"], lambda i8: i8 < -4)


def ids(url: Path, **kargs: Any) -> list[int]:
    with make_reader(url, ["id"], shuffle_row_groups=False, **kargs) as reader:
        return [int(row.id) for row in reader]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_predicates_and_selectors_pick_the_rows_that_petastorm_picks(files: Path, name: str) -> None:
    answers = json.loads((files / "answers.json").read_text())
    assert ids(files / "everything", **ARGUMENTS[name]()) == answers[name]


def test_shards_and_partitions_are_dealt_as_petastorm_deals_them(files: Path) -> None:
    answers = json.loads((files / "answers.json").read_text())
    assert [ids(files / "everything", cur_shard=k, shard_count=3) for k in range(3)] == answers["shards"]
    assert ids(files / "keyed", predicate=in_set({"02"}, "month")) == answers["keyed_in_set"]


def test_a_pseudorandom_split_puts_each_value_where_petastorm_does(files: Path) -> None:
    answers = json.loads((files / "answers.json").read_text())["splits"]
    spread = [*range(200), *[f"k{i}" for i in range(200)], *[i / 8 for i in range(50)]]
    for index in range(2):
        predicate = in_pseudorandom_split([0.3, 0.4], index, "f")
        assert [predicate.do_include({"f": value}) for value in spread] == answers[str(index)]


def test_a_transform_gives_what_it_gives_in_petastorm(files: Path) -> None:
    transform = TransformSpec(
        lambda row: {"double": np.float64(row["f64"] * 2), "id": row["id"]},
        edit_fields=[("double", np.float64, (), False)],
        removed_fields=["f64"],
    )
    with make_reader(files / "everything", ["id", "f64"], shuffle_row_groups=False, transform_spec=transform) as reader:
        rows = [[int(row.id), float(row.double)] for row in reader]
    assert rows == json.loads((files / "answers.json").read_text())["transformed"]


def ours() -> tuple[Unischema, list[dict[str, Any]]]:
    """A schema of every codec, and rows; row i is told by ``id``."""
    schema = Unischema(
        "Ours",
        [
            UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False),
            UnischemaField("i8", np.int8, (), ScalarCodec(ByteType()), False),
            UnischemaField("f32", np.float32, (), ScalarCodec(FloatType()), False),
            UnischemaField("flag", np.bool_, (), ScalarCodec(BooleanType()), False),
            UnischemaField("text", np.str_, (), ScalarCodec(StringType()), True),
            UnischemaField("price", Decimal, (), ScalarCodec(DecimalType(12, 4)), True),
            UnischemaField("plain", np.uint8, (), None, False),
            UnischemaField("points", np.float32, (None, 3), NdarrayCodec(), True),
            UnischemaField("packed", np.int16, (2, None), CompressedNdarrayCodec(), False),
            UnischemaField("words", np.str_, (None,), NdarrayCodec(), False),
            UnischemaField("png", np.uint8, (8, 6, 3), CompressedImageCodec("png"), False),
            UnischemaField("grey16", np.uint16, (8, 6), CompressedImageCodec("png"), False),
            UnischemaField("colour16", np.uint16, (8, 6, 3), CompressedImageCodec("png"), False),
            UnischemaField("jpeg", np.uint8, (16, 16, 3), CompressedImageCodec("jpeg", 95), False),
            UnischemaField("day", np.datetime64, (), ScalarCodec(DateType()), False),
            UnischemaField("moment", np.datetime64, (), ScalarCodec(TimestampType()), False),
            UnischemaField("small", np.uint16, (), ScalarCodec(IntegerType()), False),
        ],
    )
    random = np.random.RandomState(3)
    rows = [
        {
            "id": i,
            "i8": -i,
            "f32": np.float32(i / 3),
            "flag": i % 2 == 0,
            "text": None if i == 2 else f"row {i} \u00e9",
            "price": None if i == 3 else Decimal(i) / 4,
            "plain": 250 + i % 5,
            "points": None if i == 4 else random.rand(i % 3, 3).astype(np.float32),
            "packed": random.randint(-99, 99, (2, i + 1)).astype(np.int16),
            "words": np.array(["x", "yy" * i]),
            "png": random.randint(0, 256, (8, 6, 3)).astype(np.uint8),
            "grey16": random.randint(0, 65536, (8, 6)).astype(np.uint16),
            "colour16": random.randint(0, 65536, (8, 6, 3)).astype(np.uint16),
            "jpeg": (np.add.outer(np.arange(16), np.arange(16))[..., None] * np.array([1, 2, 4])).astype(np.uint8),
            "day": np.datetime64("2024-02-28") + i,
            "moment": dt.datetime.fromisoformat(f"2024-02-28T01:02:{i:02d}.345678"),
            "small": 65000 + i,
        }
        for i in range(12)
    ]
    return schema, rows


def written(folder: Path) -> dict[str, np.ndarray]:
    """Write the data set above in two files of two row groups; returns the values that a reader is to give."""
    schema, rows = ours()
    assert write_dataset(folder, schema, rows, row_group_rows=3, rows_per_file=6) == 12
    return {f"{name}/{row['id']}": plain(value) for row in rows for name, value in row.items() if value is not None}


def check(read: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert set(read) == set(expected)
    for key, value in expected.items():
        if key.startswith("jpeg/"):
            assert np.abs(read[key].astype(int) - value).max() <= 12
        elif key.startswith("price/"):
            assert Decimal(str(read[key])) == Decimal(str(value))
        else:
            np.testing.assert_array_equal(read[key], value)


def test_what_is_written_here_is_read_here(tmp_path: Path) -> None:
    expected = written(tmp_path / "data")
    read = rows_of(tmp_path / "data")
    check(read, expected)
    assert (read["i8/3"].dtype, read["plain/3"].dtype, read["small/3"].dtype) == (np.int8, np.uint8, np.uint16)


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason="petastorm is not here: `make test-matrix` makes .venv-petastorm")
def test_what_is_written_here_is_read_by_petastorm(tmp_path: Path) -> None:
    expected = written(tmp_path / "data")
    peer("read.py", f"file://{tmp_path}/data", tmp_path / "read.npz")
    read = dict(np.load(tmp_path / "read.npz"))
    schema = {key: read.pop(key).tolist() for key in list(read) if key.startswith("schema/")}
    assert schema["schema/price"] == ["Decimal", "()", "ScalarCodec(DecimalType(12,4))", "True"]
    assert schema["schema/points"] == ["float32", "(None, 3)", "NdarrayCodec()", "True"]
    assert schema["schema/flag"] == ["bool_", "()", "ScalarCodec(BooleanType())", "False"]
    assert schema["schema/jpeg"] == ["uint8", "(16, 16, 3)", "CompressedImageCodec('jpeg', 95)", "False"]
    assert schema["schema/plain"] == ["uint8", "()", "None", "False"]
    check(read, expected)
