from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.codecs import NdarrayCodec, ScalarCodec
from hvd_cluster.petastorm.spark_types import IntegerType, LongType
from hvd_cluster.petastorm.unischema import (
    Unischema,
    UnischemaField,
    encode_row,
    insert_explicit_nulls,
    match_unischema_fields,
)

SCHEMA = Unischema(
    "Things",
    [
        UnischemaField("id", np.int32, (), ScalarCodec(IntegerType()), False),
        UnischemaField("id2", np.int64, (), ScalarCodec(LongType()), True),
        UnischemaField("vector", np.float32, (2,), NdarrayCodec(), False),
    ],
)


def test_a_view_has_named_fields_first_and_then_matches_of_whole_names() -> None:
    view = SCHEMA.create_schema_view([SCHEMA.vector, "id"])
    assert list(view.fields) == ["vector", "id"]
    assert view._name == "Things_view"
    assert [field.name for field in match_unischema_fields(SCHEMA, ["id.*"])] == ["id", "id2"]
    with pytest.raises(DataError, match="other"):
        SCHEMA.create_schema_view([UnischemaField("other", np.int32, ())])
    with pytest.raises(DataError, match="regular expression"):
        SCHEMA.create_schema_view(["("])


def test_fields_are_attributes_and_equal_but_for_their_codecs() -> None:
    assert SCHEMA.id == UnischemaField("id", np.int32, (), None, False)
    assert SCHEMA.id != UnischemaField("id", np.int32, (), None, True)
    assert hash(SCHEMA.id) == hash(UnischemaField("id", np.int32, ()))
    with pytest.raises(AttributeError, match="no field 'nothing'"):
        _ = SCHEMA.nothing
    with pytest.raises(DataError, match="two fields"):
        Unischema("S", [SCHEMA.id, SCHEMA.id])


def test_a_schema_pickles_for_workers() -> None:
    again = pickle.loads(pickle.dumps(SCHEMA))
    assert repr(again) == repr(SCHEMA)
    assert again.vector == SCHEMA.vector


def test_nulls_are_put_in_where_they_may_be() -> None:
    row: dict[str, object] = {"id": 1, "vector": None}
    insert_explicit_nulls(SCHEMA, row)
    assert row == {"id": 1, "vector": None, "id2": None}
    with pytest.raises(DataError, match="'id'"):
        insert_explicit_nulls(SCHEMA, {"vector": 0})


def test_a_row_is_encoded_in_the_order_of_the_schema_or_refused() -> None:
    row = encode_row(SCHEMA, {"vector": np.ones(2, np.float32), "id": np.int8(3)})
    assert list(row) == ["id", "id2", "vector"]
    assert row["id"] == 3
    assert row["id2"] is None
    with pytest.raises(DataError, match="nothing"):
        encode_row(SCHEMA, {"vector": np.ones(2, np.float32), "id": 1, "nothing": 5})
    with pytest.raises(DataError, match="may not be null"):
        encode_row(SCHEMA, {"vector": None, "id": 1})


@pytest.mark.parametrize("value", [np.bytes_(b"ab\0\0"), np.str_("ab\0")])
def test_zeros_at_the_end_of_a_value_without_a_codec_are_encoded(value: bytes | str) -> None:
    schema = Unischema("S", [UnischemaField("x", type(value), ())])
    encoded = encode_row(schema, {"x": value})["x"]
    assert (type(encoded), len(encoded)) == (type(value).__mro__[1], len(value))


def test_rows_are_namedtuples_whatever_the_names() -> None:
    row = SCHEMA.make_namedtuple(id=1, id2=2, vector=3)
    assert (type(row).__name__, row.id2, row._fields) == ("Things", 2, ("id", "id2", "vector"))
    with pytest.raises(TypeError):
        SCHEMA.make_namedtuple(id=1)
    odd = Unischema("odd one", [UnischemaField("a b", np.int32, ()), UnischemaField("c", np.int32, ())])
    row = odd.make_namedtuple(**{"a b": 1, "c": 2})
    assert row._asdict() == {"a b": 1, "c": 2}
    assert row.c == 2


def test_arrow_types_become_fields_and_others_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    arrow = pa.schema(
        {
            "i": pa.int16(),
            "s": pa.string(),
            "l": pa.list_(pa.float32()),
            "f": pa.list_(pa.float32(), 4),
            "t": pa.timestamp("us"),
            "st": pa.struct({"a": pa.int8()}),
        }
    )
    schema = Unischema.from_arrow_schema(arrow)
    assert {name: (field.numpy_dtype, field.shape) for name, field in schema.fields.items()} == {
        "i": (np.int16, ()),
        "s": (np.str_, ()),
        "l": (np.float32, (None,)),
        "f": (np.float32, (4,)),
        "t": (np.datetime64, ()),
    }
    assert "st (struct" in caplog.text
    with pytest.raises(DataError, match="st"):
        Unischema.from_arrow_schema(arrow, omit_unsupported_fields=False)
