"""Credentials are the same ones in the words of every library that opens a table's files."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow.fs
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from hvd_cluster.data import open_table
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables import delta, iceberg, lance, object_store, opening
from hvd_cluster.errors import DataError

S3, AZURE, GCS = "s3://b/t", "abfss://c@acc.dfs.core.windows.net/t", "gs://b/t"


class Remote(MemoryFileSystem):
    """A filesystem that remembers its arguments."""

    cachable = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).split("://")[-1].rstrip("/")


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's filesystems of object stores without their packages."""
    for scheme in ("s3", "abfss", "gs"):
        monkeypatch.setitem(_registry, scheme, Remote)


@pytest.mark.parametrize(
    "options",
    [
        {"aws_access_key_id": "A", "aws_secret_access_key": "B", "aws_endpoint": "http://127.0.0.1:9"},
        {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "B", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
        {"access_key_id": "A", "secret_access_key": "B", "endpoint": "http://127.0.0.1:9"},
        {"s3.access-key-id": "A", "s3.secret-access-key": "B", "s3.endpoint": "http://127.0.0.1:9"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_filesystem_of_s3_has_the_options_of_a_table(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def opened(**arguments: Any) -> str:
        given.update(arguments)
        return "S3"

    monkeypatch.setattr(pyarrow.fs, "S3FileSystem", opened)
    assert object_store.is_of_a_format(S3, options)
    assert object_store.place_of(S3, options) == ("S3", "b/t")
    endpoint = {"endpoint_override": "http://127.0.0.1:9", "scheme": "http"}
    assert given == {"access_key": "A", "secret_key": "B", **endpoint}


def test_half_of_the_credentials_of_s3_is_an_error_that_names_the_table() -> None:
    with pytest.raises(DataError, match="cannot open 's3://b/t': .*secret_key"):
        object_store.place_of(S3, {"access_key_id": "A"})


@pytest.mark.parametrize(
    "options",
    [
        {"azure_storage_account_key": "a2V5"},
        {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5", "azure_storage_account_name": "acc"},
        {"account_name": "acc", "access_key": "a2V5"},
        {"adls.account-name": "acc", "adls.account-key": "a2V5"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_filesystem_of_azure_has_the_options_of_a_table(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def opened(**arguments: Any) -> str:
        given.update(arguments)
        return "Azure"

    monkeypatch.setattr(pyarrow.fs, "AzureFileSystem", opened, raising=False)
    assert object_store.place_of(AZURE, options) == ("Azure", "c/t")
    assert given == {"account_name": "acc", "account_key": "a2V5"}


@pytest.mark.parametrize(
    ("url", "options", "arguments"),
    [
        (AZURE, {"adls.connection-string": "C"}, {"connection_string": "C"}),
        (GCS, {"google_service_account": "/k.json"}, {"token": "/k.json"}),
        (GCS, {"service_account_key": '{"a": 1}'}, {"token": {"a": 1}}),
        (GCS, {"gcs.project-id": "p", "gcs.oauth2.token": "T"}, {"project": "p", "token": "T"}),
    ],
)
@pytest.mark.usefixtures("remote")
def test_a_store_has_the_options_that_pyarrow_does_without(
    url: str, options: dict[str, str], arguments: dict[str, Any]
) -> None:
    place, _ = object_store.place_of(url, options)
    assert place.storage_options == arguments


@pytest.mark.parametrize(
    ("url", "given", "options", "properties"),
    [
        (
            S3,
            {"key": "A", "secret": "B", "client_kwargs": {"region_name": "r"}},
            {"aws_access_key_id": "A", "aws_secret_access_key": "B", "aws_region": "r"},
            {"s3.access-key-id": "A", "s3.secret-access-key": "B", "s3.region": "r"},
        ),
        (
            AZURE,
            {"account_name": "acc", "sas_token": "S"},
            {"azure_storage_account_name": "acc", "azure_storage_sas_token": "S"},
            {"adls.account-name": "acc", "adls.sas-token": "S"},
        ),
        (
            GCS,
            {"token": "/k.json"},
            {"google_service_account": "/k.json"},
            {"gcs.oauth2.token": "/k.json", "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"},
        ),
        (GCS, {"token": {"a": 1}}, {"google_service_account_key": '{"a": 1}'}, {"gcs.oauth2.token": {"a": 1}}),
        (GCS, {"token": "anon"}, {"google_skip_signature": "true"}, {"gcs.oauth2.token": "anon"}),
    ],
)
def test_each_format_gets_the_options_of_a_store_in_its_own_words(
    url: str,
    given: dict[str, Any],
    options: dict[str, str],
    properties: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert options.items() <= (object_store.options_of(url, given) or {}).items()
    assert properties.items() <= object_store.iceberg_properties(url, given).items()
    seen: list[Any] = []
    monkeypatch.setattr(opening, "_open_paths", lambda *_: (Store.create(url), ["t"], url))
    monkeypatch.setattr(opening, "as_filesystem", lambda _: None)
    for module, name in ((delta, "Delta"), (lance, "Lance"), (iceberg, "Iceberg")):
        monkeypatch.setattr(opening, "_format_at", lambda *_, name=name: name)
        monkeypatch.setattr(module, "at", lambda *arguments: seen.append(arguments[-1]))
        open_table(url, filesystem=Store.create(url, storage_options=given))
    assert seen == [given] * 3


@pytest.mark.usefixtures("remote")
def test_the_files_of_a_table_are_opened_by_the_filesystem_of_its_own_io() -> None:
    from pyiceberg.io.fsspec import FsspecFileIO

    class Table:
        io = FsspecFileIO({"s3.access-key-id": "A"})

        def location(self) -> str:
            return S3

    Table.io._scheme_to_fs["s3"] = lambda properties: Remote(**properties)
    places = iceberg._Places(Table())
    assert places.filesystem.handler.fs.arguments == {"s3.access-key-id": "A"}
    assert pickle.loads(pickle.dumps(places.filesystem)).handler.fs.arguments == {"s3.access-key-id": "A"}
    assert places.inside("s3://b/t/data/x.parquet") == "b/t/data/x.parquet"
    with pytest.raises(DataError, match="in another place"):
        places.inside("s3://other/t/data/x.parquet")
