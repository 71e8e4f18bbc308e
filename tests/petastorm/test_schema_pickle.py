"""The pickled schema is untrusted: what is no schema is refused, and nothing of it runs."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import sys
import types
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hvd_cluster.petastorm import codecs, make_reader, schema_pickle, spark_types
from hvd_cluster.petastorm.errors import PetastormMetadataError
from hvd_cluster.petastorm.metadata import INDEX_KEY, SCHEMA_KEY, get_schema_from_dataset_url
from hvd_cluster.petastorm.row_group_index import loads as load_index
from hvd_cluster.petastorm.unischema import Unischema, UnischemaField

FILES = Path(__file__).parent / "files" / "everything"
THEIRS: dict[bytes, bytes] = pq.read_metadata(FILES / "_common_metadata").metadata
DTYPES = [
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, np.str_, np.bytes_, np.datetime64, Decimal),
]


class Runs:
    """Unpickled by an unwary reader, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def a_field(**kargs: Any) -> UnischemaField:
    return UnischemaField(
        **{"name": "x", "numpy_dtype": np.int32, "shape": (), "codec": None, "nullable": True, **kargs}
    )


def shown(schema: Unischema) -> list[tuple[Any, ...]]:
    return [(*field[:3], repr(field.codec), field.nullable) for field in schema.fields.values()]


def test_petastorms_own_pickle_survives_ours_and_back() -> None:
    schema = schema_pickle.loads(THEIRS[SCHEMA_KEY])
    assert len(schema.fields) == 21
    assert shown(schema_pickle.loads(schema_pickle.dumps(schema))) == shown(schema)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_survives(dtype: Any) -> None:
    schema = Unischema("S", [a_field(numpy_dtype=dtype), a_field(name="y", shape=(None, 3), nullable=False)])
    again = schema_pickle.loads(schema_pickle.dumps(schema))
    assert again.x.numpy_dtype is dtype
    assert shown(again) == shown(schema)


@pytest.mark.parametrize("kind", spark_types.SPARK_TYPES.values())
def test_every_spark_type_survives(kind: type[spark_types.SparkType]) -> None:
    stored = spark_types.DecimalType(20, 7) if kind is spark_types.DecimalType else kind()
    schema = Unischema("S", [a_field(codec=codecs.ScalarCodec(stored))])
    assert schema_pickle.loads(schema_pickle.dumps(schema)).x.codec.stored_type() == stored


def test_a_dtype_instance_is_written_as_its_class() -> None:
    schema = Unischema("S", [a_field(numpy_dtype=np.dtype("float32"))])
    assert schema_pickle.loads(schema_pickle.dumps(schema)).x.numpy_dtype is np.float32


def test_the_written_pickle_names_what_petastorm_names() -> None:
    schema = schema_pickle.loads(THEIRS[SCHEMA_KEY])
    assert globals_of(schema_pickle.dumps(schema)) == globals_of(THEIRS[SCHEMA_KEY])


def test_classes_like_petastorms_load_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for petastorm, which is not installed here: its schema has attributes, its field is a namedtuple."""
    field = collections.namedtuple("UnischemaField", "name numpy_dtype shape codec nullable")
    modules = {
        "petastorm": types.ModuleType("petastorm"),
        "petastorm.unischema": types.SimpleNamespace(Unischema=type("Unischema", (), {}), UnischemaField=field),
        "petastorm.codecs": types.SimpleNamespace(CompressedImageCodec=type("CompressedImageCodec", (), {})),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    image = a_field(name="image", numpy_dtype=np.uint8, shape=(None, 3), codec=codecs.CompressedImageCodec("jpeg", 70))
    found = pickle.loads(schema_pickle.dumps(Unischema("S", [image, a_field(name="flag", numpy_dtype=np.bool_)])))
    assert list(found._fields) == ["image", "flag"]
    assert found.image is found._fields["image"]
    assert found.image[:3] == ("image", np.uint8, (None, 3))
    assert vars(found.image.codec) == {"_image_codec": ".jpeg", "_quality": 70}
    assert found.flag == field("flag", np.bool_, (), None, True)


def globals_of(data: bytes) -> set[str]:
    """The names that a pickle asks for."""
    asked: set[str] = set()

    class Asker(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            asked.add(f"{module}.{name}")
            # Stands for anything: schemas' classes are called and get a state.
            return type(
                name, (dict,), {"__new__": lambda cls, *a, **k: dict.__new__(cls), "__init__": lambda *a, **k: None}
            )

    Asker(io.BytesIO(data)).load()
    return asked


def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(PetastormMetadataError, match=r"it names 'posix\.mkdir'"):
        schema_pickle.loads(pickle.dumps(Runs(marker)))
    with pytest.raises(PetastormMetadataError, match="is refused"):
        load_index(pickle.dumps({"by_id": Runs(marker)}))
    assert not marker.exists()
    pickle.loads(pickle.dumps(Runs(marker)))
    assert marker.exists(), "the pickle would have run"


def test_a_hostile_data_set_is_refused_by_the_reader_and_named(tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "data"
    folder.mkdir()
    for file in FILES.glob("*.parquet"):
        (folder / file.name).write_bytes(file.read_bytes())
    schema = pq.read_schema(FILES / "_common_metadata")
    pq.write_metadata(schema.with_metadata({SCHEMA_KEY: pickle.dumps(Runs(marker))}), folder / "_common_metadata")
    for read in (make_reader, get_schema_from_dataset_url):
        with pytest.raises(PetastormMetadataError, match=str(folder)):
            read(folder)
    assert not marker.exists()


def spliced(codec: Any) -> bytes:
    """A pickle that petastorm could have written, but for the codec of its field."""
    field = text("x") + named("numpy.int32") + b")" + codec + b"\x89"  # NEWFALSE
    fields = b"}(" + text("x") + named("petastorm.unischema.UnischemaField") + b"(" + field + b"t\x81u"
    state = b"}(" + text("_name") + text("S") + text("_fields") + fields + b"u"
    return b"\x80\x02" + named("petastorm.unischema.Unischema") + b")\x81" + state + b"b."


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def named(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def call(name: str, argument: bytes) -> bytes:
    """REDUCE: name(argument)."""
    return named(name) + argument + b"\x85R"


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (call("os.system", b"X\x04\x00\x00\x00true"), "it names 'os.system'"),
        (call("builtins.eval", b"X\x01\x00\x00\x001"), "it names 'builtins.eval'"),
        (named("petastorm.codecs.__builtins__"), "it names"),
        (named("petastorm.unischema.Unischema.__init__"), "it names"),
        (named("numpy.int32"), "is none of petastorm's"),
        (call("numpy.dtype", b"X\x02\x00\x00\x00i4"), "is none of petastorm's"),
        (call("collections.OrderedDict", b"]"), "is none of petastorm's"),
        (b"K\x05", "is none of petastorm's"),
        (named("petastorm.codecs.ScalarCodec") + b")\x81", "has no Spark type"),
        # Patching a class that is on the list: BUILD with slots sets attributes of whatever is below it.
        (named("petastorm.codecs.ScalarCodec") + b"N}X\x06\x00\x00\x00decodeNs\x86b", "damaged"),
        (named("collections.OrderedDict") + b")RK\x01a", "damaged|appends"),
        (b"cx\nPersistent\n", "it names"),
        (b"P1\n", "PERSID"),
        (b"\x82\x01", "EXT1"),
        (b"(ios\nsystem\n", "INST"),
        (b"Nr" + struct.pack("<I", 2**31 - 1), "numbers a value"),
    ],
)
def test_every_way_around_the_list_is_closed(codec: bytes, message: str) -> None:
    before = dict(vars(codecs.ScalarCodec))
    with pytest.raises(PetastormMetadataError, match=message):
        schema_pickle.loads(spliced(codec))
    assert dict(vars(codecs.ScalarCodec)) == before
    assert schema_pickle.loads(spliced(b"N")).x.codec is None


def test_a_damaged_pickle_is_refused() -> None:
    data = THEIRS[SCHEMA_KEY]
    for size in range(0, len(data) - 1, 37):
        with pytest.raises(PetastormMetadataError, match="is refused"):
            schema_pickle.loads(data[:size])
    for other in (None, 5, ["a"], {"a": 1}, collections.OrderedDict(a=1)):
        with pytest.raises(PetastormMetadataError, match="is not a Unischema"):
            schema_pickle.loads(pickle.dumps(other))


def test_flipped_bytes_give_a_schema_or_a_refusal() -> None:
    data = THEIRS[SCHEMA_KEY]
    random = np.random.RandomState(5)
    refused = 0
    for _ in range(400):
        changed = bytearray(data)
        changed[random.randint(len(data))] = random.randint(256)
        try:
            assert isinstance(schema_pickle.loads(bytes(changed)), Unischema)
        except PetastormMetadataError:
            refused += 1
    assert refused > 100


class Rounded(codecs.DataframeColumnCodec):
    """A codec of a user's own."""

    def __init__(self, digits: int) -> None:
        self.digits = digits

    def stored_type(self) -> spark_types.SparkType:
        return spark_types.DoubleType()

    def encode(self, unischema_field: UnischemaField, value: Any) -> float:
        return round(float(value), self.digits)

    def decode(self, unischema_field: UnischemaField, value: Any) -> Any:
        return np.float64(value)


def test_a_codec_of_ones_own_needs_to_be_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "registered_codecs", codecs.registered_codecs)
    schema = Unischema("S", [a_field(numpy_dtype=np.float64, codec=Rounded(3))])
    with pytest.raises(ValueError, match=r"register_codec\(Rounded\)"):
        schema_pickle.dumps(schema)
    codecs.register_codec(Rounded)
    try:
        data = schema_pickle.dumps(schema)
        codec = schema_pickle.loads(data).x.codec
        assert (type(codec), codec.digits) == (Rounded, 3)
    finally:
        codecs.registered_codecs.clear()
    with pytest.raises(PetastormMetadataError, match="Rounded"):
        schema_pickle.loads(data)


def test_the_index_of_row_groups_has_plain_keys() -> None:
    indexes = load_index(THEIRS[INDEX_KEY])
    assert set(indexes) == {"by_id", "by_text", "known"}
    assert sorted(indexes["by_id"].indexed_values) == list(range(10))
    assert indexes["by_id"].get_row_group_indexes(9) == {2}
    assert indexes["by_id"].get_row_group_indexes(99) == set()
    assert indexes["known"].get_row_group_indexes() == {0, 1, 2}
