"""Credentials of S3 in the words of each library: fsspec, pyarrow, and Rust's object_store (deltalake, lance)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.store import Store

#: Argument of fsspec's S3 filesystem -> option of object_store.
_OPTIONS = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint",
    "region_name": "aws_region",
}


def options_of(storage_options: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Options of object_store for arguments of fsspec's S3 filesystem; what it knows already stays."""
    if not storage_options:
        return None
    given = {**storage_options, **storage_options.get("client_kwargs", {})}
    options = {_OPTIONS.get(name, name): str(value) for name, value in given.items() if isinstance(value, (str, bool))}
    return _with_http(options)


def _with_http(options: dict[str, str]) -> dict[str, str]:
    if options.get("aws_endpoint", "").startswith("http:"):
        options.setdefault("aws_allow_http", "true")
    return options


def place_of(url: str, options: Mapping[str, str] | None) -> tuple[Any, str]:
    """The Store or filesystem of a URL that another library opened with options of object_store, and the path in it."""
    store = Store.create(url)
    if not options or not url.startswith(("s3://", "s3a://")):
        return store, store.get_localized_path(store.prefix)
    known = {name.lower().removeprefix("aws_"): value for name, value in options.items()}
    names = {
        "access_key": known.get("access_key_id"),
        "secret_key": known.get("secret_access_key"),
        "session_token": known.get("session_token"),
        "endpoint_override": known.get("endpoint") or known.get("endpoint_url"),
        "region": known.get("region") or known.get("default_region"),
    }
    given = {name: value for name, value in names.items() if value}
    if str(given.get("endpoint_override", "")).startswith("http:"):
        given["scheme"] = "http"
    return load_pyarrow("pyarrow.fs").S3FileSystem(**given), url.split("://", 1)[1].rstrip("/")
