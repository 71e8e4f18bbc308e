"""Options of object stores in the words of each library.

The libraries are fsspec, pyarrow, pyiceberg and object_store (deltalake, lance). The names are those of s3fs, adlfs and
gcsfs; of object_store's ``AmazonS3ConfigKey``, ``AzureConfigKey`` and ``GoogleConfigKey``; and of pyiceberg's "FileIO"
properties.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hvd_cluster.data.files.filesystems import scheme_of
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What an object store's options are called."""

    #: How the options of object_store and pyiceberg begin; those of object_store have short names without it too.
    prefixes: tuple[str, ...]
    #: Option without a prefix, in snake case -> argument of fsspec's filesystem; the first that is given counts.
    arguments: Mapping[str, str]
    #: Argument of fsspec's filesystem -> option of object_store.
    object_store: Mapping[str, str]
    #: Argument of fsspec's filesystem -> property of pyiceberg.
    iceberg: Mapping[str, str]


_S3 = _Family(
    prefixes=("aws_", "s3.", "client."),
    arguments={
        **{name: name for name in ("key", "secret", "token", "endpoint_url", "region_name", "anon")},
        "access_key_id": "key",
        "secret_access_key": "secret",
        "session_token": "token",
        "endpoint": "endpoint_url",
        "endpoint_url_s3": "endpoint_url",
        "region": "region_name",
        "default_region": "region_name",
        "skip_signature": "anon",
        "anonymous": "anon",
    },
    object_store={
        "key": "aws_access_key_id",
        "secret": "aws_secret_access_key",
        "token": "aws_session_token",
        "endpoint_url": "aws_endpoint",
        "region_name": "aws_region",
        "anon": "aws_skip_signature",
    },
    iceberg={
        "key": "s3.access-key-id",
        "secret": "s3.secret-access-key",
        "token": "s3.session-token",
        "endpoint_url": "s3.endpoint",
        "region_name": "s3.region",
        "anon": "s3.anonymous",
    },
)
_AZURE_ARGUMENTS = ("account_name", "account_key", "sas_token", "tenant_id", "client_id", "client_secret")
_AZURE = _Family(
    prefixes=("azure_storage_", "azure_", "adls."),
    arguments={
        **{name: name for name in (*_AZURE_ARGUMENTS, "connection_string", "account_host")},
        "access_key": "account_key",
        "master_key": "account_key",
        "sas_key": "sas_token",
        "authority_id": "tenant_id",
    },
    object_store={name: f"azure_storage_{name}" for name in _AZURE_ARGUMENTS},
    iceberg={
        name: f"adls.{name.replace('_', '-')}" for name in (*_AZURE_ARGUMENTS, "connection_string", "account_host")
    },
)
_GCS = _Family(
    prefixes=("google_", "gcs."),
    arguments={
        "token": "token",
        "service_account": "token",
        "service_account_path": "token",
        "service_account_key": "token",
        "application_credentials": "token",
        "oauth2.token": "token",
        "project": "project",
        "project_id": "project",
        "endpoint_url": "endpoint_url",
        "service.host": "endpoint_url",
    },
    object_store={},  # see `_google_credentials`
    iceberg={"token": "gcs.oauth2.token", "project": "gcs.project-id", "endpoint_url": "gcs.service.host"},
)
_FAMILIES = {
    **dict.fromkeys(("s3", "s3a", "s3n"), _S3),
    **dict.fromkeys(("az", "azure", "abfs", "abfss", "adl", "wasb", "wasbs"), _AZURE),
    **dict.fromkeys(("gs", "gcs"), _GCS),
}
#: Argument of fsspec's S3 filesystem -> that of pyarrow's.
_ARROW_S3 = {
    "key": "access_key",
    "secret": "secret_key",
    "token": "session_token",
    "endpoint_url": "endpoint_override",
    "region_name": "region",
}


def is_in_one(url: str) -> bool:
    """Whether a URL is one of an object store whose options are known."""
    return scheme_of(url) in _FAMILIES


def is_of_a_format(url: str, options: Mapping[str, Any] | None) -> bool:
    """Whether options are a format library's (``aws_...``, ``s3....``), not fsspec's."""
    family = _FAMILIES.get(scheme_of(url))
    if family is None:
        return False
    short = {*family.arguments} - {*family.arguments.values()}
    return any(name.lower().startswith(family.prefixes) or name.lower() in short for name in options or ())


def options_of(url: str, storage_options: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Options of object_store for those of fsspec; what it knows already stays."""
    if not storage_options:
        return None
    family, given = _FAMILIES.get(scheme_of(url)), _flat(storage_options)
    if family is _GCS and "token" in given:
        given |= _google_credentials(given.pop("token"))
    names = {} if family is None else family.object_store
    options = {names.get(name, name): str(value) for name, value in given.items() if isinstance(value, (str, bool))}
    if options.get("aws_endpoint", "").startswith("http:"):
        options.setdefault("aws_allow_http", "true")
    return options


def iceberg_properties(url: str, storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Properties of pyiceberg's ``FileIO`` for any options; what it knows stays."""
    family, given = _FAMILIES.get(scheme_of(url)), _flat(storage_options or {})
    if family is None:
        return given
    if family is _GCS and "token" in given:  # what gcsfs takes there, and pyarrow does not
        given.setdefault("py-io-impl", "pyiceberg.io.fsspec.FsspecFileIO")
    found = _arguments(family, given)
    return {**given, **{family.iceberg[name]: found[name] for name in family.iceberg if name in found}}


def place_of(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """The Store or filesystem of a URL with a library's options, and the path in it."""
    family = _FAMILIES.get(scheme_of(url))
    found = {} if family is None else _arguments(family, options or {})
    filesystem = None
    try:
        if found and family is _S3:
            filesystem = _arrow_s3(found)
        elif found and family is _AZURE:
            filesystem = _arrow_azure(urlsplit(url).netloc, found)
    except ValueError as error:  # an option without another that belongs to it
        raise DataError(f"cannot open {url!r}: {error}") from error
    if filesystem is None:
        store = Store.create(url, storage_options=found)
        return store, store.get_localized_path(store.prefix)
    host, slash, path = url.split("://", 1)[1].rstrip("/").partition("/")
    return filesystem, f"{host.partition('@')[0]}{slash}{path}"


def _arrow_s3(arguments: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {_ARROW_S3[name]: value for name, value in arguments.items() if name in _ARROW_S3}
    if str(given.get("endpoint_override", "")).startswith("http:"):
        given["scheme"] = "http"
    if arguments.get("anon"):
        given["anonymous"] = True
    return load_pyarrow("pyarrow.fs").S3FileSystem(**given)


def _arrow_azure(netloc: str, arguments: Mapping[str, Any]) -> Any:
    """pyarrow's Azure filesystem; None if this pyarrow lacks it or these arguments.

    adlfs takes them then.
    """
    _, is_named, host = netloc.rpartition("@")  # container@account.dfs.core.windows.net
    account = {"account_name": host.partition(".")[0]} if is_named else {}
    try:
        return load_pyarrow("pyarrow.fs").AzureFileSystem(**{**account, **arguments})
    except (AttributeError, ImportError, TypeError):
        return None


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with those that s3fs hands to its client among them."""
    return {**options, **options.get("client_kwargs", {})}


def _arguments(family: _Family, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of fsspec for a library's credentials, account and endpoint."""
    known = {_short(family, name): value for name, value in options.items() if value is not None and value != ""}
    found: dict[str, Any] = {}
    for name, argument in family.arguments.items():
        if name in known:
            found.setdefault(argument, known[name])
    if str(found.get("anon")).lower() in {"true", "false"}:
        found["anon"] = str(found["anon"]).lower() == "true"
    if isinstance(found.get("token"), str) and found["token"].lstrip().startswith("{"):  # the text of a key of Google
        found["token"] = json.loads(found["token"])
    return found


def _short(family: _Family, name: str) -> str:
    name = name.lower()
    prefix = next((one for one in family.prefixes if name.startswith(one)), "")
    return name[len(prefix) :].replace("-", "_")


def _google_credentials(token: Any) -> dict[str, str]:
    """Options of object_store for the token of gcsfs.

    The token is a file, a key, a way to find one, or "anon" for none.
    """
    if isinstance(token, Mapping):
        return {"google_service_account_key": json.dumps(dict(token))}
    if token == "anon":
        return {"google_skip_signature": "true"}
    is_file = isinstance(token, str) and token not in {"google_default", "cache", "cloud", "browser"}
    return {"google_service_account": token} if is_file else {}
