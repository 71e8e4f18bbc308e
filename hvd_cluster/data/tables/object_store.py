"""Options of S3 in the words of each library: fsspec, pyarrow, pyiceberg, and object_store of deltalake and lance."""

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


def is_of_a_format(options: Mapping[str, Any] | None) -> bool:
    """Whether options are those of a format's library (``aws_...``, ``s3....``), and not fsspec's."""
    return any(name.lower().startswith(("aws_", "s3.")) for name in options or ())


def place_of(url: str, options: Mapping[str, str] | None) -> tuple[Any, str]:
    """The Store or filesystem of a URL that is opened with a library's options, and the path in it."""
    if not is_of_a_format(options) or not url.startswith(("s3://", "s3a://")):
        store = Store.create(url)
        return store, store.get_localized_path(store.prefix)
    known = {
        name.lower().removeprefix("aws_").removeprefix("s3.").replace("-", "_"): value
        for name, value in (options or {}).items()
    }
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
